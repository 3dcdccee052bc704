"""What the pages name is there: files, functions, tests, links, and the messages of the troubleshooting page.

A name is `path.py` or `path.py:name`, or `path.py:Class.method`, in backticks, its path below the root or tilemoe/. One
with a commit behind it, `path.py` at a207b99, may have gone.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import traceback
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import tilemoe
from tilemoe.kernels.experts.torch.backend import TorchBackend

ROOT = Path(__file__).parents[2]
LAB = ROOT / "docs" / "lab"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += [page for page in sorted(ROOT.glob("docs/**/*.md")) if LAB not in page.parents]
# These tell of code that has gone, too: only their links are held.
HISTORY = [ROOT / "CHANGELOG.md", *sorted(LAB.glob("*.md"))]
NAME = re.compile(r"`([\w./-]+\.py)(?::([\w.]+))?`(?!\s+at [0-9a-f]{7}\b)")
MESSAGES = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
HOLE = "…"  # for what a message fills in
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@cache
def names_in(path: Path) -> set[str]:
    """Functions, classes, constants at the top of a module, and ``Class.member``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= _defined(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member}" for inner in node.body for member in _defined(inner)}
    return names


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def missing(path: str, name: str | None) -> str | None:
    """What of a name is not there, in a few words."""
    found = [base / path for base in (ROOT, ROOT / "tilemoe") if (base / path).is_file()]
    if not found:
        return f"no file {path}"
    return None if name is None or name in names_in(found[0]) else f"no {name} in {path}"


@pytest.mark.parametrize("page", [*PAGES, *HISTORY], ids=lambda page: str(page.relative_to(ROOT)))
def test_each_item_of_a_list_begins_a_line(page: Path) -> None:
    assert not re.findall(r"[.)](?: |\n +)-\s+\S+", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_is_there(page: Path) -> None:
    gone = [missing(path, name or None) for path, name in NAME.findall(prose(page))]
    assert [one for one in gone if one] == []


def test_the_page_of_architecture_says_where_to_add() -> None:
    seams = prose(ROOT / "docs" / "architecture.md").split("## Seams")[1].split("## ")[0]
    for what in ("a format of operands", "an architecture", "an epilogue", "a data source", "an optimiser"):
        (row,) = (line for line in seams.splitlines() if line.startswith(f"| {what} |"))
        assert [name for path, name in NAME.findall(row) if missing(path, name) is None], what


def test_whatever_works_with_others_names_what_shows_it() -> None:
    rows = re.findall(r"^\| (.+?) \| (yes|no|untested)\b(.*)$", prose(ROOT / "docs" / "with.md"), re.M)
    assert len(rows) > 20
    shown = {name for name, _, rest in rows if re.search(r"`tests/[\w/]+\.py:(test|check)_\w+`", rest)}
    assert {name for name, works, _ in rows if works == "yes"} <= shown


def test_the_citation_is_of_this_version() -> None:
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (told["version"], told["license"]) == (tilemoe.__version__, "Apache-2.0")


@pytest.mark.parametrize("page", PAGES + HISTORY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(prose(page)) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_formulas_are_typeset() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    blocks = list(hooks["FORMULAS"].finditer((ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")))
    assert len(blocks) == 5
    shown = "".join(map(hooks["typeset"], blocks))
    assert "∑<sub>r of e</sub> <var>dh</var><sub>r</sub> <var>x</var><sub>t(r)</sub><sup>T</sup>" in shown
    assert "⟨<var>da'</var><sub>r</sub>, <var>a</var><sub>r</sub>⟩ + ⟨<var>do</var><sub>r</sub>," in shown
    assert re.findall(r"_(?:[ret]|t\(r\))(?!\w)|\^|sum over|[<>]", re.sub(r"<[^>]+>", "", shown)) == []


def test_a_page_that_another_links_to_has_its_links_in_the_site() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = SimpleNamespace(abs_src_path=str(ROOT / "SECURITY.md"), src_uri="SECURITY.md")
    assert hooks["linked"](page, "docs/faults.md") == ROOT / "docs" / "faults.md"


def test_the_way_of_a_tensor_is_the_one_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the table's frames those above the backend, met on a CPU."""
    text = prose(ROOT / "docs" / "architecture.md")
    told = [re.search(NAME, line) for line in text.splitlines() if re.match(r"\| \d \|", line)]
    frames = [f"{row[1]}:{row[2].rpartition('.')[2]}" for row in told if row]
    backend = next(place for place, frame in enumerate(frames) if frame.endswith("backend.py:up_proj_act"))
    met: list[str] = []

    def up_proj_act(self: TorchBackend, *args: Any) -> Any:
        package = str(ROOT / "tilemoe") + os.sep
        stack = [frame for frame in traceback.extract_stack() if frame.filename.startswith(package)]
        met.extend(f"{Path(frame.filename).relative_to(package).as_posix()}:{frame.name}" for frame in stack)
        return original(self, *args)

    original = TorchBackend.up_proj_act
    monkeypatch.setattr(TorchBackend, "up_proj_act", up_proj_act)
    tilemoe.MoE(tilemoe.MoEConfig(16, 8, 4, 2))(torch.randn(3, 16))
    assert met == frames[:backend]


@cache
def templates() -> tuple[str, ...]:
    """Every text of the package, with a hole for each value that it is formatted with."""
    found = []
    for path in sorted((ROOT / "tilemoe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def pieces(message: str) -> list[str]:
    return [piece for piece in message.split(HOLE) if piece.strip()]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_a_message_is_the_package_s(message: str) -> None:
    pattern = ".*".join(map(re.escape, pieces(message)))
    assert any(re.search(pattern, template, re.S) for template in templates())
