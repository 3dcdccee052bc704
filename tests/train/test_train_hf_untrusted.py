"""A base of transformers' own class that anybody may have written: nothing of it but settings and tensors is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from safetensors.torch import load_file, save_file
from test_train_hf_base import adapted, write_base

from tilemoe.train.checkpoints.restore import build_model
from tilemoe.train.config import Recipe

CPU, INDEX, GENERATION = torch.device("cpu"), "model.safetensors.index.json", "generation_config.json"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base("gpt_oss", tmp_path_factory.mktemp("base"))


@pytest.fixture
def base(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "base"))


def set_in(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a program as attention": ({"attn_implementation": "anybody/program"}, "attn_implementation is no setting"),
    "a program by its other name": ({"_attn_implementation": "anybody/program"}, "is no setting of a model"),
    "weights by a name": ({"transformers_weights": "pickle.bin"}, "transformers_weights is no setting"),
    "classes that change": ({"fusion_config": {"a": True}}, "fusion_config is no setting"),
    "a method": ({"to_dict": "x"}, "transformers does not know it"),
    "endless layers": ({"num_hidden_layers": 10**9}, "counts 1,000,000,000, more than 1,000"),
    "layers without weights": ({"num_hidden_layers": 900, "layer_types": None}, "has many more weights"),
    "endless types": ({"layer_types": ["full_attention"] * 300_000}, "layer_types counts 300,000"),
    "experts without weights": ({"num_local_experts": 10**7}, "claims .* values, and the files have"),
    "a text for a number": ({"hidden_size": "64"}, "expected int, got str"),
    "a broken number": ({"hidden_size": 64.7}, "expected int, got float"),
    "a text for a flag": ({"tie_word_embeddings": "no"}, "expected bool, got str"),
    "fewer than no experts": ({"num_local_experts": -1}, "it cannot be loaded"),
    "no heads": ({"num_attention_heads": 0}, "it cannot be loaded"),
    "more experts than there are": ({"num_experts_per_tok": 10**9}, "it cannot be computed"),
    "a list of angles": ({"rope_parameters": [1]}, "transformers does not know it"),
    "no dtype": ({"dtype": "load"}, "transformers does not know it"),
    "another class": ({"per_layer_config": {"0": {"hidden_size": 3}}}, "it cannot be loaded"),
    "quantised by nobody": ({"quantization_config": {"quant_method": "tilemoe"}}, "quantization_config is of None"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_checked(name: str, base: Path, moe_recipe: Recipe) -> None:
    settings, message = SETTINGS[name]
    set_in(base / "config.json", **settings)
    with raises_one_line(message) as caught:
        build_model(adapted(moe_recipe, base), CPU)
    assert str(base) in str(caught.value)


def indexed(base: Path, file: str) -> None:
    names = load_file(base / "model.safetensors")
    (base / "model.safetensors").rename(base / "weights.safetensors")
    (base / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))


def elsewhere(base: Path) -> None:
    shutil.copy(base / "model.safetensors", base.parent / "other.safetensors")
    indexed(base, "../other.safetensors")


def pickled(base: Path) -> None:
    torch.save(load_file(base / "model.safetensors"), base / "pickle.bin")
    indexed(base, "pickle.bin")


def linked(base: Path) -> None:
    target = base.parent / "other.safetensors"
    (base / "model.safetensors").rename(target)
    (base / "model.safetensors").symlink_to(target)


def pipe(name: str) -> Callable[[Path], None]:
    def make(base: Path) -> None:
        (base / name).unlink(missing_ok=True)
        os.mkfifo(base / name)

    return make


def of_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def make(base: Path) -> None:
        tensors = load_file(base / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})

    return make


def endless(base: Path) -> None:
    os.truncate(base / GENERATION, 1 << 40)


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights elsewhere": (elsewhere, "is no .safetensors file of this folder"),
    "weights in a pickle": (pickled, "is no .safetensors file of this folder"),
    "weights linked": (linked, "is a link to .*, out of the folder"),
    "a pipe for an index": (pipe(INDEX), "it is no regular file"),
    "a pipe for generation": (pipe(GENERATION), "it is no regular file"),
    "weights in integers": (of_dtype(torch.int64), "has model.norm.weight in I64, which are no floats"),
    "weights in bytes": (of_dtype(torch.uint8), "has model.norm.weight in U8, which are no floats"),
    "weights in fp8 without scales": (of_dtype(torch.float8_e4m3fn), "in F8_E4M3, which are no floats"),
    "endless generation": (endless, "it has more than 64 MiB"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_checked(name: str, base: Path, moe_recipe: Recipe) -> None:
    spoil, message = FILES[name]
    spoil(base)
    with raises_one_line(message):
        build_model(adapted(moe_recipe, base), CPU)


def test_what_else_is_in_the_folder_is_not_read(
    base: Path, moe_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = build_model(adapted(moe_recipe, base), CPU).model.state_dict()  # type: ignore[union-attr]
    (base / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}))
    (base / "adapter_model.bin").write_bytes(b"a pickle")
    (base / "shard-00000-model-00001-of-00001.safetensors").write_bytes(b"of a job")
    set_in(base / "config.json", auto_map={"AutoModelForCausalLM": "theirs.Model"})
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("it unpickles"))
    found = build_model(adapted(moe_recipe, base), CPU).model.state_dict()  # type: ignore[union-attr]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if "lora_" not in name)
