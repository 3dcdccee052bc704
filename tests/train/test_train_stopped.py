"""A run that a signal stops goes on to the same end, and what cannot be gone on with."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import timeless

from tilemoe.config import TokenRounding
from tilemoe.train.checkpoints.folder import CheckpointError, list_checkpoints, open_checkpoint
from tilemoe.train.config import Recipe
from tilemoe.train.loop import Trainer
from tilemoe.train.run import RunResult, Stopped, train

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, *numbers: int) -> None:
    """Send this process signals in the middle of the step after ``step``."""
    real = Trainer.train_step

    def interrupted(self: Trainer) -> object:
        if self.step == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recipe], Path]:
    """The folder of a whole run of each model."""
    folders: dict[object, Path] = {}

    def run(recipe: Recipe) -> Path:
        if recipe.model not in folders:
            folders[recipe.model] = tmp_path_factory.mktemp("whole") / "run"
            train(replace(recipe, train=replace(recipe.train, out_dir=str(folders[recipe.model]))))
        return folders[recipe.model]

    return run


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 0), (signal.SIGINT, 2), (signal.SIGTERM, 5)])
def test_a_stopped_run_goes_on_to_the_same_end(
    recipe: Recipe,
    uninterrupted: Callable[[Recipe], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    step: int,
) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, number)
        capsys.readouterr()
        assert train(recipe) == Stopped(number)
    assert f"--resume {recipe.train.out_dir}" in capsys.readouterr().out
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    latest = list_checkpoints(Path(recipe.train.out_dir))[-1]
    assert latest.name == f"step_{step + 1:08d}"
    assert isinstance(train(recipe, open_checkpoint(latest)), RunResult)
    whole = uninterrupted(recipe)
    assert timeless(recipe.train.out_dir) == timeless(whole)
    for file in TENSOR_FILES:
        ends = [folder / "step_00000006" / file for folder in (Path(recipe.train.out_dir), whole)]
        assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.parametrize("mode", ["stochastic", "nearest_score"])
def test_random_rounding_is_a_function_of_the_seed(
    moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Whatever random numbers the process had before, with the data in the cache or not, stopped or not."""
    moe = moe_recipe.model.moe
    assert moe is not None
    rounding = TokenRounding(mode, 16)  # type: ignore[arg-type]
    model = replace(moe_recipe.model, moe=replace(moe, rounding=rounding))

    def run(name: str, cache: str, seed: int) -> Recipe:
        torch.manual_seed(hash(name))
        data = replace(moe_recipe.data, cache_dir=str(tmp_path / cache), tokenizer="bpe:300")
        settings = replace(moe_recipe.train, out_dir=str(tmp_path / name), seed=seed)
        return replace(moe_recipe, model=replace(model, vocab_size=300), data=data, train=settings)

    train(run("first", "cold", 0))
    train(run("second", "cold", 0))
    train(run("other", "cold", 1))
    stopped = run("stopped", "cold too", 0)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, signal.SIGTERM)
        assert train(stopped) == Stopped(signal.SIGTERM)
    torch.manual_seed(99)
    train(stopped, open_checkpoint(Path(stopped.train.out_dir) / "step_00000004"))
    ends = {}
    for name in ("first", "second", "stopped", "other"):
        ends[name] = [(tmp_path / name / "step_00000006" / file).read_bytes() for file in TENSOR_FILES]
    assert timeless(tmp_path / "first") == timeless(tmp_path / "second") == timeless(tmp_path / "stopped")
    assert ends["first"] == ends["second"] == ends["stopped"] != ends["other"]


def test_a_stop_during_evaluation_saves_and_evaluates_again(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilemoe.train import evaluate as module

    real = module._batches

    def interrupted(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_batches", interrupted)
        assert train(moe_recipe) == Stopped(signal.SIGTERM)
    records = timeless(moe_recipe.train.out_dir)
    assert [(r["kind"], r["step"]) for r in records] == [("train", 1), ("train", 2)]
    train(moe_recipe, open_checkpoint(Path(moe_recipe.train.out_dir) / "step_00000002"))
    evaluated = [r["step"] for r in timeless(moe_recipe.train.out_dir) if r["kind"] == "eval"]
    assert evaluated == [2, 4, 6]


def test_resuming_from_an_older_step_sets_the_newer_aside(moe_recipe: Recipe) -> None:
    train(moe_recipe)
    folder = Path(moe_recipe.train.out_dir)
    before, weights = timeless(folder), (folder / "step_00000006" / "model.safetensors").read_bytes()
    train(moe_recipe, open_checkpoint(folder / "step_00000003"))
    assert (folder / "abandoned_step_00000006").is_dir()
    assert (folder / "step_00000006" / "model.safetensors").read_bytes() == weights
    assert timeless(folder) == before


def test_what_cannot_be_resumed(moe_recipe: Recipe, dense_recipe: Recipe, tmp_path: Path, corpus: Path) -> None:
    train(moe_recipe)
    checkpoint = open_checkpoint(Path(moe_recipe.train.out_dir) / "step_00000003")
    with pytest.raises(CheckpointError, match=r"another model: model\.moe is None here"):
        train(dense_recipe, checkpoint)
    for part, name, value in (("train", "seed", 1), ("train", "accumulation", 2), ("data", "batch_size", 5)):
        changed = replace(moe_recipe, **{part: replace(getattr(moe_recipe, part), **{name: value})})
        with pytest.raises(CheckpointError, match=rf"{part}\.{name} is {value} here"):
            train(changed, checkpoint)
    with pytest.raises(CheckpointError, match=r"past train\.steps \(2\)"):
        train(replace(moe_recipe, train=replace(moe_recipe.train, steps=2)), checkpoint)
    text = tmp_path / "other"
    text.mkdir()
    for path in corpus.iterdir():
        (text / path.name).write_text(path.read_text().upper())
    with pytest.raises(CheckpointError, match="is not the text that checkpoint"):
        train(replace(moe_recipe, data=replace(moe_recipe.data, corpus=str(text))), checkpoint)
