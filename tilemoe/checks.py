"""Checks of settings: each raises a one-line ValueError that names the setting, the valid values and the given one.

Standard library only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Value = TypeVar("Value")
_CONTROL = r"[\x00-\x1f\x7f-\x9f]"
_LONGEST = 120  # characters of a value that a message shows
_LONGEST_TOLD = 2000  # characters of each end of a message
_NONE: Mapping[str, int] = MappingProxyType({})


def shown(value: Any) -> str:
    """``value`` for a message: its repr on one line, truncated; only the type of tensors and arrays, without a read."""
    if hasattr(type(value), "dtype"):
        return type(value).__name__
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def told(error: BaseException | str) -> str:
    """A text, or an error's message or type, on one line, without control characters that could steer a terminal."""
    text = " ".join(str(error).split()) or type(error).__name__
    if len(text) > 2 * _LONGEST_TOLD:  # a file may have a name or a setting of any length; the fix is at the end
        text = f"{text[:_LONGEST_TOLD]} ... {text[-_LONGEST_TOLD:]}"
    return re.sub(_CONTROL, "\N{REPLACEMENT CHARACTER}", text)


def parse_json(text: str | bytes, of_table: Callable[[dict[str, Any]], Any] = dict) -> Any:
    """The value of JSON ``text``; ``of_table`` converts each table. ValueError: it is not JSON, or a table has a name
    twice, where one reader would take the first value and another the last.
    """

    def table(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) < len(pairs):
            [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{shown(name)} is there twice")
        return of_table(found)

    try:
        return json.loads(text, object_pairs_hook=table)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def require_int(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {shown(value)}")
    if value >= 1 << 63:  # overflows int64, which tensors and random-number generators use
        raise ValueError(f"{name} must be below 2**63, got an integer of {value.bit_length()} bits")


def require_finite(name: str, value: Any, *, positive: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < float("inf") or (positive and value == 0):
        raise ValueError(f"{name} must be a finite number {'> 0' if positive else '>= 0'}, got {shown(value)}")
    if isinstance(value, int) and value >= 1 << 63:  # a tensor cannot be multiplied by a larger integer
        raise ValueError(f"{name} must be below 2**63 or a float, got an integer of {value.bit_length()} bits")


def require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def require_choice(name: str, value: Any, choices: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(sorted(choices))}; got {shown(value)}")


def find_named(what: str, name: Any, table: Mapping[str, Value]) -> Value:
    """The entry of ``table`` called ``name``, ignoring case, with - equal to _. ValueError: there is none."""
    entries = {spelled(key): value for key, value in table.items()}
    if not isinstance(name, str) or spelled(name) not in entries:
        raise ValueError(f"{what} must be one of {', '.join(sorted(table))}; got {shown(name)}")
    return entries[spelled(name)]


def spelled(name: str) -> str:
    """The canonical spelling of a name: lower case, words joined by -."""
    return name.lower().replace("_", "-")


def require_type(name: str, value: Any, cls: type) -> None:
    if not isinstance(value, cls):
        article = "an" if cls.__name__[0] in "AEIOU" else "a"
        raise ValueError(f"{name} must be {article} {cls.__name__}, got {type(value).__name__}")


def require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or re.search(_CONTROL, value):  # these could steer a terminal
        raise ValueError(f"{name} must be a non-empty text without control characters, got {shown(value)}")


def require_path(name: str, value: Any) -> Path:
    """``value`` as a `Path`, with ~ expanded by `expand_user`; it need not exist. ValueError: it cannot be a path."""
    if not isinstance(value, PurePath):
        require_text(name, value)
    return expand_user(value)


def expand_user(path: str | PurePath) -> Path:
    """``path`` with ~ or ~user expanded to the home folder; ValueError if there is no such user or home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: no such home folder; write the path without ~, or set HOME") from error


def require_fields(
    where: str, config: Any, *, at_least: Mapping[str, int] = _NONE, positive: tuple[str, ...] = ()
) -> None:
    """ValueError unless each field of the dataclass ``config`` fits its annotation; ``where`` prefixes its name.

    Checked are bools; choices of a Literal; integers: >= 0, or >= their entry in ``at_least``; finite floats: >= 0, or
    > 0 if named in ``positive``. None passes where the annotation allows it. Fields of other types are not checked.
    """
    for name, hint in _hints_of(config.__class__).items():
        value, label = getattr(config, name), where + name
        if type(None) in get_args(hint):
            if value is None:
                continue
            hint = get_args(hint)[0]
        if get_origin(hint) is Literal:
            require_choice(label, value, get_args(hint))
        elif hint is bool:
            require_bool(label, value)
        elif hint is int:
            require_int(label, value, at_least.get(name, 0))
        elif hint is float:
            require_finite(label, value, positive=name in positive)


@cache
def _hints_of(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)
