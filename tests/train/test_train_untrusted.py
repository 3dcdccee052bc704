"""Files of others: what the manifest does not list is refused, and nothing that is read can run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from helpers import raises_one_line

from tilemoe.cli.main import main
from tilemoe.data import load_tokenizer
from tilemoe.train.checkpoints import folder as checkpoints
from tilemoe.train.checkpoints.folder import (
    CheckpointError,
    TrainState,
    file_entries,
    open_checkpoint,
    save_checkpoint,
)
from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe
from tilemoe.train.optim import make_optimizer


class RunsCode:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def checkpoint(dense_recipe: Recipe) -> Path:
    """One process' checkpoint in the run's folder, which is ``tmp_path / "run"``."""
    return write_checkpoint(dense_recipe)


def write_checkpoint(recipe: Recipe) -> Path:
    model = build_model(recipe, torch.device("cpu"))
    state = TrainState(recipe, 3, 30, 1.5, "abc")
    return save_checkpoint(
        Path(recipe.train.out_dir), state, model, make_optimizer(model, recipe.optim),
        tokenizer=load_tokenizer("bytes"), keep_last=2,
    )  # fmt: skip


def sign(path: Path) -> None:
    """Make the manifest list what is in the folder."""
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_bytes(checkpoints._manifest(file_entries(path.iterdir())))


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "a", "--checkpoint"),
        ("eval", "--checkpoint"),
        ("export", "--out", "out", "--checkpoint"),
        ("train", "--resume"),
        ("train", "--recipe", "tiny", "--init-from"),
    ],
    ids=["generate", "eval", "export", "resume", "init-from"],
)
@pytest.mark.parametrize("planted", [".metadata", "tokenizer.json"])
def test_a_planted_file_is_refused(
    checkpoint: Path, tmp_path: Path, command: tuple[str, ...], planted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / planted).write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    assert main([*command, str(checkpoint)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"{planted} is not listed in manifest.json; remove that file" in err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("verify", [True, False])
def test_what_the_manifest_must_and_must_not_list(checkpoint: Path, verify: bool) -> None:
    assert open_checkpoint(checkpoint, verify=verify).state.step == 3
    (checkpoint / "notes.txt").write_text("mine")  # is never read
    assert open_checkpoint(checkpoint, verify=verify).state.step == 3
    entries = file_entries(path for path in checkpoint.iterdir() if path.name != "manifest.json")
    outside = "lists '../manifest.json', which is not in the folder"
    for listed, message in (
        ({name: entry for name, entry in entries.items() if name != "state.json"}, "state.json is not listed"),
        ({name: entry for name, entry in entries.items() if name != "model.safetensors"}, "model.safetensors is not"),
        (entries | {"../manifest.json": entries["state.json"]}, outside),
    ):
        (checkpoint / "manifest.json").write_bytes(checkpoints._manifest(listed))
        with raises_one_line(message, CheckpointError):
            open_checkpoint(checkpoint, verify=verify)


def test_a_listed_tokenizer_is_used(checkpoint: Path) -> None:
    load_tokenizer("bytes").save(checkpoint / "tokenizer.json")
    sign(checkpoint)
    assert open_checkpoint(checkpoint).tokenizer_spec == str(checkpoint / "tokenizer.json")
