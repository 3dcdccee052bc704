"""Two runs on one token cache, and two in one folder, in every order of their stages.

A cache is made once or twice and is right for both. Of two in a folder one trains; the other is told so, or goes on
from what it finds; the end is that of one run, to the bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filesystem import ALL
from turns import Player, orders, play
from writes import end_of_run, little, split_digests

from tilemoe.cli.main import main
from tilemoe.config import to_dict
from tilemoe.data import Prepared, prepare
from tilemoe.train.config import Recipe

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.process("forks")]
OF_CACHE = (
    "data.tokenizer:_train_bpe", "data.tokenizer:Tokenizer.save", "data.cache:_build", "data.cache:write_index",
    "data.cache:open_splits",
)  # fmt: skip
OF_FOLDER = (
    "train.run:prepare_data", "train.run:_owned", "train.run:_enter", "train.checkpoints.folder:drop_old",
    "train.run:_finish",
)  # fmt: skip


def some(kind: str, stages: tuple[str, ...], every: int) -> list[Any]:
    found = [*orders(len(stages) + 1)][:: 1 if ALL else every]
    return [pytest.param(order, id=f"{kind}-{order}") for order in found]


def take_turns(order: str, work: Callable[[], object], stages: tuple[str, ...], folder: Path) -> list[Player]:
    players = {name: Player(work, stages, folder / name) for name in "AB"}
    play(order, players)
    return [*players.values()]


@pytest.mark.parametrize("order", some("one cache", OF_CACHE, 100))
def test_one_cache(order: str, corpus: Path, tmp_path: Path) -> None:
    def prepared(name: str) -> Prepared:
        return prepare(str(corpus), "bpe:280", tmp_path / name, heldout_every=4)

    def work() -> None:
        print(split_digests(prepared("cache")))

    players = take_turns(order, work, OF_CACHE, tmp_path)
    assert [player.code for player in players] == [0, 0], [player.output.read_text() for player in players]
    assert {player.output.read_text() for player in players} == {f"{split_digests(prepared('another'))}\n"}
    assert not [*(tmp_path / "cache").rglob(".tmp-*")]


@pytest.fixture(scope="module")
def recipe(corpus: Path) -> Recipe:
    base = little("bpe:280", corpus)
    settings = replace(
        base.train, steps=3, save_every=1, keep_last=1, log_every=1, eval_every=0, plot=False, tensorboard=False,
        sample_tokens=0, precision="fp32", device="cpu", threads=1,
    )  # fmt: skip
    data = replace(base.data, batch_size=2, heldout_every=40, cache_dir=str(corpus.parent / "cache"))
    return replace(base, data=data, train=settings)


def command(recipe: Recipe, run_dir: Path, *options: str) -> list[str]:
    path = run_dir.with_suffix(".json")
    path.write_text(json.dumps(to_dict(recipe)))
    return ["train", "--recipe", str(path), "--train.out-dir", str(run_dir), *options]


@pytest.fixture(scope="module")
def expected(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The end of one run alone."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    assert main(command(recipe, run_dir)) == 0
    return end_of_run(run_dir, recipe.data.cache_path)


REFUSALS = (
    "another process is training in it; ",
    "another process has trained in it and deleted step_.*; run the same command again when that process has ended",
    "is not empty; add --resume",
    "holds checkpoints, perhaps of a run that began meanwhile; .* the same command with --resume auto goes on",
)


@pytest.mark.parametrize("options", [(), ("--resume", "auto")], ids=["new", "resume"])
# In the last one, A trains to the end while B prepares its data.
@pytest.mark.parametrize("order", [*some("one folder", OF_FOLDER, 150), "ABAAAAABBBBB"])
def test_one_folder(order: str, options: tuple[str, ...], recipe: Recipe, expected: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = command(recipe, run_dir, *options)
    players = take_turns(order, lambda: main(words), OF_FOLDER, tmp_path)
    outputs = [player.output.read_text() for player in players]
    codes = [player.code for player in players]
    assert 0 in codes, outputs
    for code, output in zip(codes, outputs, strict=True):
        said = [line for line in output.splitlines() if line.startswith("tilemoe: error: ")]
        assert (code, len(said)) in ((0, 0), (2, 1)), output
        assert code == 0 or re.search(rf"train.out_dir {re.escape(str(run_dir))}.*({'|'.join(REFUSALS)})", said[0]), (
            said
        )
    assert end_of_run(run_dir, recipe.data.cache_path) == expected
