"""tyro with errors on one line: options come from a dataclass, mistakes become ValueErrors."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar, get_args, get_type_hints

import tyro

from tilemoe.checks import spelled

T = TypeVar("T")

# Settings that other trainers name quite differently.
_OURS = {
    "learning-rate": "lr", "epochs": "steps", "num-train-epochs": "steps", "per-device-train-batch-size": "batch-size",
    "logging-steps": "log-every", "save-steps": "save-every", "eval-steps": "eval-every", "max-grad-norm": "grad-clip",
}  # fmt: skip

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_BOX = re.compile("[\u2500-\u257f]")
_RULE = re.compile("[\u2500\u2501]{5,}")


def parse(
    cls: type[T],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: T | None = None,
    others: Sequence[str] = (),
) -> T:
    """``arguments`` as an instance of the dataclass ``cls``; ``--help`` prints and exits.

    ``others``: options of the command that are parsed elsewhere; an unknown option may be meant to be one of them.

    ValueError: an unknown option or a value that does not fit, on one line.
    """
    captured = io.StringIO()
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(lambda info: _INTEGER if info.type is int else None)
    config = (tyro.conf.AvoidSubcommands,)  # no subcommands: an optional table is filled if it has a default
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(captured), registry:
            return tyro.cli(cls, args=arguments, prog=prog, description=description, config=config, **defaults)
    except SystemExit as leave:
        if not leave.code:
            raise
        message = _unknown_option(["--help", *others, *_options(cls)], arguments) or condense(captured.getvalue())
        switch = r"'\1' belongs to no option; a switch takes no value, as in --train.plot and --train.no-plot"
        message = re.sub(r"^.*Unrecognized options: (true|false)\b.*$", switch, message, flags=re.IGNORECASE)
        raise ValueError(f"{message} (see {prog} --help)") from None


def _whole_number(words: list[str]) -> int:
    """The integer that an option's value says, which may also be written as 1e3."""
    if not float(words[0]).is_integer():
        raise ValueError(f"{words[0]!r} is not a whole number")
    return int(float(words[0])) if set(words[0]) & set(".eE") else int(words[0])


_INTEGER = tyro.constructors.PrimitiveConstructorSpec(
    1, "INT", _whole_number, lambda value: type(value) is int, lambda value: [str(value)]
)


def options_given(words: Sequence[str]) -> list[str]:
    """The options on a command line, in their canonical spelling."""
    return [spelled(word.partition("=")[0]) for word in words if word.startswith("--")]


def _unknown_option(known: Sequence[str], arguments: Sequence[str]) -> str | None:
    """A message about the first unknown option, with the known one most like it; None: all are known."""
    unknown = next((name for name in options_given(arguments) if re.sub(r"\bno-", "", name) not in known), None)
    if unknown is None:
        return None
    likeness, best = max((_likeness(unknown, option), option) for option in known)
    return f"there is no option {unknown}" + (f"; perhaps you meant {best}" if likeness[0] > 0.6 else "")


def _options(cls: Any, prefix: str = "--") -> Iterator[str]:
    for name, hint in get_type_hints(cls).items():
        table = next(filter(is_dataclass, (hint, *get_args(hint))), None)
        yield from [prefix + spelled(name)] if table is None else _options(table, f"{prefix}{spelled(name)}.")


def _likeness(name: str, option: str) -> tuple[float, float]:
    """Likeness of the last parts, which other trainers have in another group or in none, and of the whole names."""
    leaf, ours = (each.removeprefix("--").rpartition(".")[2] for each in (name, option))
    return SequenceMatcher(None, _OURS.get(leaf, leaf), ours).ratio(), SequenceMatcher(None, name, option).ratio()


def condense(box: str) -> str:
    """The message in tyro's boxed error report, without the frame and whatever follows."""
    body: list[str] = []
    for line in _ANSI.sub("", box).splitlines():
        if _RULE.search(line):
            if body:
                break
            continue
        body.append(_BOX.sub("", line).strip())
    return " ".join(" ".join(body).split()).rstrip(".")
