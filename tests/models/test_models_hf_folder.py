"""Which files of a transformers' folder are read: those of its index, and no other."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import raises_one_line, tiny_model
from safetensors.torch import load_file, save_file
from test_models_huggingface import tensors_of

from tilemoe.config import MoEConfig
from tilemoe.data import load_tokenizer
from tilemoe.integrations.peft import load_adapter
from tilemoe.models import huggingface
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import load_hf, save_hf
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints.initial import load_initial
from tilemoe.train.metrics import read_metrics


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    model = DecoderLM(tiny_model(moe=MoEConfig(16, 16, 4, 2)))
    model.reset_parameters(torch.Generator().manual_seed(0))
    save_hf(model, tmp_path / "model", max_shard_bytes=4_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["model-00000-of-00000.safetensors", "model.safetensors", "modelz.safetensors"])
def test_a_stray_file_beside_the_shards_is_not_read(shards: Path, name: str) -> None:
    expected = load_hf(shards).state_dict()
    save_file({each: tensor + 1 for each, tensor in tensors_of(shards).items()}, shards / name)
    assert_equal(load_hf(shards).state_dict(), expected)


def test_without_an_index_no_two_files_have_a_tensor(shards: Path) -> None:
    expected = load_hf(shards).state_dict()
    everything = tensors_of(shards)
    (shards / "model.safetensors.index.json").unlink()
    assert_equal(load_hf(shards).state_dict(), expected)
    save_file({"model.norm.weight": everything["model.norm.weight"]}, shards / "modelz.safetensors")
    with raises_one_line(r"modelz\.safetensors has model\.norm\.weight, which another file has, too"):
        load_hf(shards)
    save_file(everything, shards / "model.safetensors")  # what is whole needs no shards
    assert_equal(load_hf(shards).state_dict(), expected)


@pytest.mark.parametrize(
    "name",
    ["../other.safetensors", "/tmp/other.safetensors", "a/b.safetensors", "..\\a.safetensors", "..", "", 7, None],
)
def test_an_index_cannot_lead_out_of_its_folder(shards: Path, name: object) -> None:
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    file = index["weight_map"]["model.norm.weight"]
    (shards.parent / "other.safetensors").write_bytes((shards / file).read_bytes())
    index["weight_map"]["model.norm.weight"] = name
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with raises_one_line(r"the file of model\.norm\.weight, .*, is no \.safetensors file of this folder"):
        load_hf(shards)


def test_what_the_index_lists_and_the_folder_lacks_is_named(shards: Path) -> None:
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    moved = json.loads(path.read_text())
    moved["weight_map"]["model.norm.weight"] = "model-00001-of-00099.safetensors"
    path.write_text(json.dumps(moved))
    with raises_one_line(r"model-00001-of-00099\.safetensors is missing, which model\.safetensors\.index\.json lists"):
        load_hf(shards)
    moved["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(moved))
    with raises_one_line(r"lacks model\.norm\.weight, which model\.safetensors\.index\.json says it has"):
        load_hf(shards)
    del moved["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(moved))
    with raises_one_line(r"model\.norm\.weight: this tensor is missing"):
        load_hf(shards)
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000):
        path.write_text(text)
        with raises_one_line(r"model\.safetensors\.index\.json"):
            load_hf(shards)


def test_more_tensors_than_any_model_has_are_refused(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_MOST_TENSORS", len(tensors_of(shards)))
    load_hf(shards)
    name = max(shards.glob("*.safetensors")).name
    save_file(load_file(shards / name) | {"z": torch.empty(0)}, shards / name)
    with raises_one_line(r"model-.*\.safetensors: more than \d+ tensors, which no model has"):
        load_hf(shards)


def read_chat(folder: Path) -> object:
    return load_tokenizer(str(folder / "tokenizer.json")).chat_template


READERS = {
    "config.json": load_hf,
    "model.safetensors.index.json": load_hf,
    "tokenizer.json": read_chat,
    "tokenizer_config.json": read_chat,
    "chat_template.jinja": read_chat,
    "metrics.jsonl": lambda folder: list(read_metrics(folder / "metrics.jsonl")),
    "adapter_config.json": lambda folder: load_adapter(load_hf(folder), folder),
}


@pytest.fixture
def within_5_s() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it waits")

    pytest.importorskip("peft")  # its import takes seconds
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_a_device_is_read_as_no_file(shards: Path, name: str, within_5_s: None) -> None:
    load_tokenizer("bytes").save(shards / "tokenizer.json")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (shards / name).unlink(missing_ok=True)
        make(shards / name)
        with pytest.raises((ValueError, OSError), match="no regular file") as caught:
            READERS[name](shards)
        assert name in str(caught.value)


@pytest.mark.parametrize("name", list(READERS)[:5])
def test_a_file_of_endless_size_is_not_read(shards: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer("bytes").save(shards / "tokenizer.json")
    with (shards / name).open("a") as file:
        file.truncate(1 << 40)
    with raises_one_line(rf"{name}.*it has more than 64 MiB"):
        READERS[name](shards)


@pytest.mark.parametrize("name", [name for name in READERS if ".json" in name and name != "tokenizer.json"])
def test_a_name_twice_in_a_table_is_said(shards: Path, name: str) -> None:
    """Of which a reader takes the first and another the last; tokenizer.json is tokenizers'."""
    load_tokenizer("bytes").save(shards / "tokenizer.json")
    whole = (shards / name).read_text() if (shards / name).exists() else '{"kind": "eval", "step": 1}\n'
    (shards / name).write_text(whole.replace("{", '{"a\\n": {"b": 1}, "a\\n": 2, ', 1))
    with raises_one_line(rf"{name}.*'a\\n' is there twice"):
        READERS[name](shards)


def test_weights_are_not_read_through_a_link_out_of_the_folder(shards: Path) -> None:
    expected = load_hf(shards).state_dict()
    file = sorted(shards.glob("*.safetensors"))[0]
    outside = shards.parent / file.name
    file.rename(outside)
    file.symlink_to(outside)
    with raises_one_line(rf"{file.name} is a link to {outside}, out of the folder"):
        load_hf(shards)
    blobs = shards.parent / "models--a--b" / "blobs"  # as the hub's cache keeps them
    blobs.mkdir(parents=True)
    outside.rename(blobs / "0123")
    file.unlink()
    file.symlink_to(blobs / "0123")
    assert_equal(load_hf(shards).state_dict(), expected)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named(shards: Path, value: float) -> None:
    config = load_hf(shards).config
    for file in shards.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][3] = value
            save_file(tensors, file, {"format": "pt"})
    for read in (load_hf, lambda folder: load_initial(DecoderLM(config), folder)):
        with raises_one_line(r"/model: model\.norm\.weight is not finite; take the model from before it was"):
            read(shards)
