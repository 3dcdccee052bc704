"""Killed at random moments, a run resumed from the command line ends exactly as if nothing had happened."""

import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import timeless

from tilemoe.cli.main import main
from tilemoe.train.checkpoints.folder import find_latest, list_checkpoints, open_checkpoint
from tilemoe.train.loop import Trainer
from tilemoe.train.progress import StepStats

STEPS = 30  # of the recipe that the fixtures make
Cli = Callable[..., "subprocess.CompletedProcess[str]"]

# Run in the child before the command line: the ``after``-th call of ``where`` at or after step ``step`` gets a signal.
INTERRUPT = """
import os
from tilemoe.train import loop, metrics
from tilemoe.train.checkpoints import folder
calls, steps = 0, 0
def counting_steps(real):
    def call(self):
        global steps
        steps = self.step
        return real(self)
    return call
def interrupting(real):
    def call(*arguments, **options):
        global calls
        calls += steps >= {step}
        if calls == {after} and steps >= {step}:
            os.kill(os.getpid(), {number})
        return real(*arguments, **options)
    return call
loop.Trainer.train_step = counting_steps(loop.Trainer.train_step)
owner = {owner}
setattr(owner, {name!r}, interrupting(getattr(owner, {name!r})))
"""
# Moments of a step, of a record and of a checkpoint's write: (owner, function, calls of it to choose from).
MOMENTS = [
    ("loop", "learning_rate", 1),  # before a step
    ("loop", "clip_gradients", 1),  # in the middle of it
    ("metrics.MetricsWriter", "write", 2),  # between a step and its record
    ("folder", "save_model", 1),
    ("folder", "fsync", 6),
    ("folder.os", "rename", 2),  # publishing a checkpoint, or dropping the oldest
]


def interruption(moment: tuple[str, str, int], step: int, number: int, dice: random.Random) -> str:
    owner, name, calls = moment
    return INTERRUPT.format(step=step, owner=owner, name=name, after=dice.randint(1, calls), number=int(number))


def assert_same_end(folder: Path, expected: Path) -> None:
    assert timeless(folder) == timeless(expected)
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (run / f"step_{STEPS:08d}" / file for run in (folder, expected))
        assert ours.read_bytes() == theirs.read_bytes(), file


@pytest.mark.thorough
def test_sigkill_at_random_moments(recipe_file: Path, cli: Cli, finished: Path, tmp_path: Path) -> None:
    arguments = ("train", "--recipe", recipe_file, "--train.out-dir", tmp_path / "run", "--resume")
    assert_killed_ends_as(cli, arguments, tmp_path / "run", finished, MOMENTS)


@pytest.mark.thorough
def test_sigkill_while_adapters_are_trained(recipe_file: Path, cli: Cli, finished: Path, tmp_path: Path) -> None:
    """On the base that another run has made."""
    arguments = ("train", "--recipe", recipe_file, "--init-from", finished, "--lora.rank", "2", "--resume")
    assert main([str(word) for word in (*arguments, "--train.out-dir", tmp_path / "whole")]) == 0
    moments = [MOMENTS[1], MOMENTS[3], MOMENTS[4]]
    arguments = (*arguments, "--train.out-dir", tmp_path / "run")
    assert_killed_ends_as(cli, arguments, tmp_path / "run", tmp_path / "whole", moments)


def assert_killed_ends_as(
    cli: Cli, arguments: tuple[object, ...], folder: Path, expected: Path, moments: list[tuple[str, str, int]]
) -> None:
    """Killed at each of the moments, in any order, and started again as often, the run ends as that of ``expected``."""
    dice = random.Random()
    seed = dice.randrange(10**6)
    dice.seed(seed)
    steps = sorted(dice.sample(range(1, STEPS - 5), len(moments)))
    for step, moment in zip(steps, dice.sample(moments, len(moments)), strict=True):
        done = cli(*arguments, first=interruption(moment, step, signal.SIGKILL, dice))
        assert done.returncode == -signal.SIGKILL, (seed, step, moment, done.stdout, done.stderr)
        for checkpoint in list_checkpoints(folder):  # whatever there is, is whole
            open_checkpoint(checkpoint)
    done = cli(*arguments)
    assert done.returncode == 0, (seed, done.stderr)
    assert re.search(r"^held-out loss \d+\.\d\d nats/byte$", done.stdout, re.MULTILINE), seed
    assert_same_end(folder, expected)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], seed


@pytest.mark.thorough
def test_sigterm_and_ctrl_c_save_and_the_run_goes_on(
    recipe_file: Path, cli: Cli, finished: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    dice = random.Random(0)
    arguments: tuple[object, ...] = ("train", "--recipe", recipe_file, "--train.out-dir", folder)
    for step, number in ((7, signal.SIGTERM), (18, signal.SIGINT)):
        done = cli(*arguments, first=interruption(MOMENTS[1], step, number, dice))
        assert done.returncode == 128 + number, done.stderr
        assert done.stderr == ""
        assert f"stopped after step {step + 1} of {STEPS} and saved" in done.stdout
        command = re.search(r"tilemoe (train --resume .*)", done.stdout)
        arguments = tuple(command[1].split())  # what it says is what is run next
        assert find_latest(folder).state.step == step + 1
    done = cli(*arguments)
    assert done.returncode == 0, done.stderr
    assert_same_end(folder, finished)


def test_a_second_ctrl_c_leaves_at_once(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Trainer.train_step

    def interrupted(self: Trainer) -> StepStats:
        if self.step == 7:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    assert main(["train", "--recipe", str(recipe_file), "--train.out-dir", str(tmp_path / "run")]) == 130
    message = "tilemoe: error: interrupted; checkpoints written so far are intact"
    assert capsys.readouterr().err.splitlines() == [message]
    assert find_latest(tmp_path / "run").state.step == 5


def test_a_finished_run_is_not_run_again(recipe_file: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = timeless(finished)
    arguments = ["train", "--recipe", str(recipe_file), "--train.out-dir", str(finished)]
    assert main(arguments) == 2
    assert "is not empty; add --resume" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    out = capsys.readouterr().out
    assert "held-out loss" in out
    assert "step 30/30  loss" not in out  # no step is done again
    assert timeless(finished) == before


def test_a_renamed_checkpoint_is_refused_by_name(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    base = ["train", "--recipe", str(recipe_file), "--train.out-dir", str(folder), "--train.save-every", "2"]
    assert main([*base, "--train.steps", "2"]) == 0
    renamed = (folder / "step_00000002").rename(folder / "step_00000004")
    capsys.readouterr()
    assert main([*base, "--train.steps", "6", "--resume", "auto"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tilemoe: error: checkpoint {renamed} was renamed: state.json says step 2; name it")
    renamed.rename(folder / "step_00000002")
    assert main([*base, "--train.steps", "6", "--resume", "auto"]) == 0
    assert list_checkpoints(folder)[-1].name == "step_00000006"


def test_resuming_where_nothing_was_saved_starts_anew_and_says_so(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    base = ["train", "--recipe", str(recipe_file), "--train.out-dir", str(folder), "--train.steps", "4"]
    assert main([*base, "--resume"]) == 0
    assert f"no checkpoint in {folder} yet: starting at step 0" in capsys.readouterr().out
    assert list_checkpoints(folder)[-1].name == "step_00000004"
