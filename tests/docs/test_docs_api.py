"""Every public name is on a page of docs/api, and has an example that runs.

Public is what `tilemoe`, `tilemoe.parallel`, `tilemoe.reference` and `tilemoe.testing` export.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import tilemoe
import tilemoe.parallel
import tilemoe.testing
from tilemoe.integrations import transformers as integration
from tilemoe.kernels.experts import registry

DOCS = Path(__file__).parents[2] / "docs"
NAMES = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in sorted(DOCS.glob("api/*.md"))), re.M)


def found(name: str) -> Any:
    """What a dotted name is."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


@pytest.fixture
def for_examples(one_process: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder and a job of this process alone; what examples register is gone after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    yield
    integration.unregister()


def failures(thing: Any, name: str) -> str:
    """What doctest prints of the examples of ``thing`` that go wrong."""
    given = {"torch": torch, "tilemoe": tilemoe, "Path": Path}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", given, name, None, None)
    assert test.examples, f"{name} has no example"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=printed.append)
    return "".join(printed)


def test_the_pages_have_every_public_name() -> None:
    named = [found(name) for name in NAMES]
    offered = [vars(tilemoe.testing)[name] for name in vars(tilemoe.testing) if not name.startswith("_")]
    for package in (tilemoe, tilemoe.parallel, tilemoe.reference):
        offered += [getattr(package, name) for name in package.__all__]
    assert [thing for thing in offered if callable(thing) and thing not in named] == []


@pytest.mark.usefixtures("for_examples")
@pytest.mark.parametrize("name", [*NAMES, "tilemoe.reference"])
def test_its_examples_are_right(name: str) -> None:
    assert failures(found(name), name) == ""
