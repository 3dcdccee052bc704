"""Messages in the troubleshooting page are those that the package really gives."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MESSAGES = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
HOLE = "…"  # for what a message fills in


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
