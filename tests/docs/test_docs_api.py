"""Every public name has a docstring with shapes, dtypes, errors and an example that runs.

Public is what `tilemoe`, `tilemoe.parallel` and `tilemoe.reference` export and what the pages of docs/api name.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tilemoe
import tilemoe.parallel
import tilemoe.testing
from tilemoe.integrations import transformers as integration
from tilemoe.kernels.experts import registry

DOCS = Path(__file__).parents[2] / "docs"
NAMES = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in sorted(DOCS.glob("api/*.md"))), re.M)
EXPORTED = {name: getattr(tilemoe, name) for name in tilemoe.__all__ if name != "__version__"}
# Which nobody makes, so that nothing can be wrong with them.
RESULTS = ("MoEOutput", "Routing", "ReferenceRouting", "HostileRouting")
JUDGES = ("assert_equal", "assert_close_to_reference", "assert_moe_matches_reference", "relative_error")
COMPUTED = ("moe", "route", "TokenRounding", "RouterConfig", "RoutingRecord", "add_lora")  # by an equation, or a paper
SHAPE = re.compile(r"\((?:T|B|E|L|P|R|R_max|\.\.\.)[,)]")
DTYPE = re.compile(r"\b(?:bf16|fp32|fp64|int32|int64|bool|dtypes?|integers)\b")


def found(name: str) -> Any:
    """What a dotted name is."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def takes_tensors(thing: Any) -> bool:
    members = inspect.signature(thing).parameters.values()
    return any(re.search(r"\bTensor\b", str(member.annotation)) for member in members)


def lacking(thing: Any, name: str) -> list[str]:
    """What the docstring of ``thing`` has not."""
    text = inspect.getdoc(thing) or ""
    raised = "AssertionError" if name in JUDGES else "ValueError"
    needed = {"an example": ">>>" in text, "errors": name in RESULTS or raised in text}
    if name in COMPUTED:
        needed["an equation or a source"] = bool(re.search(r"``\w+ = .+``|arXiv \d{4}\.\d{5}", text))
    if takes_tensors(thing):
        needed |= {"shapes": bool(SHAPE.search(text)), "dtypes": bool(DTYPE.search(text))}
    return [what for what, has in needed.items() if not has]


def is_computed(member: Any) -> bool:
    """Whether it is a method or a property, and no field."""
    return isinstance(member, property | staticmethod | classmethod) or inspect.isfunction(member)


@pytest.fixture
def for_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder and a job of this process alone; what examples register is gone after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    integration.unregister()


def failures(thing: Any, name: str) -> str:
    """What doctest prints of the examples of ``thing`` that go wrong."""
    given = {"torch": torch, "tilemoe": tilemoe, "Path": Path}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", given, name, None, None)
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    return "".join(printed)


def test_the_pages_have_every_exported_name() -> None:
    named = [found(name) for name in NAMES]
    missing = [name for name, thing in EXPORTED.items() if thing not in named and not inspect.ismodule(thing)]
    assert missing == []
    assert any(name.startswith("tilemoe.reference.") for name in NAMES)


@pytest.mark.parametrize("package", [tilemoe.parallel, tilemoe.reference], ids=lambda package: package.__name__)
def test_the_pages_have_every_name_that_a_package_exports(package: ModuleType) -> None:
    named = [found(name) for name in NAMES]
    assert [name for name in package.__all__ if getattr(package, name) not in named] == []


def test_the_pages_have_every_name_of_tilemoe_testing() -> None:
    named = [found(name) for name in NAMES]
    offered = {name: thing for name, thing in vars(tilemoe.testing).items() if callable(thing)}
    assert [name for name, thing in offered.items() if thing not in named] == []
    assert {"hostile_routings", "assert_moe_matches_reference", "poisoned_memory"} <= set(offered)
    page = (DOCS / "api" / "testing.md").read_text(encoding="utf-8")
    said = {name: float(cap) for cap, name in re.findall(r"(\de-\d+) in ((?:bf|fp)\d+)", page)}
    caps = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    assert said == {name: tilemoe.testing.ERROR_CAPS[dtype] for name, dtype in caps.items()}


@pytest.mark.parametrize("name", NAMES)
def test_it_has_a_docstring_with_all_that_belongs_in_it(name: str) -> None:
    assert lacking(found(name), name.rpartition(".")[2]) == []


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(found(name))])
def test_its_methods_and_properties_are_documented(name: str) -> None:
    """Inherited docstrings count, as the contract of `tilemoe.Backend`'s methods."""
    thing = found(name)
    own = [member for member in vars(thing) if not member.startswith("_") and is_computed(vars(thing)[member])]
    assert [member for member in own if not inspect.getdoc(getattr(thing, member))] == []


@pytest.mark.usefixtures("for_examples")
@pytest.mark.parametrize("name", [*NAMES, "tilemoe.reference"])
def test_its_examples_are_right(name: str) -> None:
    assert failures(found(name), name) == ""
