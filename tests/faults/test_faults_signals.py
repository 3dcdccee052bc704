"""A signal to any process of a run in any stage: the run goes on to the end that an undisturbed one has, to the bit, or
its exit code and one line of each process say why it ended, and it goes on from its newest checkpoint to that end.

Alone and as jobs of torchrun, with and without its restarts. No process is left behind.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filesystem import ALL
from processes import STAGES, STEPS, Ended, Place, Signal, four_steps
from writes import checkpoint_read

from tilemoe.cli.main import main
from tilemoe.train.config import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")
PROCESSES = (1, 2, 4)
KILL, TERM, INT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP


@dataclass(frozen=True)
class Case:
    stage: str
    number: signal.Signals
    lasts: bool  # of SIGSTOP: the process stays stopped
    rank: int
    processes: int
    restarts: int | None  # None: without torchrun

    def __str__(self) -> str:
        what = self.number.name + (" that lasts" if self.lasts else "")
        how = "alone" if self.restarts is None else f"{self.restarts} restarts"
        return f"{self.stage}-{what}-rank{self.rank}of{self.processes}-{how}"


SIGNALS = ((KILL, False), (TERM, False), (INT, False), (STOP, False), (STOP, True))


def cases() -> list[Any]:
    """All; of the selection each stage with one signal to a process alone, and two jobs."""
    found = []
    for stage, processes, restarts, signalled in itertools.product(STAGES, PROCESSES, (0, 1), SIGNALS):
        if signalled[1] and (processes == 1 or STAGES[stage][0] == STEPS):
            continue  # nobody is there to notice, or no longer
        how = None if processes == 1 and restarts == 0 else restarts
        found += [Case(stage, *signalled, rank, processes, how) for rank in range(processes)]
    if not ALL:
        turn = {stage: SIGNALS[number % 4] for number, stage in enumerate(STAGES)}
        alone = [case for case in found if case.restarts is None and turn[case.stage] == (case.number, case.lasts)]
        found = [*alone, Case("forward", KILL, False, 1, 2, 1), Case("update", TERM, False, 1, 2, 0)]
    return [pytest.param(case, id=str(case)) for case in found]


@pytest.fixture(scope="module")
def recipe(corpus: Path) -> Recipe:
    return four_steps(corpus)


@pytest.fixture(scope="module", autouse=True)
def parsed(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What reading a command line and a step import and remember, which the copies then have."""
    place = Place(tmp_path_factory.mktemp("parsed"), recipe)
    assert main(place.command(1, 60)) == 0


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """The end of a run of so many processes."""
    ends: dict[int, Any] = {}

    def end(processes: int) -> Any:
        if processes not in ends:
            place = Place(tmp_path_factory.mktemp("undisturbed"), recipe)
            ended = place.go(processes, None if processes == 1 else 0)
            assert (ended.code, ended.lines, ended.left) == (0, [], []), ended.err
            ends[processes] = place.end()
            assert ends[processes][2:] == (True, [])
        return ends[processes]

    return end


def complaints(ended: Ended, case: Case) -> Iterator[str]:
    """What is wrong with how a run ended that did not come to its end."""
    stopped = ended.out.count("stopped ")
    if case.restarts is None:
        expected = -KILL if case.number == KILL else 128 + case.number
        if ended.code != expected:
            yield f"exit code {ended.code} instead of {expected}"
        if len(ended.lines) + stopped != (case.number != KILL):
            yield "not one line"
    elif ended.code == 0:
        if case.number not in (TERM, INT) or stopped != 1 or ended.lines:
            yield "it has not come to its end, and does not say why"
    else:
        if case.restarts and case.number in (KILL, STOP):
            yield "it was not restarted"
        named = [line for line in ended.lines if re.search(rf"\brank {case.rank} (?!of)", line)]
        code = -KILL if case.number in (KILL, STOP) else 128 + case.number
        if f"exitcode  : {code} " not in ended.err and not named:
            yield "nobody names the rank"
        if 0 < STAGES[case.stage][0] < STEPS and len(named) < case.processes - 1:
            yield "not every process that is left has named it"
        speakers = [line.removeprefix("tilemoe: error: ")[:9] for line in ended.lines if " rank " in line]
        if len(speakers) > len(set(speakers)) or len(ended.lines) > case.processes:
            yield "a process has said two lines"


@pytest.mark.parametrize("case", cases())
def test_every_stage(case: Case, recipe: Recipe, undisturbed: Callable[[int], Any], tmp_path: Path) -> None:
    place, expected = Place(tmp_path, recipe), undisturbed(case.processes)
    reached = tmp_path / "reached"
    first = place.go(case.processes, case.restarts, Signal(case.stage, case.number, case.rank, reached, case.lasts))
    assert reached.exists(), first.err
    wrong = [f"left behind: {process}" for process in first.left]
    if not (first.code == 0 and (place.run / "result.json").exists()):
        wrong += complaints(first, case)
        checkpoint_read(place.run)
        second = place.go(case.processes, None if case.processes == 1 else 0)
        assert (second.code, second.lines, second.left) == (0, [], []), second.err
    assert not wrong, f"{wrong}\n{first.code}\n{first.out}\n{first.err}"
    assert place.end() == expected
