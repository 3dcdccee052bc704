"""Each file-system call of each kind of write fails once, in each way that fits, and once ends the process.

Then what was there before is there, or what was to be written, whole; the error is one line that names a file; and the
next try succeeds and leaves what an undisturbed one leaves.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from copies import Copy
from filesystem import ALL, FAULTS, KILLED, Call, Fault, complaint, watched
from writes import WRITES, Write, group_of_one

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("forks")]
SECONDS = 60  # that a copy of the process may take


class Kind:
    """A kind of write with what is known of it undisturbed: the calls, what is read before and after, the files."""

    def __init__(self, name: str, corpus: Path, folder: Path) -> None:
        self.write: Write = WRITES[name](corpus)
        self.place = folder / "place"
        self._begun = folder / "begun"
        self.write.begin(self._begun)
        self.start()
        self.before = self.write.read(self.place)
        self.calls = self._recorded()
        self.after = self.write.read(self.place)
        assert self.before != self.after
        self.again()
        self.final, self.files = self.write.read(self.place), self.names()

    def start(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self._begun, self.place)

    def _recorded(self) -> list[Call]:
        with watched(self.place) as calls, self.write.context():
            self.write.write(self.place)
        return calls.made

    def again(self) -> None:
        with watched(self.place), self.write.context():
            self.write.again(self.place)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.place)) for path in self.place.rglob("*")}

    def numbers(self, fault: str) -> list[int]:
        """The calls to which it may come: all, or some, so that each function has a fault and each fault a call."""
        own = [(n, call) for n, call in enumerate(self.calls) if not call.path.startswith(self.write.elsewhere)]
        fitting = [number for number, call in own if call.fits(fault)]
        if ALL:
            return fitting
        first = {call.name: number for number, call in reversed(own)}
        faults_of = {name: [f for f in FAULTS if self.calls[first[name]].fits(f)] for name in first}
        turn = [
            first[name] for i, name in enumerate(sorted(first)) if faults_of[name][i % len(faults_of[name])] == fault
        ]
        return turn or fitting[:1]


@pytest.fixture(scope="module")
def kinds(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kind]:
    return cache(lambda name: Kind(name, corpus, tmp_path_factory.mktemp("kind")))


@pytest.mark.parametrize("name", WRITES)
def test_the_recording_has_what_a_write_needs(name: str, kinds: Callable[[str], Kind]) -> None:
    """Were a function missed, its faults would be, too: every file that is new was opened, written and renamed."""
    kind = kinds(name)
    seen = {call.name for call in kind.calls}
    assert {"open", "write", "close", "fsync"} <= seen
    assert seen & {"rename", "replace"}
    assert len(kind.calls) > 10


def outcome(kind: Kind, fault: Fault) -> list[str]:
    """What is wrong with what came of one fault."""

    def disturbed() -> None:
        with kind.write.context(), watched(kind.place, fault):
            kind.write.write(kind.place)

    kind.start()
    wrong: list[str | None] = []
    succeeded = False
    if "kill" in fault.kind:
        code = Copy(disturbed).finish(SECONDS)
        wrong.append(None if code == KILLED else f"exit code {code}")
    else:
        try:
            disturbed()
            succeeded = True
        except Exception as error:
            wrong.append(complaint(error, kind.place.parent))
    return [found for found in (*wrong, *state(kind, succeeded), *next_try(kind)) if found]


def state(kind: Kind, succeeded: bool) -> Iterator[str]:
    try:
        found = kind.write.read(kind.place)
    except Exception as error:
        yield f"cannot be read: {type(error).__name__}: {error}"
        return
    spared = kind.write.spared
    if succeeded and [*found[:spared]] != [*kind.after[:spared]]:
        yield "it says that it succeeded, and it did not"
    elif not is_between(found, kind):
        yield "neither the old nor the new content"


def is_between(found: Any, kind: Kind) -> bool:
    """Whether it is the old or the new content; of a list of files, each; of records, as many from the first on."""
    if not isinstance(found, list):
        return found in (kind.before, kind.after)
    parts = zip(found, kind.before, kind.after, strict=True)
    return all(part in (old, new) or (isinstance(part, list) and part == new[: len(part)]) for part, old, new in parts)


def next_try(kind: Kind) -> Iterator[str]:
    try:
        kind.again()
        if kind.write.read(kind.place) != kind.final:
            yield "the next try gives something else"
    except Exception as error:
        yield f"the next try fails: {type(error).__name__}: {error}"
    if kind.names() != kind.files:
        yield f"the next try leaves other files: {sorted(kind.names() ^ kind.files)}"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", WRITES)
def test_every_call(
    name: str, fault: str, kinds: Callable[[str], Kind], record_property: Callable[[str, Any], None]
) -> None:
    kind = kinds(name)
    failed = []
    numbers = kind.numbers(fault)
    if not numbers:
        assert fault == "EPERM"  # which chmod alone gives
        pytest.skip("it makes no call that fails so")
    for number in numbers:
        call = kind.calls[number]
        where = f"{name}, {fault} at call {number}, {call.name} {call.path}"
        failed += [f"{where}: {found}" for found in outcome(kind, Fault(fault, number))]
    record_property("cases", len(numbers))
    if failed:
        pytest.fail(f"{len(failed)} of {len(numbers)}\n" + "\n".join(failed[:30]), pytrace=False)


def test_a_copy_ends_nothing_that_it_inherited() -> None:
    """A process group's destructor would wait for threads that only its first process has."""
    with group_of_one():
        cycle: list[Any] = [dist.group.WORLD]
    cycle.append(cycle)
    del cycle
    assert Copy(lambda: gc.collect() * 0).finish(10) == 0
