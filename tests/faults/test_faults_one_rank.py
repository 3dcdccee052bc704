"""NaN, infinity and overflow in one of two processes: in its part of a weight, its gradients, activations and scores.

The job ends, or goes on with finite numbers alone. Where it ends every process has an exit code that is not 0, one line
names the step, and the newest checkpoint loads and is that of an undisturbed job, to the bit: perhaps the one before
that which was being written.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from filesystem import ALL
from nonfinite import MODULES, PLACES, VALUES, Where, in_cotangent, in_logits, in_weight
from processes import STEPS, Place, four_steps
from writes import checkpoint_read, timeless

from tilemoe.train.checkpoints.names import list_checkpoints
from tilemoe.train.config import Recipe
from tilemoe.train.loop import Trainer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("forks")]
STEP = 3  # in which the numbers are there, after two checkpoints


@dataclass(frozen=True)
class Spoilt:
    """Process 1 gets a value somewhere when it begins with step `STEP`."""

    where: Where
    name: str
    value: float
    rank: int = 1

    @contextmanager
    def planted(self) -> Iterator[None]:
        real = Trainer._accumulate

        def accumulate(trainer: Trainer) -> Any:
            if trainer.step == STEP - 1:
                self.where(trainer.model, self.name, self.value)
            return real(trainer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_accumulate", accumulate)
            yield


def cases() -> list[Any]:
    """All; of the selection one of each kind that has a way of its own through a job."""
    places = {**PLACES, in_cotangent: MODULES}
    every = [
        (where, name, value) for where, names in places.items() for name, value in itertools.product(names, VALUES)
    ]
    if not ALL:
        experts, router = "blocks.0.mlp.experts", "blocks.0.mlp.router"
        every = [(in_weight, f"{experts}.w1", "nan"), (in_logits, router, "inf"), (in_cotangent, "norm", "inf")]
    return [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}-{case[2]}") for case in every]


@pytest.fixture(scope="module")
def recipe(corpus: Path) -> Recipe:
    base = four_steps(corpus)
    return replace(base, train=replace(base.train, save_every=1, keep_last=STEPS))


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The checkpoints of a job of two processes, as they are read."""
    place = Place(tmp_path_factory.mktemp("undisturbed"), recipe)
    ended = place.go(2, 0)
    assert (ended.code, ended.lines, ended.left) == (0, [], []), ended.err
    found = []
    while checkpoints := list_checkpoints(place.run):
        found.append(checkpoint_read(place.run))
        shutil.rmtree(checkpoints[-1])
    assert [content[0] for content in found] == [4, 3, 2, 1]
    return found


@pytest.mark.parametrize(("where", "name", "value"), cases())
def test_every_place(
    where: Where, name: str, value: str, recipe: Recipe, undisturbed: list[Any], tmp_path: Path
) -> None:
    place = Place(tmp_path, recipe)
    ended = place.go(2, 0, Spoilt(where, name, VALUES[value]))
    saved = checkpoint_read(place.run)
    assert ended.left == []
    if ended.code == 0:
        assert value == "overflow", "nothing was noticed"
        assert saved[0] == STEPS
        numbers = [number for record in timeless(place.run) for number in record.values() if type(number) is float]
        assert all(map(math.isfinite, numbers))
        assert ended.lines == []
        return
    is_finite_still = value == "overflow" and saved[0] >= STEP  # what is too large is an infinity a step later
    assert is_finite_still or saved in undisturbed[-2:], ended.err
    codes = [int(code) for code in re.findall(r"exitcode  : (-?\d+) ", ended.err)]
    assert codes, ended.err
    assert 0 not in codes
    speakers = [found[1] for line in ended.lines if (found := re.match(r"tilemoe: error: rank (\d) of 2: ", line))]
    assert 1 <= len(speakers) == len({*speakers}) == len(ended.lines), ended.err
    named = [line for line in ended.lines if re.search(rf"step [{STEP}-{STEPS}]\b", line)]
    assert named, ended.err
    assert "of rank 0 became" not in ended.err or where is not in_cotangent, "its loss is finite"
    assert any("the last checkpoint is" in line for line in named), ended.err
    assert not (place.run / "result.json").exists()
