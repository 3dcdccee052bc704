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
from safetensors.torch import load_file, save_file
from small_runs import sign, write_sharded

from tilemoe.cli.main import main
from tilemoe.models.sums import _digest, canonical, file_entries, manifest_of
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints.folder import (
    MODEL_FILE,
    CheckpointError,
    open_checkpoint,
)
from tilemoe.train.checkpoints.initial import load_initial
from tilemoe.train.checkpoints.metadata import describe
from tilemoe.train.checkpoints.names import read_recipe
from tilemoe.train.checkpoints.restore import build_model, restore
from tilemoe.train.checkpoints.verify import verify
from tilemoe.train.config import Recipe
from tilemoe.train.optim import make_optimizer
from tilemoe.train.run import train

CPU = torch.device("cpu")


class RunsCode:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


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


def test_what_the_manifest_must_and_must_not_list(checkpoint: Path) -> None:
    assert open_checkpoint(checkpoint).state.step == 3
    (checkpoint / "notes.txt").write_text("mine")  # is never read
    assert open_checkpoint(checkpoint).state.step == 3
    entries = file_entries(path for path in checkpoint.iterdir() if path.name != "manifest.json")
    outside = "lists '../manifest.json', which is not in the folder"
    for listed, message in (
        ({name: entry for name, entry in entries.items() if name != "state.json"}, "state.json is not listed"),
        ({name: entry for name, entry in entries.items() if name != "model.safetensors"}, "model.safetensors is not"),
        (entries | {"../manifest.json": entries["state.json"]}, outside),
    ):
        (checkpoint / "manifest.json").write_bytes(manifest_of(listed))
        with raises_one_line(message, CheckpointError):
            open_checkpoint(checkpoint)


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
    ("name", "tensor", "message"),
    [
        ("rng_cpu.0", torch.zeros(1 << 17, dtype=torch.uint8), r"rng_cpu\.0 is too large for a random-number state"),
        ("optimizer.head.weight.exp_avg", torch.zeros(2, 3), r"head\.weight\.exp_avg is \(2, 3\) but its parameter"),
        ("optimizer.norm.weight.exp_avg", torch.tensor(1.0), r"exp_avg is \(\) but its parameter \(16,\)"),
        ("optimizer.norm.weight.step", torch.zeros(16), r"norm\.weight\.step is \(16,\) but its parameter"),
        ("optimizer.norm.weight.exp_avg", torch.zeros(16), r"norm\.weight has \['exp_avg'\] instead of"),
        ("optimizer.norm.weight.exp_avg.codes", torch.zeros(16).byte(), r"exp_avg\.codes is stored in blocks of 256"),
        ("optimizer.norm.weight.momentum_buffer", torch.zeros(16), r"has \['momentum_buffer'\] instead"),
        ("optimizer.none.exp_avg", torch.zeros(1), r"none\.exp_avg is for no parameter of the model"),
        ("model.head.weight", torch.zeros(2, 3), r"the checkpoint has head\.weight of shape \(2, 3\)"),
        ("model.none", torch.zeros(2, 3), r"the checkpoint and the model differ in none"),
    ],
)
def test_a_jobs_tensors_that_the_model_has_not(
    dense_recipe: Recipe, name: str, tensor: torch.Tensor, message: str
) -> None:
    path, model = write_sharded(dense_recipe, {name: tensor}), build_model(dense_recipe, CPU)
    with raises_one_line(message):
        open_checkpoint(path).load_training(model, make_optimizer(model, dense_recipe.optim))


@pytest.fixture
def told(sharded: Path) -> dict[str, Any]:
    """Where the tensors of ``sharded`` are, as its manifest then says it; no pickle is there to be read."""
    tensors = describe(pickle.loads((sharded / ".metadata").read_bytes()))
    (sharded / ".metadata").write_bytes(b"for others")
    sign(sharded, tensors)
    return tensors


def test_a_manifest_says_where_tensors_are(sharded: Path, told: dict[str, Any], dense_recipe: Recipe) -> None:
    model, expected = (
        build_model(replace(dense_recipe, train=replace(dense_recipe.train, seed=seed)), CPU) for seed in (1, 0)
    )
    open_checkpoint(sharded).load_training(model, make_optimizer(model, dense_recipe.optim))
    assert_equal(model.state_dict(), expected.state_dict())
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(7).get_state())
    content = json.loads((sharded / "manifest.json").read_bytes())
    content["tensors"]["model.norm.weight"]["dtype"] = "float16"
    (sharded / "manifest.json").write_bytes(canonical(content))
    with raises_one_line(r"manifest\.json does not match its checksum"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("manifest", ["of this release", "of an earlier one"])
def test_no_command_unpickles(
    request: pytest.FixtureRequest, sharded: Path, tmp_path: Path, manifest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if manifest == "of this release":
        request.getfixturevalue("told")
    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, lambda *arguments, **options: pytest.fail("it unpickles"))
    for command in (
        ["verify", str(sharded)],
        ["generate", "--prompt", "a", "--max-new-tokens", "2", "--checkpoint", str(sharded)],
        ["export", "--out", str(tmp_path / "out"), "--checkpoint", str(sharded)],
    ):
        assert main(command) == 0


@pytest.mark.parametrize(
    ("of", "change", "message"),
    [
        ("tensor", {"dtype": "object"}, "its description of tensors is malformed"),
        ("tensor", {"shape": [17]}, "do not cover it exactly once"),
        ("tensor", {"shape": [4, 4]}, "lies outside the tensor"),
        ("tensor", {"shape": [16.0]}, "its description of tensors is malformed"),
        ("tensor", {"shape": [True]}, "its description of tensors is malformed"),
        ("tensor", {"shape": [1] * 100}, "its description of tensors is malformed"),
        ("tensor", {"chunks": []}, "do not cover it exactly once"),
        ("tensor", {"chunks": {}}, "do not cover it exactly once"),
        ("tensor", {"chunks": None}, "its description of tensors is malformed"),
        ("chunk", {"offsets": [1]}, "lies outside the tensor"),
        ("chunk", {"offsets": [-1]}, "its description of tensors is malformed"),
        ("chunk", {"offsets": [0, 0]}, "lies outside the tensor"),
        ("chunk", {"sizes": [15]}, "do not cover it exactly once"),
        ("chunk", {"sizes": [1 << 70]}, "its description of tensors is malformed"),
        ("chunk", {"file": "../__0_0.distcp"}, "which the manifest does not list"),
        ("chunk", {"file": "manifest.json"}, "which the manifest does not list"),
        ("chunk", {"file": "state.json"}, "cannot be in bytes"),
        ("chunk", {"file": None}, "which the manifest does not list"),
        ("chunk", {"offset": 0}, "two parts of tensors share bytes of __0_0.distcp"),
        ("chunk", {"offset": 1 << 40}, "cannot be in bytes"),
        ("chunk", {"length": 0}, "cannot be in bytes"),
        ("chunk", {"length": 1 << 30}, "cannot be in bytes"),
        ("chunk", {"more": 1}, "its description of tensors is malformed"),
    ],
)
def test_what_a_manifest_says_of_tensors_is_checked(
    sharded: Path, told: dict[str, Any], of: str, change: dict[str, Any], message: str
) -> None:
    tensor = told["model.norm.weight"]
    (tensor if of == "tensor" else tensor["chunks"][0]).update(change)
    sign(sharded, told)
    with raises_one_line(f"cannot be used: .*{message}", CheckpointError):
        restore(sharded, "cpu")
    [finding] = verify(sharded)
    assert not finding.is_right
    assert re.search(message, finding.line)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_weights_are_floats(checkpoint: Path, dtype: torch.dtype) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"].double()  # another float is as it was
    save_file(tensors, checkpoint / "model.safetensors")
    sign(checkpoint)
    restore(checkpoint, "cpu")
    save_file(tensors | {"norm.weight": tensors["norm.weight"].to(dtype)}, checkpoint / "model.safetensors")
    sign(checkpoint)
    with raises_one_line(f"norm.weight in {dtype}, instead of torch.float32", CheckpointError):
        restore(checkpoint, "cpu")
    save_file(tensors | {"norm.weight": torch.zeros(8).byte().view(torch.float4_e2m1fn_x2)}, checkpoint / MODEL_FILE)
    sign(checkpoint)
    with raises_one_line(r"model\.norm\.weight is in F4, which no run saves", CheckpointError):
        restore(checkpoint, "cpu")


def test_a_jobs_weights_are_floats(sharded: Path, told: dict[str, Any]) -> None:
    told["model.norm.weight"]["dtype"] = "int32"
    sign(sharded, told)
    with raises_one_line(r"norm.weight in torch.int32, instead of torch.float32", CheckpointError):
        restore(sharded, "cpu")


@pytest.mark.parametrize("name", ["step", "tokens", "seconds", "processes"])
def test_counts_of_the_state_are_counts(checkpoint: Path, name: str) -> None:
    state = json.loads((checkpoint / "state.json").read_bytes())
    for value in (True, -1, "3", None, float("nan"), float("inf"), 10**400):
        (checkpoint / "state.json").write_bytes(canonical(state | {name: value}))
        sign(checkpoint)
        with raises_one_line(f"is damaged: state.json has no {name} of type", CheckpointError):
            open_checkpoint(checkpoint)


def test_a_chunk_twice_or_in_the_place_of_another_is_refused(sharded: Path, told: dict[str, Any]) -> None:
    norm, other = told["model.norm.weight"], told["model.blocks.0.attention_norm.weight"]
    for chunks, message in (
        ([{**norm["chunks"][0], "sizes": [8]}, {**other["chunks"][0], "sizes": [8]}], "do not cover it exactly once"),
        ([{**norm["chunks"][0], "sizes": [8], "offsets": [o]} for o in (0, 8)], "share bytes"),
        ([{**told["rng_cpu.0"]["chunks"][0], "sizes": [16]}], "cannot be in bytes|share bytes"),
        ([{**norm["chunks"][0], "offset": norm["chunks"][0]["offset"] + 8, "length": 1000}], "is no tensor"),
        ([{**norm["chunks"][0], "length": 650}], "cut short"),
    ):
        sign(sharded, {**told, "model.norm.weight": {**norm, "chunks": chunks}})
        with raises_one_line(f"cannot be used: .*({message})", CheckpointError):
            restore(sharded, "cpu")


@pytest.mark.parametrize("strides", [[1, 1 << 40], [8], [-8, 1], [8, -1], [1 << 70, 1], [64, 1]])
def test_an_archive_that_describes_another_tensor(sharded: Path, told: dict[str, Any], strides: list[int]) -> None:
    """Of 16 x 8, of which a pickle in the archive says how it lies; transposed ones are read."""
    parts, name = [torch.arange(128.0).view(8, 16).t(), torch.arange(128.0).view(16, 8)], "model.norm.weight"
    for part in parts:
        with (sharded / "__0_0.distcp").open("wb") as file:
            torch.save(part.clone(), file)
        chunk = {"offsets": [0, 0], "sizes": [16, 8], "file": "__0_0.distcp", "offset": 0}
        chunk["length"] = (sharded / "__0_0.distcp").stat().st_size
        sign(sharded, {name: {"dtype": "float32", "shape": [16, 8], "chunks": [chunk]}})
        assert torch.equal(open_checkpoint(sharded).open_tensors()[name][()], part)
    content = (sharded / "__0_0.distcp").read_bytes()
    said = pickle.dumps((8, 1), 2)[2:-3]  # as torch.save writes the strides
    assert content.count(said) == 1
    other = pickle.dumps(tuple(strides), 2)[2:-3]
    opened = open_checkpoint(sharded)
    (sharded / "__0_0.distcp").write_bytes(content.replace(said, other, 1))
    with raises_one_line("is another tensor|shorter than argument|longer than argument|is cut short|is no tensor"):
        opened.open_tensors()[name][()]


@pytest.mark.parametrize("files", [None, [], ["state.json"], "state.json", 3, {}])
def test_a_manifest_that_lists_no_files(checkpoint: Path, files: Any) -> None:
    (checkpoint / "manifest.json").write_bytes(manifest_of(files))
    with raises_one_line("is damaged: .*manifest.json", CheckpointError):
        open_checkpoint(checkpoint)
    for content in (b"null", b"[]", b"3", b'"x"', b"[" * 100_000, b"\xff", b'{"files":{},"sha256":null}'):
        (checkpoint / "manifest.json").write_bytes(content)
        with raises_one_line("is damaged: manifest.json", CheckpointError):
            open_checkpoint(checkpoint)


WRONG = (None, True, "", "\ud800", -1, 10**30, 1.5, float("nan"), [], {}, [[]], {"": {}})


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each table or list in a JSON value with each of its keys."""
    found: list[tuple[Any, Any]] = []
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += [(value, key), *places(value[key])]
    return found


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_no_wrong_type_anywhere_is_a_traceback(
    sharded: Path, told: dict[str, Any], dense_recipe: Recipe, name: str
) -> None:
    """In the state, and in what the manifest says of files and of tensors: signed, as anybody can."""
    model = build_model(dense_recipe, CPU)
    optimizer = make_optimizer(model, dense_recipe.optim)
    whole = json.loads((sharded / name).read_bytes())
    whole.pop("sha256", None)
    if name == "manifest.json":  # of many that are alike, some
        whole["tensors"] = {tensor: whole["tensors"][tensor] for tensor in sorted(told)[::18]}
    for number, (container, key) in enumerate(places(whole)):
        kept = container[key]
        for value in WRONG if number % 4 == 0 else WRONG[number % 4 :: 4]:
            container[key] = value
            if name == "state.json":
                (sharded / name).write_text(json.dumps(whole))
                sign(sharded, told)
            else:
                (sharded / name).write_bytes(canonical(whole | {"sha256": _digest(whole)}))
            told_of = ""
            try:
                opened = open_checkpoint(sharded)
                opened.require_bytes()
                opened.load_training(model, optimizer)
            except (ValueError, OSError) as error:
                told_of = str(error)
            assert "\n" not in told_of + next(verify(sharded)).line, (key, value)
        container[key] = kept


@pytest.mark.parametrize("text", ["ab" * 100, "ff" * torch.get_rng_state().numel()])
def test_signed_random_numbers_that_are_none_are_named(checkpoint: Path, dense_recipe: Recipe, text: str) -> None:
    state = json.loads((checkpoint / "state.json").read_bytes())
    (checkpoint / "state.json").write_text(json.dumps(state | {"rng_cpu": text}))
    sign(checkpoint)
    model = build_model(dense_recipe, CPU)
    with raises_one_line("rng_cpu is no random-number state of PyTorch", CheckpointError):
        open_checkpoint(checkpoint).load_training(model, make_optimizer(model, dense_recipe.optim))


@pytest.mark.parametrize(
    "command", [("export", "--out", "out", "--checkpoint"), ("train", "--train.steps", "3", "--resume")]
)
def test_weights_that_are_not_finite_are_said_of_the_checkpoint(
    dense_recipe: Recipe, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    train(replace(dense_recipe, train=replace(dense_recipe.train, steps=2)))
    checkpoint = Path(dense_recipe.train.out_dir) / "step_00000002"
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["norm.weight"][0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors")
    sign(checkpoint)
    with raises_one_line("norm.weight is not finite; take an earlier checkpoint", CheckpointError):
        restore(checkpoint, "cpu")
    assert main([*command, str(checkpoint)]) == 2
    assert "norm.weight is not finite" in capsys.readouterr().err
    with raises_one_line("norm.weight is not finite; take an earlier checkpoint", CheckpointError):
        load_initial(build_model(dense_recipe, CPU), checkpoint)


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_pipe_or_a_file_without_end_is_no_checkpoint(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.open("wb").truncate(1 << 40)):
        make(checkpoint / name)
        with pytest.raises((ValueError, OSError), match=name):
            open_checkpoint(checkpoint)
        if name == "state.json":
            with raises_one_line("no model can be read from it"):
                read_recipe(checkpoint)
        (checkpoint / name).unlink()
