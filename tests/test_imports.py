"""The package's import arrows, what importing it costs, and that it changes nothing of anybody else's."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import run_python

import tilemoe

ROOT = Path(tilemoe.__file__).parent
MAX_LINES = 520

# What each part may import besides itself. A part not listed here may not exist.
_LEAVES = {"checks", "config", "files", "runtime", "activations", "plan", "shape"}
_BELOW_LAYERS = _LEAVES | {"kernels", "ops", "routing"}
ALLOWED: dict[str, set[str]] = {
    "checks": set(),
    "files": {"checks"},
    "runtime": {"checks", "files"},
    "activations": {"checks", "runtime"},
    "config": {"activations", "checks"},
    "plan": {"checks", "runtime"},
    "shape": set(),
    "plots": set(),
    "kernels": _LEAVES,
    "ops": _LEAVES | {"kernels"},
    "routing": _LEAVES | {"kernels", "ops"},
    "reference": {"checks", "config", "activations", "plan"},
    "dispatch": _BELOW_LAYERS,
    "layers": _BELOW_LAYERS | {"dispatch"},
    "models": _BELOW_LAYERS | {"layers", "data"},
    "parallel": _BELOW_LAYERS | {"dispatch", "layers", "models", "integrations"},
    "data": {"checks", "files"},
    "recipes": set(),
    "perf": {"shape", "kernels", "config", "models"},
    "train": _BELOW_LAYERS | {"layers", "models", "parallel", "data", "recipes", "perf", "plots", "integrations"},
    "integrations": _BELOW_LAYERS | {"dispatch", "layers", "models"},
    "bench": _BELOW_LAYERS | {"layers", "models", "perf", "plots"},
    "cli": _BELOW_LAYERS
    | {"layers", "models", "data", "recipes", "train", "perf", "integrations", "bench", "testing", "plots"},
    "testing": _BELOW_LAYERS | {"reference"},
    "__main__": {"cli"},
}
# The whole package may read these of the root; whatever else it offers, import from its home.
ROOT_NAMES = {"__version__"}
# Third-party packages that a part may import; None: any that the package depends on.
THIRD_PARTY: dict[str, set[str] | None] = {
    **dict.fromkeys(ALLOWED),
    "checks": set(),
    "config": set(),
    "files": set(),
    "recipes": set(),
    "shape": set(),
    "plots": {"matplotlib"},
    "perf": set(),
    "data": {"numpy", "tokenizers", "pyarrow", "transformers", "jinja2"},  # the last two for chat templates alone
    "integrations": {"torch", "transformers", "torchtitan", "spmd_types", "safetensors", "peft", "megatron"},
    # All but the first are peers, where they are installed.
    "bench": {"torch", "sonicmoe", "scattermoe", "liger_kernel", "liger_cute_kernels", "unsloth", "unsloth_zoo"},
    **{part: {"torch"} for part in ("activations", "plan", "routing", "kernels", "ops", "reference")},
    **{part: {"torch"} for part in ("runtime", "dispatch", "parallel")},
    "layers": {"torch", "torchao"},
}
# Triton comes with PyTorch, but not on every machine.
TRITON_HOMES = re.compile(
    r"kernels\.experts\.(triton|hopper|blackwell)\b|kernels\.\w+\.triton|runtime\.(launch|launch_trace|precompile|c_launcher|device)$"
)
DEPENDENCIES = {"torch", "numpy", "rich", "tyro", "tokenizers", "safetensors", "matplotlib", "tensorboard", "pyarrow"}
DEPENDENCIES |= {"huggingface_hub", "torchao", "wandb"}  # where they are installed; tokenizers brings the first along


def module_files() -> dict[str, Path]:
    """Dotted name below the root ("" for the root itself) to file."""
    files = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


MODULES = module_files()
MODULE_NAMES = {f"tilemoe.{name}" for name in MODULES if name}


def part_of(module: str) -> str:
    """The row of the table that a module (dotted, below the root) belongs to."""
    return module if module in ALLOWED else module.partition(".")[0]


def imports_of(module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything a module imports, also inside functions, under TYPE_CHECKING, and by name."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name != "tilemoe")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tilemoe":
            yield node.lineno, f"tilemoe.{node.attr}"  # what a plain `import tilemoe` is used for
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value in MODULE_NAMES:
            yield node.lineno, str(node.value)  # a module's name as text is there to be imported


def module_named(absolute: str) -> str:
    """The module, dotted and below the root, that ``tilemoe.a.b.name`` lives in."""
    name = absolute.removeprefix("tilemoe").removeprefix(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_import_arrows(module: str) -> None:
    part = part_of(module)
    assert part in ALLOWED, f"tilemoe.{module}: add its part {part!r} to the table of import arrows"
    for line, absolute in imports_of(module):
        top = absolute.partition(".")[0]
        if top == "tilemoe":
            target = module_named(absolute)
            if target == "":
                assert absolute.removeprefix("tilemoe.") in ROOT_NAMES, f"{module}:{line} imports {absolute}"
                continue
            ok = part_of(target) in ALLOWED[part] | {part}
            assert ok, f"tilemoe/{module.replace('.', '/')}.py:{line}: {part} may not import {part_of(target)}"
        elif top == "triton":
            assert TRITON_HOMES.match(module), f"{module}:{line}: triton is imported in {TRITON_HOMES.pattern} alone"
        elif top not in sys.stdlib_module_names:
            permitted = THIRD_PARTY[part]
            permitted = DEPENDENCIES if permitted is None else permitted
            assert top in permitted, f"tilemoe/{module.replace('.', '/')}.py:{line}: {part} may not import {top}"


def test_table_has_no_cycle_and_no_row_without_a_module() -> None:
    order: list[str] = []
    rows = dict(ALLOWED)
    while rows:
        free = sorted(part for part, below in rows.items() if below <= set(order))
        assert free, f"a cycle among {sorted(rows)}"
        order += free
        rows = {part: below for part, below in rows.items() if part not in free}
    assert {part_of(module) for module in MODULES if module} == set(ALLOWED)


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither at import, nor later inside a function, nor for types alone."""
    imported = {name: {module_named(target) for _, target in imports_of(name)} - {""} for name in MODULES if name}
    assert circles_of(imported) == set()


def circles_of(imported: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of names that reach each other by what they import."""
    below = {name: names.copy() for name, names in imported.items()}
    for middle in imported:  # Warshall's closure
        for name in imported:
            if middle in below[name]:
                below[name] |= below[middle]
    found = {frozenset(other for other in below[name] if name in below[other]) for name in imported}
    return found - {frozenset()}


def test_folders_beside_each_other_import_one_way() -> None:
    """As train/job and train/checkpoints, the second of which imports the first; formats know no architecture."""
    imported: dict[str, set[str]] = {}
    for module in MODULES:
        for target in {module_named(name) for _, name in imports_of(module)}:
            ours, theirs = module.split("."), target.split(".")
            apart = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) == 2), None)
            if apart is not None and apart < min(len(ours), len(theirs)) - 1:  # in both there is a module below
                imported.setdefault(folder := ".".join(theirs[: apart + 1]), set())
                imported.setdefault(".".join(ours[: apart + 1]), set()).add(folder)
    assert "train.job" in imported["train.checkpoints"]
    assert {name for name in imported["kernels.experts.formats"] if name.startswith("kernels.experts")} == set()
    assert circles_of(imported) == set()


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_readable(module: str) -> None:
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{MODULES[module]} has {lines} lines"


def test_every_public_name_resolves_and_type_checkers_see_it() -> None:
    for name in tilemoe.__all__:
        assert getattr(tilemoe, name) is not None
    assert set(tilemoe.__all__) <= set(dir(tilemoe))
    with pytest.raises(AttributeError, match="module 'tilemoe' has no attribute 'nonsense'"):
        _ = tilemoe.nonsense
    tree = ast.parse(MODULES[""].read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen | {"__version__"} == set(tilemoe.__all__)


PLANNING = """
import tilemoe.models.flops as flops, tilemoe.models.hf_config as hf, tilemoe.models.presets as presets
config = presets.model_preset("qwen3-30b-a3b")
flops.flops_per_token(config), hf.hf_config_dict(config)
"""


@pytest.mark.parametrize(
    "code",
    [
        "import tilemoe; dir(tilemoe); tilemoe.MoEConfig(8, 8, 4, 2)",
        "import tilemoe.config",
        "import tilemoe; tilemoe.model_preset; import tilemoe.models.presets",
        "import tilemoe.train.config as c; c.load_recipe('tiny'); c.list_recipes()",
        PLANNING,
        "import sys, tilemoe.data; assert 'pyarrow' not in sys.modules",
    ],
    ids=["tilemoe", "config", "presets", "train.config", "planning", "data"],
)
def test_torch_is_not_imported_by(code: str) -> None:
    run_python(code + "\nimport sys\nassert 'torch' not in sys.modules, 'torch was imported'")


def test_importing_is_quick_and_changes_nothing() -> None:
    out = run_python(
        """
import logging, os, signal, time, warnings
import torch, torch.nn.functional, torch.distributed, torch.utils.checkpoint, torch.library

PLACES = [torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module, torch.autograd, torch.optim,
          torch.distributed, torch.utils.checkpoint, torch.library, torch.amp, torch.backends.cuda.matmul]

def state():
    return (os.environ.copy(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
            list(warnings.filters), list(logging.getLogger().handlers),
            [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)], torch.initial_seed(),
            torch.get_default_device())

before, attributes = state(), [dict(vars(place)) for place in PLACES]
start = time.perf_counter()
import tilemoe
tilemoe.MoE
seconds = time.perf_counter() - start
for place, was in zip(PLACES, attributes):
    now = vars(place)
    for name, value in was.items():
        assert now[name] is value, f"{place.__name__}.{name} was replaced"
assert state() == before, "importing tilemoe changed the process"
assert not torch.cuda.is_initialized()
print(seconds)
"""
    )
    assert float(out) < 2.0, f"importing tilemoe.MoE took {out} s beyond torch's own import"


def test_kernels_are_imported_where_tensors_have_no_values() -> None:
    """As in a layer's first call if torch.compile or torch.export traces it."""
    run_python(
        """
import importlib, pkgutil
from torch._subclasses.fake_tensor import FakeTensorMode
import tilemoe.kernels
with FakeTensorMode():
    for module in pkgutil.walk_packages(tilemoe.kernels.__path__, "tilemoe.kernels."):
        importlib.import_module(module.name)
"""
    )


def test_no_two_modules_of_the_tests_share_a_name() -> None:
    """Processes of a job import them by it, whatever their folder."""
    names = [path.stem for path in Path(__file__).parent.rglob("*.py") if path.stem not in ("conftest", "__init__")]
    assert not [name for name, count in Counter(names).items() if count > 1]
