"""tyro with errors on one line: options come from a dataclass, mistakes become ValueErrors."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from typing import TypeVar

import tyro

T = TypeVar("T")

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_BOX = re.compile("[\u2500-\u257f]")
_RULE = re.compile("[\u2500\u2501]{5,}")


def parse(cls: type[T], arguments: Sequence[str], *, prog: str, description: str, default: T | None = None) -> T:
    """``arguments`` as an instance of the dataclass ``cls``; ``--help`` prints and exits.

    Raises:
        ValueError: an unknown option or a value that does not fit, on one line.
    """
    captured = io.StringIO()
    config = (tyro.conf.AvoidSubcommands,)  # no subcommands: an optional table is filled if it has a default
    try:
        with contextlib.redirect_stderr(captured):
            if default is None:
                return tyro.cli(cls, args=arguments, prog=prog, description=description, config=config)
            return tyro.cli(cls, args=arguments, prog=prog, description=description, default=default, config=config)
    except SystemExit as leave:
        if not leave.code:
            raise
        raise ValueError(f"{condense(captured.getvalue())} (see {prog} --help)") from None


def condense(box: str) -> str:
    """The message of tyro's boxed error report and its best suggestion, without the frame and the rest."""
    lines = _ANSI.sub("", box).splitlines()
    body: list[str] = []
    hint = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", _BOX.sub("", "\n".join(lines)))
    for line in lines:
        if _RULE.search(line):
            if body:
                break
            continue
        body.append(_BOX.sub("", line).strip())
    message = " ".join(" ".join(body).split()).rstrip(".")
    return f"{message}; perhaps you meant {hint[1]}" if hint else message
