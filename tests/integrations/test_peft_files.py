"""Adapters in PEFT's files, ours and PEFT's: in our decoder and in transformers' own model they compute the same."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import from_hf_state_dict, raises_one_line, redraw
from hf_models import FAMILIES, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tilemoe.integrations.peft import load_adapter, save_adapter
from tilemoe.layers.lora import ATTENTION, EXPERTS, add_lora, merge_lora
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.huggingface import load_hf, save_hf
from tilemoe.testing import assert_equal, relative_error

NAMES = ("mlp.experts", "self_attn.q_proj")
BASES = ("olmoe", "qwen3_moe", "mixtral")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
Settings, Tensors = dict[str, Any], dict[str, Tensor]


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


def train_whole(model: DecoderLM) -> None:
    """Routers and norms, as if trained."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight") or "norm." in name:
            parameter.requires_grad_(True).data.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def state_of(model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Its values, and the names of what trains."""
    return dict(model.state_dict()), [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("family", "modules", "whole"),
    [
        *((family, (EXPERTS, ATTENTION), True) for family in BASES),
        ("olmoe", (EXPERTS,), False),
        ("mixtral", (ATTENTION,), False),
    ],
)
def test_ours_through_peft_and_back(family: str, modules: tuple[str, ...], whole: bool, tmp_path: Path) -> None:
    theirs = base_of(family, tmp_path / "base")
    model = trained(load_hf(tmp_path / "base"), modules)
    if whole:
        train_whole(model)
    save_adapter(model, emptied(tmp_path / "ours"))
    PeftModel.from_pretrained(theirs, tmp_path / "ours").save_pretrained(str(tmp_path / "theirs"))
    read = load_hf(tmp_path / "base")
    load_adapter(read, tmp_path / "theirs")
    assert_equal(state_of(read)[0], state_of(model)[0])
    assert state_of(read)[1] == state_of(model)[1]


def train_a_step(model: Any) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(tokens()).logits


@pytest.mark.parametrize("family", BASES)
def test_what_peft_trained_computes_the_same_here(family: str, tmp_path: Path) -> None:
    theirs = base_of(family, tmp_path / "base")
    plain = logits_of(theirs)
    settings = LoraConfig(
        r=4, lora_alpha=10, target_modules=PROJECTIONS, target_parameters=["experts.down_proj", "gate_up_proj"]
    )
    peft: Any = get_peft_model(theirs, settings)
    train_a_step(peft)
    peft.save_pretrained(str(tmp_path / "adapter"))
    model = load_hf(tmp_path / "base")
    load_adapter(model, tmp_path / "adapter")
    expected = logits_of(peft)
    assert relative_error(plain, expected) > 0.05
    assert relative_error(logits_of(model), expected) < 1e-5


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_peft_saves_and_loads_over_our_experts(family: str, tmp_path: Path) -> None:
    base_of(family, tmp_path / "base")

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", experts_implementation="tilemoe").eval()

    peft: Any = get_peft_model(
        base(), LoraConfig(r=4, target_modules=PROJECTIONS, target_parameters=["gate_up_proj", "down_proj"])
    )
    plain = logits_of(peft)
    train_a_step(peft)
    expected = logits_of(peft)
    assert relative_error(plain, expected) > 0.05
    peft.save_pretrained(str(tmp_path / "adapter"))
    read: Any = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert read.get_base_model().config._experts_implementation == "tilemoe"
    assert_equal(logits_of(read), expected)
    read.set_experts_implementation("eager")
    assert relative_error(logits_of(read), expected) < 1e-5


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a folder of adapters on all of it."""
    folder = tmp_path_factory.mktemp("saved")
    base_of("olmoe", folder / "base")
    save_adapter(trained(load_hf(folder / "base"), (EXPERTS, ATTENTION)), emptied(folder / "adapter"))
    return folder / "base", folder / "adapter"


FIRST = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
HEAD = "base_model.model.lm_head.lora_A.weight"
ALL = "here it may be none or all of"
WRONG: list[tuple[Settings | Callable[[Tensors], Any], str]] = [
    ({"use_dora": True}, "adapter_config.json: use_dora is True, which adapters here have not"),
    ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is {'q_proj': 2}, which gives attention several; here"),
    ({"rank_pattern": {"layers.1.mlp.*": 2}}, "rank_pattern is {.*}, which gives experts several"),
    ({"alpha_pattern": {".*experts.*": 7}}, "lora_alpha / r is 2.33333 on experts and 2 on attention, and"),
    ({"alpha_pattern": {"(": 7}}, "alpha_pattern is .*, which is no table of patterns"),
    ({"alpha_pattern": {"(.*)*x": 7}}, "alpha_pattern is .*, which is no table of patterns"),
    *(({"rank_pattern": {each: 7}}, "no table of patterns") for each in ("\\2", "a\\", "*a", "a**", "^*", "\\b*")),
    ({"rank_pattern": {".*.*.*x": 7}}, "rank_pattern is .*, which is no table of patterns"),
    ({"rank_pattern": dict.fromkeys(map(str, range(10**5)), 7)}, "which is no table of patterns"),
    ({"alpha_pattern": [7]}, r"alpha_pattern is \[7\], which is no table of patterns"),
    ({"of_a_later_release": 3}, "of_a_later_release is 3, which"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base, too"),
    ({"target_modules": ["q_proj", "v_proj"]}, rf"target_modules is \['q_proj', 'v_proj'\]; {ALL} q_proj, "),
    ({"target_modules": [*PROJECTIONS, "gate"]}, f"target_modules is .*'gate'.*; {ALL}"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, f"target_parameters is .*; {ALL} mlp.experts.gate"),
    ({"modules_to_save": ["lm_head"]}, f"modules_to_save is .*'lm_head'.*; {ALL} mlp.gate, or input_layern"),
    ({"target_modules": None, "target_parameters": None}, "neither target_modules nor target_parameters"),
    ({"lora_alpha": None}, "adapter_config.json: alpha must be a finite number > 0, got None"),
    ({"r": 4}, r"adapter_model.safetensors: .*lora_A.weight must be \(.*\) for the model, got"),
    ({"modules_to_save": ["mlp.gate"]}, "layers.0.mlp.gate.weight is missing; save it from"),
    (lambda given: given.pop(FIRST), f"{FIRST} is missing"),
    (lambda given: given.update({HEAD: torch.zeros(3, 32)}), f"{HEAD} is of no adapter that adapter_config.json and"),
    (lambda given: given.update({FIRST: given[FIRST][:, 1:].contiguous()}), rf"{FIRST} must be \(18, 32\) for .*31\)"),
    (lambda given: given.update({FIRST: given[FIRST].int()}), f"{FIRST} must be of a floating dtype, got torch.int32"),
    (lambda given: given[FIRST][:1, :1].fill_(torch.nan), f"{FIRST} is not finite"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_not_ours_is_named_and_nothing_changes(
    change: Settings | Callable[[Tensors], Any], message: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of other settings, or of tensors to which a function did something."""
    base, adapter = saved
    config, weights = "adapter_config.json", "adapter_model.safetensors"
    settings, tensors = json.loads((adapter / config).read_text()), load_file(adapter / weights)
    if isinstance(change, dict):
        settings |= change
    else:
        change(tensors)
    (tmp_path / config).write_text(json.dumps(settings))
    save_file(tensors, tmp_path / weights)
    model = load_hf(base)
    before = state_of(load_hf(base))
    with raises_one_line(message):
        load_adapter(model, tmp_path)
    assert_equal(state_of(model)[0], before[0])
    assert state_of(model)[1] == before[1]


def test_files_that_are_missing_or_damaged_are_named(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = saved
    model = load_hf(base)
    with raises_one_line("adapter_config.json cannot be read .*; give a folder that PEFT saved"):
        load_adapter(model, tmp_path)
    for text, message in (("{", "cannot be read"), ("[]", r"must hold a table of settings, got \[\]")):
        (tmp_path / "adapter_config.json").write_text(text)
        with raises_one_line(message):
            load_adapter(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    torch.save({}, tmp_path / "adapter_model.bin")
    with raises_one_line("adapter_model.safetensors is missing; let PEFT save safetensors, nothing else is read"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 20)
    with raises_one_line("adapter_model.safetensors cannot be read .*; save or download it again"):
        load_adapter(model, tmp_path)


def test_models_that_cannot_take_them(saved: tuple[Path, Path]) -> None:
    base, adapter = saved
    model = load_hf(base)
    add_lora(model, 3, 7.0)
    with raises_one_line(
        "model has adapters of rank 3 and alpha 7 on experts, and .*adapter has them of rank 3 and alpha 6 on experts "
        "and attention; load it into a model without adapters"
    ):
        load_adapter(model, adapter)
    with raises_one_line("model is without memory or shared by processes; load adapters before tilemoe.parallelize"):
        load_adapter(DecoderLM(model.config, device="meta"), adapter)
    with raises_one_line("model must be a DecoderLM, got Linear"):
        load_adapter(nn.Linear(2, 2), adapter)  # type: ignore[arg-type]
