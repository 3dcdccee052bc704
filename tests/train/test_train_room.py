"""A run that lacked room for what its processes receive is, to the bit, the run that had enough from the start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import room_checks as checks
import torch
from helpers import raises_one_line
from ranks import named, run_on_ranks
from torch import Tensor, nn

from tilemoe.train import room
from tilemoe.train.job.processes import ALONE
from tilemoe.train.room import Room


@pytest.fixture(scope="module")
def results(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("room")
    (folder / "corpus").mkdir()
    for number in range(4):
        (folder / "corpus" / f"{number}.txt").write_text("abc de fgh ijk lm")
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(checks.FOLDER, str(folder))
        patch.setenv("TRITON_INTERPRET", "1")
        for ranks, theirs in ((2, checks.ON_TWO), (4, checks.ON_FOUR)):
            (folder / str(ranks)).mkdir()
            found |= run_on_ranks(selected(theirs), ranks, folder / str(ranks))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", named(checks.ON_TWO + checks.ON_FOUR, checks.ON_TWO[0]))
def test_processes_repeat(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


class Planted:
    """A capacity, of a device where so many rows are to be received in each work."""

    def __init__(self, rows: int, memory: int = 1000) -> None:
        self.rows, self.memory, self.arriving, self.forgotten = rows, memory, 0, 0
        self.learnt: list[tuple[list[int], int]] = []

    def overflow(self) -> Tensor:
        return torch.tensor([self.arriving, 0, 5] if self.arriving > self.rows else [0, 0, 0])

    def check(self) -> None:
        raise ValueError("a process had 9 tokens")

    def grow(self, rows: int, layer: int) -> None:
        assert layer == 5
        if rows > self.memory:
            raise RuntimeError("rank 0 has no memory")
        self.rows = rows + rows // 8

    def forget(self) -> None:
        self.forgotten += 1

    def learn(self, rows: list[int], most: int) -> None:
        self.learnt.append((rows, most))
        if most > self.memory:
            raise RuntimeError("rank 0 has no memory")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Room, Planted, list[str]]]:
    def make(*arguments: Any) -> tuple[Room, Planted, list[str]]:
        planted, said = Planted(*arguments), list[str]()
        monkeypatch.setattr(room, "capacity_of", lambda model, device: planted)
        return Room(nn.Module(), torch.device("cpu"), ALONE, said.append), planted, said

    return make


def test_each_layer_learns_from_the_last_steps(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_STEPS", 3)
    found, planted, said = made(160)
    for step in ([9, 1], [2, 2], [3, 4], [4, 3]):
        found.learn(step, 2 * max(step))
    assert planted.learnt == [([9, 4], 18), ([4, 4], 8)]
    planted.memory = 7
    for _ in range(2):
        found.learn([1, 1], 2)
    assert planted.learnt[2:] == [([4, 4], 8), ([4, 3], 0)], "it tries once, and each layer still learns"
    assert said == ["no room for more than 160 rows: rank 0 has no memory"]


def test_more_layers_than_one_that_have_learnt_too_little(made: Any) -> None:
    found, planted, said = made(16)
    needs = iter([20, 40, 80, 1])
    found._layers = 3
    found.until_it_fits(lambda: setattr(planted, "arriving", next(needs)), "step 3")
    assert (len(said), planted.forgotten) == (3, 1), "not one repeat for each"
    found.until_it_fits(lambda: None, "step 4")
    assert planted.forgotten == 1


def test_what_ends_in_one_line(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, planted, _ = made(16, 100)
    with raises_one_line("^step 3: this process would receive 101 rows; rank 0 has no memory$"):
        found.until_it_fits(lambda: setattr(planted, "arriving", 101), "step 3")
    found, planted, said = made(16)
    with raises_one_line("^step 3: the same tokens need more rows in each repeat; .* --train.deterministic"):
        found.until_it_fits(lambda: setattr(planted, "arriving", planted.rows + 1), "step 3", forwards=2)
    assert (len(said), found.repeats) == (1, 1), "there is no layer that could have had no room"
    found, planted, _ = made(16)
    monkeypatch.setattr(planted, "overflow", lambda: torch.tensor([0, 9, 0]))
    with raises_one_line("^a process had 9 tokens$"):
        found.until_it_fits(lambda: None, "step 3")
