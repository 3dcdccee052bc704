"""A run that a signal stops in an evaluation or beside random rounding, and what cannot be gone on with."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import timeless

from tilemoe.config import TokenRounding
from tilemoe.train.checkpoints.folder import CheckpointError, open_checkpoint
from tilemoe.train.config import Recipe
from tilemoe.train.loop import Trainer
from tilemoe.train.run import Stopped, train

TENSOR_FILES = ("model.safetensors", "optimizer.safetensors")


def test_random_rounding_is_a_function_of_the_seed(
    moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever random numbers the process had before, with the data in the cache or not, stopped or not."""
    moe = moe_recipe.model.moe
    assert moe is not None
    model = replace(moe_recipe.model, moe=replace(moe, rounding=TokenRounding("stochastic", 16)))

    def run(name: str, cache: str, seed: int) -> Recipe:
        torch.manual_seed(hash(name))
        data = replace(moe_recipe.data, cache_dir=str(tmp_path / cache), tokenizer="bpe:300")
        settings = replace(moe_recipe.train, out_dir=str(tmp_path / name), seed=seed)
        return replace(moe_recipe, model=replace(model, vocab_size=300), data=data, train=settings)

    train(run("first", "cold", 0))
    train(run("second", "cold", 0))
    train(run("other", "cold", 1))
    stopped = run("stopped", "cold too", 0)
    real = Trainer.train_step

    def step(trainer: Trainer) -> object:
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", step)
        assert train(stopped) == Stopped(signal.SIGTERM)
    torch.manual_seed(99)
    train(stopped, open_checkpoint(Path(stopped.train.out_dir) / "step_00000004"))
    ends = {}
    for name in ("first", "second", "stopped", "other"):
        ends[name] = [(tmp_path / name / "step_00000006" / file).read_bytes() for file in TENSOR_FILES]
    assert timeless(tmp_path / "first") == timeless(tmp_path / "second") == timeless(tmp_path / "stopped")
    assert ends["first"] == ends["second"] == ends["stopped"] != ends["other"]


def test_a_stop_during_evaluation_saves_and_evaluates_again(
    moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a training step: tests/faults/test_faults_signals.py."""
    from tilemoe.train import evaluate as module

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    real = module._batches

    def interrupted(*args: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_batches", interrupted)
        assert train(moe_recipe) == Stopped(signal.SIGTERM)
    assert f"--resume {moe_recipe.train.out_dir}" in capsys.readouterr().out
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    records = timeless(moe_recipe.train.out_dir)
    assert [(r["kind"], r["step"]) for r in records] == [("train", 1), ("train", 2)]
    train(moe_recipe, open_checkpoint(Path(moe_recipe.train.out_dir) / "step_00000002"))
    evaluated = [r["step"] for r in timeless(moe_recipe.train.out_dir) if r["kind"] == "eval"]
    assert evaluated == [2, 4, 6]


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
