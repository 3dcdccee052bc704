"""Adapters written for PEFT: on transformers' model of the same base they compute what ours do."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import from_hf_state_dict, raises_one_line, redraw
from hf_models import FAMILIES, tokens
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from tilemoe.integrations.peft import load_adapter, save_adapter
from tilemoe.layers.lora import ATTENTION, EXPERTS, add_lora, merge_lora
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import load_hf, save_hf
from tilemoe.testing import assert_equal, relative_error

NAMES = ("mlp.experts", "self_attn.q_proj")
BASES = ("olmoe", "qwen3_moe", "mixtral")


def base_of(family: str, folder: Path) -> PreTrainedModel:
    theirs = FAMILIES[family].make().float().eval()
    theirs.save_pretrained(folder)
    return theirs


def emptied(folder: Path) -> Path:
    folder.mkdir()
    return folder


def trained(model: DecoderLM, modules: tuple[str, ...], storage: str = "dense", **more: int) -> DecoderLM:
    redraw(add_lora(model, 3, 6.0, modules=modules, storage=storage, **more), 0.3, seed=2)
    return model.eval()


@pytest.mark.parametrize("modules", [(EXPERTS,), (ATTENTION,), (EXPERTS, ATTENTION)])
@pytest.mark.parametrize("family", BASES)
@torch.no_grad()
def test_peft_computes_our_logits(family: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    theirs = base_of(family, tmp_path / "base")
    plain = theirs(input_ids=tokens()).logits
    model = trained(load_hf(tmp_path / "base"), modules)
    ours = model(tokens()).logits
    assert relative_error(ours, plain) > 0.05
    save_adapter(model, emptied(tmp_path / "adapter"), base=str(tmp_path / "base"))
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    found = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert found.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    assert relative_error(found(input_ids=tokens()).logits, ours) < 1e-5


@torch.no_grad()
def test_attention_of_another_rank(tmp_path: Path) -> None:
    """Of the same scale, as the settings in PEFT's file have it, and back."""
    theirs = base_of("qwen3_moe", tmp_path / "base")
    model = trained(load_hf(tmp_path / "base"), (EXPERTS, ATTENTION), attention_rank=5)
    save_adapter(model, tmp_path)
    found = PeftModel.from_pretrained(theirs, tmp_path)
    experts, attention = (found.get_submodule(f"base_model.model.model.layers.0.{name}") for name in NAMES)
    assert [each.r["default"] for each in (experts, attention)] == [3, 5]
    assert [each.scaling["default"] for each in (experts, attention)] == [2.0, 2.0]
    assert relative_error(found(input_ids=tokens()).logits, model(tokens()).logits) < 1e-5
    found.save_pretrained(str(tmp_path / "theirs"))
    load_adapter(read := load_hf(tmp_path / "base"), tmp_path / "theirs")
    assert_equal(dict(read.state_dict()), dict(model.state_dict()))


@torch.no_grad()
def test_interleaved_rows_and_another_dtype(tmp_path: Path) -> None:
    """In PEFT they compute the same, and back in a decoder of the same rows they are the same."""
    theirs = base_of("olmoe", tmp_path / "base")
    config = load_hf(tmp_path / "base").config
    assert config.moe is not None
    config = replace(config, moe=replace(config.moe, gate_up="interleaved"))
    model = DecoderLM(config, dtype=torch.float64)
    model.load_state_dict(from_hf_state_dict(config, theirs.state_dict()))
    trained(model, (EXPERTS, ATTENTION))
    save_adapter(model, emptied(tmp_path / "adapter"))
    read = DecoderLM(config)
    load_adapter(read, str(tmp_path / "adapter"))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert_equal({name: p for name, p in read.named_parameters() if p.requires_grad}, adapters)
    found = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert relative_error(found(input_ids=tokens()).logits, model(tokens()).logits) < 1e-5


@torch.no_grad()
def test_adapters_on_experts_in_4_bit(tmp_path: Path) -> None:
    """Their base has the decoded weights: merging adapters that change nothing leaves these."""
    FAMILIES["olmoe"].make(hidden_size=64, intermediate_size=64).float().save_pretrained(tmp_path / "base")
    decoded = load_hf(tmp_path / "base")
    add_lora(decoded, 3, 6.0, storage="nf4")
    merge_lora(decoded)
    save_hf(decoded, tmp_path / "decoded")
    model = trained(load_hf(tmp_path / "base"), (EXPERTS, ATTENTION), "nf4")
    save_adapter(model, emptied(tmp_path / "adapter"))
    read = load_hf(tmp_path / "base")
    add_lora(read, 3, 6.0, modules=(EXPERTS, ATTENTION), storage="nf4")
    load_adapter(read, tmp_path / "adapter")
    assert_equal(dict(read.state_dict()), dict(model.state_dict()))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "decoded").eval()
    found = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    assert relative_error(found(input_ids=tokens()).logits, model(tokens()).logits) < 1e-5


@torch.no_grad()
def test_merged_weights_are_written_and_weights_without_adapters_are_not(tmp_path: Path) -> None:
    base_of("mixtral", tmp_path / "base")
    model = trained(load_hf(tmp_path / "base"), (EXPERTS, ATTENTION))
    ours = model(tokens()).logits
    with raises_one_line("the model has adapters, which these weights would lack; call merge_lora first"):
        save_hf(model, tmp_path / "merged")
    merge_lora(model)
    save_hf(model, tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert relative_error(theirs(input_ids=tokens()).logits, ours) < 1e-5
    with raises_one_line("the model has no adapters; write its weights instead"):
        save_adapter(model, tmp_path)


def test_a_missing_peft_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base_of("olmoe", tmp_path / "base")
    monkeypatch.setitem(sys.modules, "peft", None)
    with raises_one_line(r"PEFT's format needs peft and transformers .*; pip install 'tilemoe\[lora\]'"):
        save_adapter(trained(load_hf(tmp_path / "base"), (EXPERTS,)), tmp_path)
