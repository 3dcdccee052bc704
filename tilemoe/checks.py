"""One-line ValueErrors for settings; each names the setting, what it may be and what it was. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Value = TypeVar("Value")
_NONE: Mapping[str, int] = MappingProxyType({})


def require_int(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    if value >= 1 << 63:  # neither tensors nor random-number generators take it
        raise ValueError(f"{name} must be below 2**63, got one of {value.bit_length()} bits")


def require_finite(name: str, value: Any, *, positive: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be a finite number {'> 0' if positive else '>= 0'}, got {value!r}")


def require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def require_choice(name: str, value: Any, choices: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(sorted(choices))}; got {value!r}")


def find_named(what: str, name: Any, table: Mapping[str, Value]) -> Value:
    """The entry called ``name``, whatever its case and whether its words are joined by - or _."""
    entries = {_spelled(key): value for key, value in table.items()}
    if not isinstance(name, str) or _spelled(name) not in entries:
        raise ValueError(f"{what} must be one of {', '.join(sorted(table))}; got {name!r}")
    return entries[_spelled(name)]


def _spelled(name: str) -> str:
    return name.lower().replace("_", "-")


def require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value or "\0" in value:  # no path holds a NUL
        raise ValueError(f"{name} must be a non-empty text without NUL, got {value!r}")


def require_fields(
    where: str, config: Any, *, at_least: Mapping[str, int] = _NONE, positive: tuple[str, ...] = ()
) -> None:
    """Each field of a dataclass is what its annotation says; ``where`` goes before its name.

    A bool, a Literal's choice, an integer >= 0 or what ``at_least`` says, a finite number >= 0, or > 0 if it is among
    ``positive``. Fields of other types, and None where it is allowed, pass.
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
