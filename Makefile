# env: the pinned development environment in .venv · demo: train the tiny recipe · test · check: ruff, mypy and test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: env demo test check lint types wheel clean

env: $(STAMP)

# triton goes in without its dependencies and after torch: its interpreter and its cross-compiler serve the tests,
# and the CPU build of torch asks for none.
$(STAMP): requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("the pinned environment needs Python >= 3.11, this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps triton==3.6.0
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $(STAMP)

# A new folder each time: a run is never overwritten.
demo: env
	$(BIN)/tilemoe train --recipe tiny --train.out-dir runs/demo-$$(date +%Y%m%d-%H%M%S)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

test: env
	$(BIN)/python -m pytest -m "not gpu"

check: lint types test

wheel: env
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
