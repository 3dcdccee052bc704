"""Presets against published parameter counts and transformers' defaults; parameters and FLOPs against real models."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig, Qwen3NextConfig

from tilemoe import reference
from tilemoe.config import ROUTER_OF_MODEL, ModelConfig, MoEConfig, RouterConfig
from tilemoe.layers import experts
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.flops import count_active_parameters, count_parameters, flops_per_token
from tilemoe.models.presets import MODEL_PRESETS, MOE_PRESETS, model_preset, moe_preset, preset_named

# Published: MoE layers, parameters of the whole model in billions, and of those the active ones.
PUBLISHED = {
    "mixtral-8x7b": (32, 46.7, 12.9),
    "olmoe-1b-7b": (16, 6.9, 1.3),
    "qwen3-30b-a3b": (48, 30.5, 3.3),
    "qwen3-235b-a22b": (94, 235.0, 22.0),
    "qwen3-next-80b-a3b": (48, 80.0, 3.0),
    "deepseek-v3": (58, 671.0, 37.0),
    "kimi-k2": (60, 1040.0, 32.0),
    "glm-4.5": (89, 355.0, 32.0),
    "glm-4.5-air": (45, 106.0, 12.0),
    "gpt-oss-20b": (24, 20.9, 3.6),
    "gpt-oss-120b": (36, 116.8, 5.1),
    "granite-3-1b-a400m": (24, 1.33, 0.4),
    "granite-3-3b-a800m": (32, 3.3, 0.8),
}


def experts_of_model(cfg: MoEConfig, layers: int, per_layer: int) -> float:
    """Billions of parameters in ``per_layer`` experts, and the shared one, of all layers."""
    matrices = 3 if cfg.is_gated else 2
    width = per_layer * cfg.intermediate_size + cfg.shared_intermediate_size
    return layers * matrices * cfg.hidden_size * width / 1e9


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_experts_make_up_most_of_the_published_size(name: str) -> None:
    layers, total, active = PUBLISHED[name]
    cfg = moe_preset(name)
    assert 0.88 * total < experts_of_model(cfg, layers, cfg.num_experts) < total
    assert 0.35 * active < experts_of_model(cfg, layers, cfg.num_experts_per_tok) < active


def test_every_preset_is_checked() -> None:
    assert set(PUBLISHED) == set(MOE_PRESETS)


# How transformers' default configurations name d, n, E, K and the shared expert's width, where there is one.
QWEN_NAMES = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
DEEPSEEK_NAMES = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
DEFAULTS = {
    "mixtral-8x7b": (MixtralConfig, ("hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok")),
    "gpt-oss-120b": (GptOssConfig, ("hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok")),
    "deepseek-v3": (DeepseekV3Config, (*DEEPSEEK_NAMES, "moe_intermediate_size")),  # one shared expert
    "qwen3-next-80b-a3b": (Qwen3NextConfig, (*QWEN_NAMES, "shared_expert_intermediate_size")),
    "qwen3-30b-a3b": (Qwen3MoeConfig, QWEN_NAMES),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_dimensions_are_those_of_transformers_defaults(name: str) -> None:
    make, names = DEFAULTS[name]
    theirs, ours = make(), moe_preset(name)
    assert getattr(theirs, "n_shared_experts", 1) == 1
    sizes = (ours.hidden_size, ours.intermediate_size, ours.num_experts, ours.num_experts_per_tok)
    expected = [getattr(theirs, each) for each in names]
    assert list(sizes) == expected[:4]
    assert ours.shared_intermediate_size == (expected[4] if len(expected) == 5 else 0)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.53e9, 3.35e9),
        ("qwen3-235b-a22b", 235.09e9, 22.19e9),
        ("olmoe-1b-7b", 6.92e9, 1.28e9),
        ("mixtral-8x7b", 46.70e9, 12.88e9),
    ],
)
def test_whole_models_have_the_published_size(name: str, total: float, active: float) -> None:
    config = model_preset(name)
    assert count_parameters(config) == pytest.approx(total, rel=1e-3)
    assert count_active_parameters(config) == pytest.approx(active, rel=1e-2)
    assert config.moe == moe_preset(name)


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
