"""Checkpoints of transformers' Qwen3-MoE, OLMoE and Mixtral: in, out, and back, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.flops import count_parameters
from tilemoe.models.hf_config import config_from_hf, hf_config_dict
from tilemoe.models.huggingface import from_hf_state_dict, load_hf, save_hf, to_hf_state_dict

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=6, head_dim=16, mlp_only_layers=[1]),
    ),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SIZES, num_experts=6)),
    "olmoe, normalised and tied": (
        OlmoeForCausalLM,
        OlmoeConfig(**SIZES, num_experts=6, norm_topk_prob=True, tie_word_embeddings=True),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=6)),
    "mixtral, wide heads": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=6, head_dim=16)),
}


def random_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, config = FAMILIES[family]
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.3)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 0.2)
    return model.to(dtype)


def batch() -> Tensor:
    return torch.randint(0, 53, (2, 17), generator=torch.Generator().manual_seed(2))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits_loss_and_gradients(family: str) -> None:
    theirs = random_model(family)
    config = config_from_hf(theirs.config.to_dict())
    ours = DecoderLM(config)
    state = theirs.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    ours.load_state_dict(from_hf_state_dict(config, state))
    assert count_parameters(config) == theirs.num_parameters() == sum(p.numel() for p in ours.parameters())
    tokens = batch()
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    loss, their_loss = ours(tokens[:, :-1], tokens[:, 1:]).loss, theirs(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    their_loss.backward()
    expected = from_hf_state_dict(config, {name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert expected[name].any(), name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_in_and_out_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = random_model(family, dtype)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ours = load_hf(tmp_path / "theirs", dtype=dtype)
    save_hf(ours, tmp_path / "ours", max_shard_bytes=15_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    before, after = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == dtype
        assert torch.equal(after[name], tensor), name
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(before)

    back, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert type(back) is type(theirs)
    assert not any(report.values()), report
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")  # .to(dtype) has rounded theirs' rotary buffers
    with torch.no_grad():
        assert torch.equal(back(batch()).logits, again(batch()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_interleaved_layers_export_alike(family: str) -> None:
    theirs = random_model(family)
    config = config_from_hf(theirs.config.to_dict())
    assert config.moe is not None
    turned = replace(config, moe=replace(config.moe, gate_up="interleaved"))
    exported = []
    for each in (config, turned):
        model = DecoderLM(each)
        state = {
            name: t for name, t in theirs.state_dict().items() if not config.tie_embeddings or "lm_head" not in name
        }
        model.load_state_dict(from_hf_state_dict(each, state))
        exported.append(to_hf_state_dict(model))
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


class Allocations(TorchDispatchMode):
    """Bytes of every result of an operator that is no view of its arguments, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.device.type == "cpu":
            given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and arg.is_cpu}
            if out.untyped_storage().data_ptr() not in given:
                self.made.append((func.__name__, out.untyped_storage().nbytes()))
        return out


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_nothing_larger_than_a_tensor_of_the_file_is_made_beside_the_model(gate_up: str, tmp_path: Path) -> None:
    theirs = random_model("mixtral")
    theirs.save_pretrained(tmp_path / "model")
    largest = max(tensor.nbytes for tensor in tensors_of(tmp_path / "model").values())
    config = config_from_hf(theirs.config.to_dict())
    assert config.moe is not None
    model = DecoderLM(replace(config, moe=replace(config.moe, gate_up=gate_up)))
    assert sum(p.nbytes for p in model.parameters()) > 10 * largest

    with Allocations() as exporting:
        tensors = to_hf_state_dict(model)
    assert not exporting.made
    if gate_up == "concatenated":
        assert all(tensor.is_contiguous() for tensor in tensors.values())  # so safetensors writes from where they lie

    with Allocations() as loading:
        load_hf(tmp_path / "model")
    parameters = [nbytes for name, nbytes in loading.made if name.startswith("empty")]
    assert sum(parameters) == sum(p.nbytes for p in model.parameters())
    assert max((nbytes for name, nbytes in loading.made if not name.startswith("empty")), default=0) <= largest


@pytest.mark.parametrize(
    ("qk_norm", "change", "message"),
    [
        ("none", {"router": RouterConfig(normalize=False)}, "moe.router.normalize=False has no place in MixtralFor"),
        ("none", {"activation": "geglu"}, "moe.activation='geglu' has no place in MixtralForCausalLM"),
        ("full", {"expert_bias": True}, "moe.expert_bias=True has no place in OlmoeForCausalLM"),
    ],
)
def test_what_an_architecture_cannot_express_is_not_exported(
    qk_norm: Any, change: dict[str, Any], message: str
) -> None:
    config = config_from_hf(FAMILIES["mixtral"][1].to_dict())
    assert config.moe is not None
    with pytest.raises(ValueError, match=message):
        hf_config_dict(replace(config, qk_norm=qk_norm, moe=replace(config.moe, **change)))


def test_what_only_qwen3_has() -> None:
    config = config_from_hf(FAMILIES["mixtral"][1].to_dict())
    for qk_norm in ("none", "full"):
        dense = replace(config, qk_norm=qk_norm, dense_layers=(0,), dense_intermediate_size=8)
        with pytest.raises(ValueError, match="number of dense layers=1 has no place"):
            hf_config_dict(dense)
    with pytest.raises(ValueError, match="head_dim=16 has no place in OlmoeForCausalLM; only 8"):
        hf_config_dict(replace(config, qk_norm="full", head_dim=16))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv must be None, got 8.0"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window must be None, got 4096"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ],
)
def test_what_the_decoder_does_not_implement(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({**FAMILIES[family][1].to_dict(), **change})


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_survives_the_round_trip(family: str) -> None:
    config = config_from_hf(FAMILIES[family][1].to_dict())
    assert config_from_hf(json.loads(json.dumps(hf_config_dict(config)))) == config


def test_an_unknown_norm_is_named() -> None:
    with pytest.raises(ValueError, match=r"model\.qk_norm must be one of full, head, none; got 'layer'"):
        replace(config_from_hf(FAMILIES["olmoe"][1].to_dict()), qk_norm="layer")  # type: ignore[arg-type]


def test_shared_experts_have_no_place() -> None:
    config = config_from_hf(FAMILIES["olmoe"][1].to_dict())
    with pytest.raises(ValueError, match=r"moe\.shared_intermediate_size"):
        hf_config_dict(replace(config, moe=MoEConfig(32, 24, 6, 2, shared_intermediate_size=8)))
