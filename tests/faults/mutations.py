"""Files changed by number: the same number makes the same change."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count
from typing import Any

HUGE = (-1, 0, 10**6, 2**31, 2**63, 10**30, -(2**63) - 1)
VALUES = (None, True, False, "", "x", "\ud800", -1, 0, 1, 1.5, float("nan"), float("inf"), [], {}, [[]], {"": {}})


def _cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content) + 1)]


def _flip(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 8, 64)) if content else 0):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _drop(content: bytes, dice: random.Random) -> bytes:
    first, last = sorted(dice.randrange(len(content) + 1) for _ in range(2))
    return content[:first] + content[last:]


def _swap(content: bytes, dice: random.Random) -> bytes:
    first, second = sorted(dice.randrange(len(content) + 1) for _ in range(2))
    return content[second:] + content[first:second] + content[:first]


def _grow(content: bytes, dice: random.Random) -> bytes:
    place = dice.choice((0, len(content), dice.randrange(len(content) + 1)))
    more = dice.choice((b"\0", b"\xff\xfe", b"\n", b"{}", b"\n" * 5000, content, dice.randbytes(100)))
    return content[:place] + more + content[place:]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a JSON value with each of its keys."""
    found, todo = [], [value]
    while todo:
        at = todo.pop()
        for key in at if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ():
            found.append((at, key))
            todo.append(at[key])
    return found


def _in_json(change: Callable[[Any, Any, random.Random], object]) -> Callable[[bytes, random.Random], bytes]:
    """Of a JSON file or, of a file of several, of one line."""

    def mutated(content: bytes, dice: random.Random) -> bytes:
        try:
            lines, place = [json.loads(content)], 0
        except ValueError:
            lines = [json.loads(line) for line in content.decode().splitlines() if line]
            place = dice.randrange(len(lines))
        container, key = dice.choice(
            _places([lines[place]]) if not isinstance(lines[place], dict) else _places(lines[place])
        )
        change(container, key, dice)
        return "\n".join(map(json.dumps, lines)).encode() + b"\n"

    return mutated


def _assign(values: Callable[[Any, random.Random], Any]) -> Callable[[Any, Any, random.Random], object]:
    def change(container: Any, key: Any, dice: random.Random) -> None:
        container[key] = values(container[key], dice)

    return change


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _extra(container: Any, key: Any, dice: random.Random) -> None:
    if isinstance(container, dict):
        container[dice.choice(("", "__class__", f"{key}x", "auto_map", "../x"))] = container[key]
    else:
        container.insert(key, container[key])


def _not_utf8(content: bytes, dice: random.Random) -> bytes:
    place = content.find(b'"', dice.randrange(max(len(content), 1))) + 1
    return content[:place] + b"\xff\xc3(" + content[place:]


def _deep(content: bytes, dice: random.Random) -> bytes:
    """Deeper than any parser's stack."""
    marks = dice.choice(("[", '{"a":', "[[{}],"))
    return (marks * 200_000).encode()


BINARY: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": _cut, "flip": _flip, "drop": _drop, "swap": _swap, "grow": _grow,
}  # fmt: skip
JSON: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "type": _in_json(_assign(lambda value, dice: dice.choice(VALUES))),
    "huge": _in_json(_assign(lambda value, dice: dice.choice(HUGE))),
    "nested": _in_json(_assign(lambda value, dice: _nested(value, dice.choice((1, 2, 500))))),
    "missing": _in_json(lambda container, key, dice: container.pop(key)),
    "extra": _in_json(_extra),
    "not utf-8": _not_utf8,
    "deep": _deep,
}


def mutations(name: str, content: bytes, others: Sequence[bytes]) -> Iterator[tuple[str, bytes | None]]:
    """What can become of a file of that name, no two alike: what is done to it, and the new content, None for no file.

    It is deleted, a folder, emptied, one of the ``others``; then it is changed in each way in turn, for ever.
    """
    yield from (("deleted", None), ("folder", None))
    whole = {"empty": b"", **{f"of another {number}": other for number, other in enumerate(others)}}
    ways = {**BINARY, **(JSON if name.endswith((".json", ".jsonl")) else {})}
    changed = ((f"{way} {n}", change(content, random.Random(n))) for n in count() for way, change in ways.items())
    seen = {content}
    for what, found in chain(whole.items(), changed):
        if found not in seen:
            seen.add(found)
            yield what, found
