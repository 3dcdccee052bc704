"""Two copies of this process that take turns, from one stage of theirs to the next, in an order that is given."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from copies import Copy
from processes import place_of

WAITS = "waits for a lock"


def orders(turns: int) -> Iterator[str]:
    """Every order of so many turns of each of two that do the same, of which "A" begins."""
    for places in itertools.combinations(range(1, 2 * turns), turns - 1):
        yield "".join("A" if place in (0, *places) else "B" for place in range(2 * turns))


class Player:
    """A copy that stops at each of ``stages``, functions, when it first calls it, and where it would wait for a lock.

    output: the file with what it prints.
    """

    def __init__(self, work: Callable[[], object], stages: Sequence[str], output: Path) -> None:
        self.output = output
        self._pipe, theirs = Pipe()
        self._copy = Copy(lambda: _play(work, stages, output, theirs))
        theirs.close()
        self.at = self._next()

    def turn(self) -> None:
        """On to the next stage, or to its end."""
        if self.at is not None:
            self._pipe.send("go")
            self.at = self._next()

    def _next(self) -> str | None:
        try:
            stage: str = self._pipe.recv()
        except EOFError:
            return None
        return stage

    @property
    def code(self) -> int:
        return self._copy.wait(60)


def play(order: str, players: dict[str, Player]) -> None:
    """The turns of ``order``, then of all in turn until they have ended; who waits for a lock tries again."""
    for name in order:
        players[name].turn()
    while any(player.at is not None for player in players.values()):
        for player in players.values():
            player.turn()


def _play(work: Callable[[], object], stages: Sequence[str], output: Path, pipe: Connection) -> object:
    for number in (1, 2):
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)

    def stop(stage: str) -> None:
        pipe.send(stage)
        pipe.recv()

    def stopping(stage: str, real: Callable[..., Any]) -> Callable[..., Any]:
        came: list[str] = []

        def function(*arguments: Any, **options: Any) -> Any:
            if not came:
                came.append(stage)
                stop(stage)
            return real(*arguments, **options)

        return function

    def flock(descriptor: int, operation: int) -> None:
        while not operation & fcntl.LOCK_NB:
            with suppress(BlockingIOError):
                real_flock(descriptor, operation | fcntl.LOCK_NB)
                return
            stop(WAITS)
        real_flock(descriptor, operation)

    real_flock = fcntl.flock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        for stage in stages:
            owner, name = place_of(stage)
            patch.setattr(owner, name, stopping(stage, getattr(owner, name)))
        stop("start")
        return work()
