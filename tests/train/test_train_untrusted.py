"""Files of others: what the manifest does not list is refused, and nothing that is read can run code."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import raises_one_line

from tilemoe.cli.main import main
from tilemoe.config import to_dict
from tilemoe.data import load_tokenizer, open_corpus
from tilemoe.models.folder import read_config
from tilemoe.models.hf_config import hf_config_dict
from tilemoe.models.presets import model_preset
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints import folder as checkpoints
from tilemoe.train.checkpoints.folder import (
    CheckpointError,
    TrainState,
    file_entries,
    open_checkpoint,
    save_checkpoint,
)
from tilemoe.train.checkpoints.restore import build_model, restore
from tilemoe.train.config import Recipe, parse_recipe
from tilemoe.train.optim import make_optimizer
from tilemoe.train.run import train

CPU = torch.device("cpu")


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
@pytest.mark.parametrize("planted", [".metadata", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
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


@pytest.fixture
def sharded(dense_recipe: Recipe) -> Path:
    """A checkpoint as a job writes it, of a job of this process alone."""
    path = write_checkpoint(dense_recipe)
    model = build_model(dense_recipe, torch.device("cpu"))
    torch.manual_seed(7)
    tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.save(tensors | {"rng_cpu.0": torch.get_rng_state()}, checkpoint_id=str(path), no_dist=True)
    for name in ("model.safetensors", "optimizer.safetensors"):
        (path / name).unlink()
    sign(path)
    return path


def test_a_jobs_checkpoint_is_read(sharded: Path, dense_recipe: Recipe) -> None:
    model, expected = (
        build_model(replace(dense_recipe, train=replace(dense_recipe.train, seed=seed)), CPU) for seed in (1, 0)
    )
    open_checkpoint(sharded).load_model(model)
    assert_equal(model.state_dict(), expected.state_dict())
    random = torch.manual_seed(7).get_state()
    torch.manual_seed(9)
    open_checkpoint(sharded).load_training(model, make_optimizer(model, dense_recipe.optim))
    assert torch.equal(torch.get_rng_state(), random)


def test_a_signed_pickle_runs_no_code(
    sharded: Path, dense_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anyone can write a manifest."""
    model = build_model(dense_recipe, CPU)
    metadata = pickle.loads((sharded / ".metadata").read_bytes())
    for hostile in (RunsCode(tmp_path / "ran"), replace(metadata, planner_data=RunsCode(tmp_path / "ran"))):
        (sharded / ".metadata").write_bytes(pickle.dumps(hostile))
        sign(sharded)
        with raises_one_line(r"refused: it asks for"):
            open_checkpoint(sharded).load_training(model, make_optimizer(model, dense_recipe.optim))
        for command in (("generate", "--prompt", "a"), ("export", "--out", str(tmp_path / "out"))):
            assert main([*command, "--checkpoint", str(sharded)]) == 2
            err = capsys.readouterr().err
            assert err.count("\n") == 1
            assert re.search(r"\.metadata is refused: it asks for (posix|nt|os)\.mkdir, which no checkpoint needs", err)
            assert not (tmp_path / "ran").exists()


def test_bytes_that_would_be_unpickled_are_refused(sharded: Path, tmp_path: Path) -> None:
    """In the place of a tensor, in a file that the metadata names."""
    dcp.save({"model.embed.weight": RunsCode(tmp_path / "ran")}, checkpoint_id=str(tmp_path / "other"), no_dist=True)
    for name in (".metadata", "__0_0.distcp"):
        shutil.copy(tmp_path / "other" / name, sharded / name)
    sign(sharded)
    with raises_one_line(r"\.metadata is refused: .*BytesStorageMetadata"):
        restore(sharded, "cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "../secret"}, "'../secret' is no file of the folder"),
        ({"relative_path": "/etc/passwd"}, "'/etc/passwd' is no file of the folder"),
        ({"offset": 10**12}, "a part of __0_0.distcp reaches past its end"),
        ({"length": -1}, "a part of __0_0.distcp has the bounds"),
        ({"transform_descriptors": ["zstd"]}, "a part of a tensor is none of a checkpoint's"),
    ],
)
def test_metadata_stay_within_their_files(sharded: Path, change: dict[str, Any], message: str) -> None:
    metadata = pickle.loads((sharded / ".metadata").read_bytes())
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = replace(metadata.storage_data[index], **change)
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(sharded)
    with raises_one_line(f".metadata is refused: {message}"):
        restore(sharded, "cpu")


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({}), pickle.dumps(torch.Size([1]))])
def test_what_is_no_metadata_is_refused(sharded: Path, content: bytes) -> None:
    (sharded / ".metadata").write_bytes(content)
    sign(sharded)
    with raises_one_line(r"\.metadata is refused: "):
        restore(sharded, "cpu")


HUGE = torch.Size([1 << 30, 1 << 20])  # claimed, and not there


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("rng_cpu.0", HUGE, r"rng_cpu\.0 claims \d+ bytes"),
        ("optimizer.head.weight.exp_avg", HUGE, r"optimizer\.head\.weight\.exp_avg is \(\d+, \d+\) and its parameter"),
        ("optimizer.none.exp_avg", torch.Size([1]), r"optimizer\.none\.exp_avg is of no parameter of the model"),
        ("model.head.weight", None, r"cannot be read \(rank 0: .*model\.head\.weight"),
        ("model.head.weight", HUGE, r"cannot be read \(rank 0: .*model\.head\.weight"),
    ],
)
def test_claims_are_checked_before_memory_is_taken(
    sharded: Path, dense_recipe: Recipe, name: str, size: torch.Size | None, message: str
) -> None:
    metadata = pickle.loads((sharded / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata.pop(name, metadata.state_dict_metadata["model.norm.weight"])
    if size is not None:
        metadata.state_dict_metadata[name] = replace(entry, size=size)
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(sharded)
    model = build_model(dense_recipe, CPU)
    with raises_one_line(message):
        open_checkpoint(sharded).load_training(model, make_optimizer(model, dense_recipe.optim))


@pytest.mark.parametrize("name", ["format", "recipe", "step", "tokens", "seconds", "data_fingerprint", "rng_cpu"])
@pytest.mark.parametrize("value", [None, [], "x" * 3, -1.5])
def test_a_signed_state_of_other_types_is_one_line(checkpoint: Path, name: str, value: object) -> None:
    state = json.loads((checkpoint / "state.json").read_bytes())
    if isinstance(value, type(state[name])):
        value = {}
    (checkpoint / "state.json").write_text(json.dumps(state | {name: value}))
    sign(checkpoint)
    with raises_one_line(r"is damaged: state\.json has no", CheckpointError):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("text", ["ab" * 100, "ff" * torch.get_rng_state().numel()])
def test_signed_random_numbers_that_are_none_are_named(checkpoint: Path, dense_recipe: Recipe, text: str) -> None:
    state = json.loads((checkpoint / "state.json").read_bytes())
    (checkpoint / "state.json").write_text(json.dumps(state | {"rng_cpu": text}))
    sign(checkpoint)
    model = build_model(dense_recipe, CPU)
    with raises_one_line("rng_cpu is no state of PyTorch's random numbers", CheckpointError):
        open_checkpoint(checkpoint).load_training(model, make_optimizer(model, dense_recipe.optim))


@pytest.mark.parametrize("content", ["null", "[]", "[" * 100_000])
def test_a_signed_state_that_is_no_table_is_one_line(checkpoint: Path, content: str) -> None:
    (checkpoint / "state.json").write_text(content)
    sign(checkpoint)
    with raises_one_line(r"is damaged: state\.json (has no|is not JSON)", CheckpointError):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize("table", ["model", "data", "optim", "train", "parallel"])
def test_a_table_of_settings_that_is_null_is_named(dense_recipe: Recipe, table: str) -> None:
    with raises_one_line(f"^mine: {table}: expected a table of settings, got NoneType"):
        parse_recipe(json.dumps(to_dict(dense_recipe) | {table: None}), "mine")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("seed", 1 << 63, r"must be below 2\*\*63, got one of 64 bits"), ("threads", 10**6, "must be at most 4096")],
)
def test_numbers_that_nothing_can_hold(dense_recipe: Recipe, name: str, value: int, message: str) -> None:
    with raises_one_line(rf"train\.{name} {message}"):
        replace(dense_recipe.train, **{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers must be at most 100000"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be a list of layers, got 3"),
        ({"mlp_only_layers": {"a": 1}}, "mlp_only_layers must be a list of layers"),
        (None, "cannot be read"),
    ],
)
def test_a_hostile_config_json(tmp_path: Path, change: dict[str, Any] | None, message: str) -> None:
    settings = hf_config_dict(model_preset("qwen3-30b-a3b"))
    text = "[" * 100_000 if change is None else json.dumps(settings | change)
    (tmp_path / "config.json").write_text(text)
    with raises_one_line(message):
        read_config(tmp_path)


def test_a_pipe_is_no_corpus(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with raises_one_line(r"pipe\.txt': it is no regular file"):
        open_corpus(str(tmp_path / "pipe.txt"))
