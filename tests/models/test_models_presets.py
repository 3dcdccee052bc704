"""Presets by their names; parameters and FLOPs against real models."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tilemoe import reference
from tilemoe.config import ROUTER_OF_MODEL, ModelConfig, MoEConfig, RouterConfig
from tilemoe.layers import experts
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.flops import count_active_parameters, count_parameters, flops_per_token
from tilemoe.models.presets import MODEL_PRESETS, MOE_PRESETS, model_preset, moe_preset, preset_named


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"moe preset must be one of .*kimi-k2.*; got 'kimi'"):
        moe_preset("kimi")
    with pytest.raises(ValueError, match=r"model preset must be one of .*; got 'deepseek-v3'"):
        model_preset("deepseek-v3")
    with pytest.raises(ValueError, match="moe preset must be one of"):
        moe_preset(["kimi-k2"])
    assert set(MODEL_PRESETS) == {"mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b", "qwen3-235b-a22b"}


ROUTER = RouterConfig(bias=True, selection_bias=True)
MOE = MoEConfig(16, 8, 6, 2, expert_bias=True, shared_intermediate_size=12, shared_gate=True, router=ROUTER)
CONFIG = tiny_model(vocab_size=50, max_seq_len=64, moe=MOE)
VARIANTS = [
    CONFIG,
    replace(CONFIG, tie_embeddings=True),
    replace(CONFIG, moe=None),
    replace(CONFIG, moe=MoEConfig(16, 8, 6, 2, activation="relu2", shared_intermediate_size=4)),
]


@pytest.mark.parametrize("config", VARIANTS)
def test_parameter_counts_are_those_of_the_model(config: ModelConfig) -> None:
    model = DecoderLM(config, device="meta")
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert count_active_parameters(config) == count_parameters(config) - of_experts * 4 // 6, "2 of 6 are active"


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("config", VARIANTS)
def test_flops_are_those_that_pytorch_counts(
    config: ModelConfig, is_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights have no gradient, what goes through them has."""
    # PyTorch counts matrix products: the reference's are plain ones, as are attention's without a fused kernel.
    monkeypatch.setattr(experts, "moe", reference.moe)
    model = DecoderLM(config).requires_grad_(not is_frozen)
    model.embed.register_forward_hook(lambda module, given, out: out.detach().requires_grad_() if is_frozen else out)
    tokens = torch.randint(0, 50, (2, 64))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = model(tokens, tokens)
        out.loss.backward()
    # It multiplies each query with all 64 keys, where a causal kernel needs 32.5 on average.
    masked = 6 * (64 - 32.5) * 2 * config.num_layers * config.num_heads * config.head_dim
    assert flops_per_token(config, is_frozen=is_frozen) == counter.get_total_flops() / tokens.numel() - masked


def test_flops_grow_with_the_context_and_the_active_experts_only() -> None:
    per_key = 6 * 2 * 3 * 4 * 8
    assert flops_per_token(CONFIG, 33) - flops_per_token(CONFIG, 31) == per_key
    assert flops_per_token(CONFIG) == flops_per_token(CONFIG, 64)
    more_experts = flops_per_token(replace(CONFIG, moe=replace(MOE, num_experts=12)))
    assert more_experts - flops_per_token(CONFIG) == 2 * 6 * 6 * 16  # their rows in the router
    with pytest.raises(ValueError, match="seq_len"):
        flops_per_token(CONFIG, 0)


@pytest.mark.parametrize("name", MOE_PRESETS)
def test_one_name_finds_the_layer_and_its_router_in_any_spelling(name: str) -> None:
    for spelled in (name, name.upper(), name.replace("-", "_")):
        assert moe_preset(spelled) is MOE_PRESETS[name]
        assert RouterConfig.preset(spelled) is MOE_PRESETS[name].router
    assert set(ROUTER_OF_MODEL) == set(MOE_PRESETS)


def test_a_preset_is_found_by_a_beginning_that_no_other_has() -> None:
    assert preset_named("--preset", "GLM_4.5") == "glm-4.5"
    assert preset_named("--preset", "deepseek") == "deepseek-v3"
    for name in ("qwen3", "", "nope", "v3"):
        with pytest.raises(ValueError, match=r"--preset must be one of .*qwen3-30b-a3b"):
            preset_named("--preset", name)
