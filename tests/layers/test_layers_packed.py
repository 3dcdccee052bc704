"""Adapters on experts in 4 bits: bytes, values, saving, merging, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import raises_one_line, redraw
from nf4_checks import frozen_bytes
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tilemoe import DecoderLM, ModelConfig, MoE, MoEConfig
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.layers.lora import ATTENTION, PackedLoRAExperts, adapter_names, add_lora, merge_lora
from tilemoe.testing import assert_equal, relative_error

# gpt-oss's activation, layout and biases.
CFG = MoEConfig(64, 128, 5, 2, activation="swiglu_oai", expert_bias=True, gate_up="interleaved", initializer_range=0.1)
BITS = {"nf4": 4.5, "nf4_double": 4.13, "mxfp4": 4.25}
each_storage = pytest.mark.parametrize("storage", STORAGES)


def layer(storage: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> MoE:
    """With trained adapters: no b is zero."""
    moe = MoE(CFG, dtype=dtype)
    moe.reset_parameters(torch.Generator().manual_seed(seed))
    redraw(add_lora(moe, 4, 8.0, storage=storage), 0.2, seed)
    return moe


def tokens() -> Tensor:
    return torch.randn(30, 64, generator=torch.Generator().manual_seed(1))


@each_storage
def test_frozen_experts_take_their_bits(storage: str) -> None:
    dense = MoE(CFG, dtype=torch.bfloat16)
    assert frozen_bytes(layer(storage)) == pytest.approx(BITS[storage] / 16 * frozen_bytes(dense), rel=0.015)


@each_storage
def test_nothing_but_adapters_trains_and_weights_are_near_what_they_were(storage: str) -> None:
    moe = MoE(CFG)
    moe.reset_parameters(torch.Generator().manual_seed(0))
    before = moe(tokens()).hidden.detach()
    adapters = add_lora(moe, 4, 8.0, storage=storage)
    assert [name for name, each in moe.named_parameters() if each.requires_grad] == sorted(
        adapter_names(moe), key=[name for name, _ in moe.named_parameters()].index
    )
    assert len(adapters) == 4
    assert 0.01 < relative_error(moe(tokens()).hidden.detach(), before) < 0.2, "4 bits"
    with pytest.raises(RuntimeError, match="floating point"):
        moe.requires_grad_(True)


@each_storage
def test_state_is_codes_and_scales_and_survives_saving(storage: str) -> None:
    moe, other = layer(storage, seed=0), layer(storage, seed=1)
    state = moe.state_dict()
    assert {f"experts.{name}_{part}" for name in ("w1", "w2") for part in STORAGES[storage].parts} < state.keys()
    assert not {"experts.w1", "experts.w2"} & state.keys()
    other.load_state_dict(state)
    assert_equal(other(tokens()).hidden, moe(tokens()).hidden)


@each_storage
def test_a_layer_on_the_meta_device_is_filled_from_a_state(storage: str) -> None:
    moe, empty = layer(storage), MoE(CFG, device="meta")
    add_lora(empty, 4, 8.0, storage=storage)
    empty.to_empty(device="cpu").load_state_dict(moe.state_dict())
    assert_equal(empty(tokens()).hidden, moe(tokens()).hidden)


def test_a_layer_is_filled_with_gpt_oss_tensors_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (5, 256, 2), "w2": (5, 64, 4)}
    blocks = {k: torch.randint(256, (*v, 16), dtype=torch.uint8, generator=generator) for k, v in shapes.items()}
    scales = {k: torch.randint(118, 122, v, dtype=torch.uint8, generator=generator) for k, v in shapes.items()}
    moe, dense = layer("mxfp4"), MoE(CFG)
    state = moe.state_dict()
    for name in shapes:
        state[f"experts.{name}_codes"] = blocks[name].flatten(-2)
        state[f"experts.{name}_exponents"] = scales[name]
        weight = convert_moe_packed_tensors(blocks[name], scales[name], dtype=torch.float32).transpose(1, 2)
        dense.experts.get_parameter(name).data.copy_(weight)
    moe.load_state_dict(state)
    redraw(add_lora(dense, 4, 8.0), 0.2, seed=0)
    dense.load_state_dict(
        {k: v for k, v in state.items() if not k.startswith(("experts.w1", "experts.w2"))}, strict=False
    )
    assert_equal(moe(tokens()).hidden, dense(tokens()).hidden)


@each_storage
def test_reset_weights_are_those_of_a_dense_layer_with_new_adapters(storage: str) -> None:
    moe, plain = layer(storage), MoE(CFG)
    moe.experts.b1.data.fill_(1.0)
    for each in (moe, plain):
        each.reset_parameters(torch.Generator().manual_seed(3))
    expected = plain(tokens()).hidden.detach()
    add_lora(plain, 4, 8.0, storage=storage)
    same = {name: each for name, each in plain.named_parameters() if not name.endswith(("up_a", "down_a"))}
    assert_equal({name: each for name, each in moe.named_parameters() if name in same}, same)
    assert relative_error(moe(tokens()).hidden.detach(), expected) < 0.2
    assert 0 < moe.experts.up_a.abs().max() <= 64**-0.5


@each_storage
def test_scales_keep_their_dtype_in_a_narrower_model(storage: str) -> None:
    moe = layer(storage)
    names = [f"w1_{part}" for part in STORAGES[storage].parts]
    before = [moe.experts.get_parameter(name).detach().clone() for name in names]
    moe.to(torch.bfloat16)
    assert_equal([moe.experts.get_parameter(name).detach() for name in names], before)
    assert moe.experts.up_a.dtype == moe(tokens().bfloat16()).hidden.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_storage
def test_merged_are_the_decoded_weights_and_the_adapters_rounded_once(storage: str, dtype: torch.dtype) -> None:
    moe = layer(storage, dtype=dtype)
    experts, x = moe.experts, tokens().to(dtype)
    assert isinstance(experts, PackedLoRAExperts)
    adapted = moe(x).hidden.detach()
    frozen = experts._frozen("w1", lambda t: t)
    exact = torch.stack([frozen.expert(index, torch.float32).double() for index in range(5)])
    exact += 2.0 * experts.up_b.detach().double() @ experts.up_a.detach().double()
    merge_lora(moe)
    assert relative_error(moe.experts.w1.detach(), exact) < 1.01 * relative_error(exact.to(dtype), exact) + 1e-7
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert [name for name, _ in moe.named_parameters()] == [name for name, _ in MoE(CFG).named_parameters()]
    assert relative_error(moe(x).hidden.detach(), adapted.double()) < limit


@pytest.mark.parametrize(
    ("cfg", "options", "message"),
    [
        (replace(CFG, hidden_size=72), {}, "hidden_size must be a multiple of 64, the block of NF4, got 72; pad it"),
        (replace(CFG, intermediate_size=40), {}, "intermediate_size must be a multiple of 64, .* got 40; pad it"),
        (
            replace(CFG, intermediate_size=40),
            {"storage": "mxfp4"},
            "intermediate_size must be a multiple of 32, the block of MXFP4, got 40; pad it, or leave MXFP4 out",
        ),
        (CFG, {"dtype": torch.float64}, "experts in fp64 cannot be kept in NF4, whose values are fp32; cast the model"),
        (CFG, {"storage": "int8"}, "storage must be one of"),
        (CFG, {"modules": (ATTENTION,)}, "storage='nf4' is for experts; add 'experts' to modules"),
    ],
)
def test_what_is_refused_is_named_and_nothing_changes(cfg: MoEConfig, options: dict[str, Any], message: str) -> None:
    given = {"storage": "nf4", **options}
    model = ModelConfig(29, cfg.hidden_size, 2, 2, 1, 8, 32, moe=cfg)
    module = DecoderLM(model, dtype=given.pop("dtype", None))
    before = dict(module.named_parameters())
    with raises_one_line(message):
        add_lora(module, 4, 8.0, **given)
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    assert all(each.requires_grad for each in after.values())
