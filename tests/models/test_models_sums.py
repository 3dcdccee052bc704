"""An export is compared to its checksums wherever it is read; a folder without any is read as it is, and says so."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import raises_one_line, tiny_model
from safetensors.torch import load_file, save_file

from tilemoe.cli.main import main
from tilemoe.config import MoEConfig
from tilemoe.data import load_tokenizer
from tilemoe.integrations.peft import load_adapter, save_adapter
from tilemoe.layers.lora import add_lora
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import load_hf, save_hf
from tilemoe.models.sums import write_sums
from tilemoe.testing import assert_equal
from tilemoe.train.checkpoints.initial import adopt, load_initial
from tilemoe.train.checkpoints.restore import restore_model
from tilemoe.train.config import load_recipe

SIZES = tiny_model(moe=MoEConfig(16, 16, 4, 2), vocab_size=256)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """As of ``tilemoe export``, in several files with an index."""
    model = DecoderLM(SIZES)
    model.reset_parameters(torch.Generator().manual_seed(0))
    save_hf(model, tmp_path / "out", max_shard_bytes=9_000)
    tokenizer = load_tokenizer("bytes")
    tokenizer.save(tmp_path / "out" / "tokenizer.json")
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps(tokenizer.hf_config(16)))
    write_sums(tmp_path / "out")
    return tmp_path / "out"


def initial(folder: Path) -> DecoderLM:
    recipe = adopt(load_recipe("smoke"), folder)
    model = DecoderLM(recipe.model)
    load_initial(model, folder)
    return model


READERS: dict[str, Callable[[Path], DecoderLM]] = {
    "load_hf": load_hf,
    "generate and eval": lambda folder: restore_model(folder, "cpu")[0],
    "init-from": initial,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_or_missing_file_is_named(export: Path, reader: str) -> None:
    read = READERS[reader]
    assert_equal(read(export).state_dict(), load_hf(export).state_dict())
    for file in sorted(export.iterdir()):
        if file.name == "checksums.json":
            continue
        content = file.read_bytes()
        last = len(content) - 2 if file.suffix == ".json" else len(content) - 1  # a weight, or before the line end
        changes = {last: content[last] ^ 1, len(content) // 2: content[len(content) // 2] ^ 4, 12: content[12] ^ 2}
        for place, value in changes.items():
            file.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            with raises_one_line(rf"{file.name} does not match its checksum; export it again, or remove checksums"):
                read(export)
        file.write_bytes(content[:-1])
        with raises_one_line(rf"{file.name} has {len(content) - 1} bytes instead of {len(content)}"):
            read(export)
        file.unlink()
        with pytest.raises(ValueError, match=re.escape(file.name)):
            read(export)
        file.write_bytes(content)
    read(export)


def test_a_file_that_the_checksums_do_not_list_is_not_read(export: Path) -> None:
    (export / "chat_template.jinja").write_text("{{ messages }}")
    with raises_one_line("chat_template.jinja is not listed in checksums.json; remove that file"):
        restore_model(export, "cpu")


def test_changed_checksums_are_found(export: Path) -> None:
    path = export / "checksums.json"
    sums = json.loads(path.read_text())
    sums["files"]["config.json"]["bytes"] = -1
    for text in (json.dumps(sums), "", "[]", "null", path.read_text() + " "):
        path.write_text(text)
        with raises_one_line("checksums.json does not match its checksum"):
            load_hf(export)


def test_a_folder_without_checksums_says_so_once(export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--prompt", "a", "--max-new-tokens", "2", "--checkpoint", str(export)]
    assert main(command) == 0
    assert "unchecked" not in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_hf(export)
    (export / "checksums.json").unlink()
    assert main(command) == 0
    assert capsys.readouterr().err.count("has no checksums.json, so its files are used unchecked") == 1
    with pytest.warns(UserWarning, match=r"has no checksums\.json, so its files are used unchecked"):
        load_hf(export)


def test_adapters_are_compared_too(export: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = load_hf(export)
    add_lora(model, rank=2, alpha=4.0)
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter")
    write_sums(tmp_path / "adapter")
    load_adapter(load_hf(export), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, file, {"format": "pt"})
    other = load_hf(export)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with raises_one_line(r"adapter_model\.safetensors does not match its checksum"):
        load_adapter(other, tmp_path / "adapter")
    assert_equal(other.state_dict(), before)
