# env: the pinned development environment in .venv · demo: train the tiny recipe · test · newest-triton: what can be
# tested of the kernels on the newest Triton · oldest-transformers: the integration on it · docs: the site · check: all of
# these, ruff, codespell, mypy
# thorough: the tests that `test` leaves out for their time
# fuzz: tests/fuzz with all its cases (SHARE=0.1: a tenth of them), about four hours of one core; with SEED=N what is left
# of that seed's
# every-cell: the Hopper backend's up_proj and down_proj_dgrad compiled for each combination that they serve
# others: the tests with DeepSpeed, Liger and Lightning, which the environment has not; before a release
# oldest-torch, newest: what traces, compiles and differentiates, and the API's examples, on the oldest PyTorch, and on
# the newest with the newest transformers; recorded in results/versions.jsonl. Apart from check, because each downloads
# 3 GB: before a release, and once a week
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRITON := 3.6.0
TITAN := torchtitan==0.3.0 spmd_types==0.3.1 torchdata==0.11.0
# Its wheels are for Python 3.12; all but the index helpers of its datasets is Python, and runs on 3.11 too.
MEGATRON := --python-version 3.12 --only-binary=:all: --ignore-requires-python megatron-core==0.19.2
# In a folder of its own, to be put before the other.
NEWEST_TRITON := 3.9.0
NEWEST := $(VENV)/triton-$(NEWEST_TRITON)
# The oldest transformers that tilemoe.integrations serves, with what it needs, in a folder of its own too.
OLDEST_TRANSFORMERS := 5.7.0
OLDEST := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
# What else docs/with.md says yes to, each with what it needs of its own. DeepSpeed's package is made here, without its kernels.
OTHERS := deepspeed==0.19.8 hjson msgpack py-cpuinfo einops liger-kernel==0.8.5 lightning==2.6.6 pytorch-lightning==2.6.6 \
	torchmetrics lightning-utilities
OTHERS_AT := $(VENV)/others
# The oldest PyTorch that pyproject.toml asks for. torchtitan's tests are left out: that package needs a newer one.
OLDEST_TORCH := 2.11.0
OLD_TORCH := $(VENV)/torch-$(OLDEST_TORCH)
TRACED := $(addprefix --ignore tests/integrations/test_titan_,moe.py trainer.py) $(addprefix tests/,ops layers models routing \
	integrations parallel dispatch train/test_train_distributed_checkpoint.py docs/test_docs_api.py)
INTEGRATION := $(addprefix tests/integrations/test_,hf_parity.py hf_trainer.py hf_quantized_folders.py examples_run.py)
# The tests' processes, of one thread each. One takes over what another has not begun, from the end: a module's fixtures
# are seldom made twice. Bytecode is kept, whatever the environment says: hundreds of processes import the same files.
JOBS ?= 2
SHARE ?= 1
SEED ?= $(shell date +%s)
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
COMPILED := $(addprefix tests/kernels/test_,triton_compiled.py triton_every_kernel.py triton_fences.py hopper_compiled.py hopper_cells.py \
	blackwell_compiled.py)

# Tests for a GPU run nowhere here: at least their names and calls are looked at, though not all that is strict.
OF_GPU_TESTS := $(addprefix --disable-error-code=,arg-type assignment func-returns-value import-not-found misc union-attr) \
	--no-warn-unused-ignores

.PHONY: env demo test thorough fuzz faults every-cell newest-triton oldest-transformers others oldest-torch newest check checks lint types \
	docs wheel newcomer clean

env: $(STAMP)

# triton goes in without its dependencies and after torch: its interpreter and its cross-compiler serve the tests,
# and the CPU build of torch asks for none. So does torchtitan: its layers need none of its trainer's dependencies, some
# of which are older than ours.
$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("the pinned environment needs Python >= 3.11, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps triton==$(TRITON) $(TITAN)
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/lib/python3*/site-packages $(MEGATRON)
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $(STAMP)

$(NEWEST): $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part triton==$(NEWEST_TRITON)
	mv $@.part $@
	touch $@

$(OLDEST): $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install --quiet --target $@.part transformers==$(OLDEST_TRANSFORMERS)
	mv $@.part $@
	touch $@

$(OTHERS_AT): $(STAMP)
	rm -rf $@ $@.part
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $@.part $(OTHERS)
	mv $@.part $@
	touch $@

$(OLD_TORCH): $(STAMP)
	rm -rf $@ $@.part
	$(BIN)/python -m pip install --quiet --target $@.part torch==$(OLDEST_TORCH)
	mv $@.part $@
	touch $@

# A new folder each time: a run is never overwritten.
demo: env
	$(BIN)/tilemoe train --recipe tiny --train.out-dir runs/demo-$$(date +%Y%m%d-%H%M%S)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: env
	$(BIN)/mypy
	MYPYPATH=tests:tests/kernels $(BIN)/mypy $(OF_GPU_TESTS) $$(grep -rl --include='*.py' mark.gpu tests)

# What a newcomer runs: each promise that a CPU can show, once. Ten minutes of two idle cores.
test: env
	$(PYTEST) -m "not gpu and not thorough"

# The same promises in more cases; recorded in results/thorough.jsonl. Before a release, and once a week.
thorough: env
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/record_tests.py thorough -n $(JOBS) --dist worksteal

fuzz: env
	$(BIN)/python benchmarks/record_tests.py fuzz --share $(SHARE) --seed $(SEED) -n $(JOBS) --dist worksteal

# Every fault of tests/faults, of which the tests have a selection; recorded in results/faults.jsonl. Twenty minutes on two
# cores, and signals to jobs about an hour more.
faults: env
	TILEMOE_FAULTS=all OMP_NUM_THREADS=1 $(BIN)/python benchmarks/record_tests.py faults -n $(JOBS) --dist worksteal

# up_proj and down_proj_dgrad of the Hopper backend compiled for each combination of what they serve, of which the tests have a selection;
# recorded in results/every_cell.jsonl.
every-cell: env
	TILEMOE_CELLS=all OMP_NUM_THREADS=1 $(BIN)/python benchmarks/record_tests.py cells -n $(JOBS) --dist worksteal

# fp16 is left to the other release: it differs from bf16 in little, and this is to take a few minutes. So is the
# interpreter (test_*_values.py), which in this one refuses a mask made of a vector and a scalar.
newest-triton: env $(NEWEST)
	PYTHONPATH=$(NEWEST) $(BIN)/python -c 'import triton; assert triton.__version__ == "$(NEWEST_TRITON)", triton.__file__'
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -k "not fp16 and (bfloat16 or not float16)" $(COMPILED)

oldest-transformers: env $(OLDEST)
	PYTHONPATH=$(OLDEST) $(BIN)/python -c 'import transformers; assert transformers.__version__ == "$(OLDEST_TRANSFORMERS)"'
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest $(INTEGRATION)

others: env $(OTHERS_AT)
	PYTHONPATH=$(OTHERS_AT) $(BIN)/python -c 'import deepspeed, liger_kernel, lightning'
	PYTHONPATH=$(OTHERS_AT) $(PYTEST) $(addprefix tests/integrations/test_,deepspeed.py liger.py lightning.py)

oldest-torch: env $(OLD_TORCH)
	PYTHONPATH=$(OLD_TORCH) $(BIN)/python -c 'import torch; assert torch.__version__.startswith("$(OLDEST_TORCH)")'
	PYTHONPATH=$(OLD_TORCH) $(BIN)/python benchmarks/record_tests.py versions $(TRACED)

# The newest of both that pip gives today, with the Triton that this torch asks for; apart from check, as oldest-torch is.
newest: env
	$(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/newest torch transformers
	PYTHONPATH=$(VENV)/newest $(BIN)/python -c 'import torch, transformers; print(torch.__version__, transformers.__version__)'
	PYTHONPATH=$(VENV)/newest $(BIN)/python benchmarks/record_tests.py versions $(TRACED)

# What uses one core goes two at a time. The tests use all cores and come last, alone, because some of them wait for
# processes of theirs only so long; their closing line ends the output.
check: checks test

checks: env
	$(MAKE) --jobs 2 --output-sync lint types docs newest-triton oldest-transformers

# The site, from docs/ and the docstrings, in build/site. A broken link or a page outside the nav fails,
# but not with --quiet, which hides warnings from --strict, too.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: env
	$(BIN)/python -m build --wheel --outdir dist .

# README and every quick start as written, timed in a new environment; recorded in results/newcomer.jsonl.
newcomer: env
	$(BIN)/python tests/docs/newcomer.py $(NOTE)

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
