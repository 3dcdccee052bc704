"""A signal to any process of a run in any stage: the run goes on to the end that an undisturbed one has, to the bit, or
its exit code and one line of each process say why it ended, and it goes on from its newest checkpoint to that end.

Alone and as jobs of torchrun, with and without its restarts. No process is left behind. So it is by Muon, on
conversations and of adapters, where another number of processes may go on, too.
"""

from __future__ import annotations

import itertools
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from filesystem import ALL
from processes import STAGES, STEPS, TRAINED, Ended, Place, Signal, four_steps
from writes import checkpoint_read

from tilemoe.cli.main import main
from tilemoe.train.config import Recipe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("forks")]
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
    trained: str = "text"

    def __str__(self) -> str:
        what = self.number.name + (" that lasts" if self.lasts else "")
        how = "alone" if self.restarts is None else f"{self.restarts} restarts"
        of_what = "" if self.trained == "text" else f"{self.trained}-"
        return f"{of_what}{self.stage}-{what}-rank{self.rank}of{self.processes}-{how}"


OTHERS = ("muon", "conversations", "adapters")
SIGNALS = ((KILL, False), (TERM, False), (INT, False), (STOP, False), (STOP, True))


def cases() -> list[Any]:
    """All; of the selection each stage with one signal to a process alone, three jobs. By Muon and so on SIGKILL."""
    found = []
    for stage, processes, restarts, signalled in itertools.product(STAGES, PROCESSES, (0, 1), SIGNALS):
        if signalled[1] and (processes == 1 or STAGES[stage][0] == STEPS):
            continue  # nobody is there to notice, or no longer
        how = None if processes == 1 and restarts == 0 else restarts
        found += [Case(stage, *signalled, rank, processes, how) for rank in range(processes)]
    killed = [case for case in found if case.number == KILL and (case.processes, case.restarts) in ((1, None), (2, 0))]
    others = [replace(case, trained=trained) for trained in OTHERS for case in killed]
    if not ALL:
        turn = {stage: SIGNALS[number % 4] for number, stage in enumerate(STAGES)}
        alone = [case for case in found if case.restarts is None and turn[case.stage] == (case.number, case.lasts)]
        found = [*alone, Case("forward", KILL, False, 1, 2, 1), Case("update", TERM, False, 1, 2, 0)]
        others = [case for case in others if (case.processes, case.stage) == (1, "update")]
    return [pytest.param(case, id=str(case)) for case in [*found, *others]]


def other_numbers() -> list[Any]:
    """What is trained, by how many processes at first and by how many later."""
    found = [*itertools.product(OTHERS, ((1, 2), (2, 1), (2, 4), (4, 2)))]
    if not ALL:
        found = [("muon", (1, 2))]
    return [pytest.param(trained, *numbers, id=f"reshard-{trained}-{numbers}") for trained, numbers in found]


@pytest.fixture(scope="module")
def recipes(corpus: Path) -> dict[str, Recipe]:
    return {trained: four_steps(corpus, trained) for trained in TRAINED}


@pytest.fixture(scope="module", autouse=True)
def parsed(recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory) -> None:
    """What reading a command line and a step import and remember, which the copies then have."""
    place = Place(tmp_path_factory.mktemp("parsed"), recipes["text"])
    assert main(place.command(1, 60)) == 0


@pytest.fixture(scope="module")
def undisturbed(recipes: dict[str, Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    """The end of a run of so many processes."""

    @cache
    def end(trained: str, processes: int) -> Any:
        place = Place(tmp_path_factory.mktemp("undisturbed"), recipes[trained])
        finish(place, processes)
        found = place.end()
        assert found[2:] == (True, [])
        return found

    return end


def finish(place: Place, processes: int) -> Ended:
    ended = place.go(processes, None if processes == 1 else 0)
    assert (ended.code, ended.lines, ended.left) == (0, [], []), ended.err
    return ended


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
def test_every_stage(
    case: Case, recipes: dict[str, Recipe], undisturbed: Callable[[str, int], Any], tmp_path: Path
) -> None:
    place, expected = Place(tmp_path, recipes[case.trained]), undisturbed(case.trained, case.processes)
    reached = tmp_path / "reached"
    first = place.go(case.processes, case.restarts, Signal(case.stage, case.number, case.rank, reached, case.lasts))
    assert reached.exists(), first.err
    wrong = [f"left behind: {process}" for process in first.left]
    if not (first.code == 0 and (place.run / "result.json").exists()):
        wrong += complaints(first, case)
        checkpoint_read(place.run)
        finish(place, case.processes)
    assert not wrong, f"{wrong}\n{first.code}\n{first.out}\n{first.err}"
    assert place.end() == expected


@pytest.mark.parametrize(("trained", "processes", "later"), other_numbers())
def test_another_number_of_processes_goes_on(
    trained: str,
    processes: int,
    later: int,
    recipes: dict[str, Recipe],
    undisturbed: Callable[[str, int], Any],
    tmp_path: Path,
) -> None:
    """From step 2 after SIGKILL, with the losses of the number that began, up to fp32's rounding."""
    place, (expected, *rest) = Place(tmp_path, recipes[trained]), undisturbed(trained, processes)
    place.go(processes, None if processes == 1 else 0, Signal("exit", KILL, 0, tmp_path / "reached"))
    shutil.rmtree(place.run / "step_00000004")  # an earlier kill might have left none: they are written meanwhile
    assert "step_00000002" in (out := finish(place, later).out), out
    found, *ends = place.end()
    assert ends[1:] == rest[1:]
    assert found[:2] == expected[:2]
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-5)


def losses_of(records: list[dict[str, Any]]) -> list[float]:
    """But for those of a subset of the held-out text, which is larger the more processes there are."""
    return [record["nats_per_token"] for record in records if record["kind"] == "train" or record["whole_split"]]
