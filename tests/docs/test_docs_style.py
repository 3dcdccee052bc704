"""Sentences that a reader can follow, and messages in the troubleshooting page that the package really gives."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "quickstart").glob("*.md"))]
MOST_WORDS = 40
MESSAGES = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
HOLE = "…"  # for what a message fills in


def sentences(text: str) -> list[str]:
    """Of prose, list items and cells of tables; without code, links' addresses and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?=- |\| |#)", text)
    cells = [cell for block in blocks for cell in (block.split("|") if block.startswith("|") else [block])]
    return [part for cell in cells for part in re.split(r"(?<=[.!?])\s+(?=[`*\w\[(])", cell.strip())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_is_long(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    assert [text for text in found if len(text.split()) > MOST_WORDS] == []


def test_a_long_sentence_is_found() -> None:
    text = "# Title\n\nShort one. " + "word " * 41 + "end.\n\n| a cell | " + "cell " * 41 + "|\n"
    assert [len(part.split()) for part in sentences(text) if len(part.split()) > MOST_WORDS] == [42, 41]


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


def test_there_are_many_messages() -> None:
    assert len(MESSAGES) >= 40
    assert all(sum(map(len, pieces(message))) >= 12 for message in MESSAGES)  # enough to tell one from another
