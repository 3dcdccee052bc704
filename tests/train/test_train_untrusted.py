"""Files of others: what the manifest does not list is refused, and nothing that is read can run code."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
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
from tilemoe.train.run import train


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


def entries_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def caches(dense_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A finished run's cache, and the user's own, which is empty."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    data = replace(dense_recipe.data, cache_dir=str(theirs))
    train(replace(dense_recipe, data=data, train=replace(dense_recipe.train, steps=2)))
    monkeypatch.setenv("TILEMOE_CACHE", str(ours))
    return theirs, ours


COMMANDS = {"eval": ("eval", "--checkpoint"), "resume": ("train", "--train.steps", "3", "--resume")}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_nothing_is_written_where_a_checkpoint_says(
    dense_recipe: Recipe, caches: tuple[Path, Path], command: tuple[str, ...]
) -> None:
    theirs, ours = caches
    before = entries_of(theirs)
    assert main([*command, dense_recipe.train.out_dir]) == 0
    assert entries_of(theirs) == before  # is read
    assert not ours.exists()
    shutil.rmtree(theirs)
    run_dir = Path(dense_recipe.train.out_dir)
    if command[0] == "train":
        shutil.rmtree(run_dir / "step_00000003")
    assert main([*command, str(run_dir)]) == 0
    assert not theirs.exists()
    assert {name for name in entries_of(ours) if name.endswith("index.json")}


def test_a_cache_that_is_asked_for_is_written(dense_recipe: Recipe, caches: tuple[Path, Path], tmp_path: Path) -> None:
    theirs, ours = caches
    shutil.rmtree(theirs)
    mine = tmp_path / "mine"
    assert main([*COMMANDS["resume"], dense_recipe.train.out_dir, f"--data.cache-dir={mine}"]) == 0
    assert entries_of(mine)
    assert not ours.exists()
    assert not theirs.exists()
