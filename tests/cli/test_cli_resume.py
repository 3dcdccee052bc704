"""What the command line says of runs interrupted, finished, renamed or not begun; kills are in tests/faults."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import timeless

from tilemoe.cli.main import main
from tilemoe.train.checkpoints import pending
from tilemoe.train.checkpoints.folder import find_latest, list_checkpoints
from tilemoe.train.loop import Trainer
from tilemoe.train.progress import StepStats


def test_a_second_ctrl_c_leaves_once_the_checkpoint_on_its_way_is_there(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, publish = Trainer.train_step, pending.publish

    def interrupted(self: Trainer) -> StepStats:
        if self.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return real(self)

    def publish_later(*arguments: Any) -> None:
        time.sleep(0.5)
        publish(*arguments)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    monkeypatch.setattr(pending, "publish", publish_later)
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


def test_resuming_where_nothing_was_saved_starts_anew_and_says_so(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    base = ["train", "--recipe", str(recipe_file), "--train.out-dir", str(folder), "--train.steps", "4"]
    assert main([*base, "--resume"]) == 0
    assert f"no checkpoint in {folder} yet: starting at step 0" in capsys.readouterr().out
    assert list_checkpoints(folder)[-1].name == "step_00000004"
