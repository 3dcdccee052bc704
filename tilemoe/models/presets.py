"""Dimensions of public architectures by name. Standard library only.

Sources: each model's published config.json. `moe_preset` gives the mixture-of-experts layer alone, `model_preset` the
whole decoder if `ModelConfig` can express it. `preset_sizes.py` has the sizes of all whole models.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tilemoe.checks import find_named, shown, spelled
from tilemoe.config import ModelConfig, MoEConfig, RouterConfig


def moe_preset(name: str) -> MoEConfig:
    """The MoE layer of a public model, by its published config.json. ValueError: an unknown name; it lists the names.

    Examples:
        >>> cfg = tilemoe.moe_preset("qwen3-next-80b-a3b")
        >>> cfg.num_experts, cfg.num_experts_per_tok, cfg.shared_gate
        (512, 10, True)
    """
    return find_named("moe preset", name, MOE_PRESETS)


def model_preset(name: str) -> ModelConfig:
    """The decoder of a public model, by its published config.json. ValueError: an unknown name; it lists the names.

    Examples:
        >>> tilemoe.model_preset("qwen3-30b-a3b").num_layers
        48
    """
    return find_named("model preset", name, MODEL_PRESETS)


def preset_named(argument: str, name: str) -> str:
    """The layer preset called ``name``, or the only one that begins with it; case, - and _ make no difference.

    ValueError: there is none, or several begin with it. ``argument``: what the message calls ``name``.
    """
    beginning = spelled(name)
    found = [known for known in MOE_PRESETS if known == beginning]
    found = found or [known for known in MOE_PRESETS if beginning and known.startswith(beginning)]
    if len(found) != 1:
        names = ", ".join(sorted(found or MOE_PRESETS))
        raise ValueError(f"{argument} must be one of {names}, or the beginning of just one; got {shown(name)}")
    return found[0]


def _layer(model: str, d: int, n: int, experts: int, top_k: int, **settings: Any) -> MoEConfig:
    return MoEConfig(d, n, experts, top_k, router=RouterConfig.preset(model), **settings)


_GPT_OSS: Mapping[str, Any] = MappingProxyType(
    {
        "activation": "swiglu_oai",
        "activation_limit": 7.0,
        "activation_alpha": 1.702,
        "gate_up": "interleaved",
        "expert_bias": True,
    }
)

# Widths of the model and of an expert, experts, experts per token.
MOE_PRESETS: Mapping[str, MoEConfig] = MappingProxyType(
    {
        "mixtral-8x7b": _layer("mixtral-8x7b", 4096, 14336, 8, 2),
        "olmoe-1b-7b": _layer("olmoe-1b-7b", 2048, 1024, 64, 8),
        "qwen3-30b-a3b": _layer("qwen3-30b-a3b", 2048, 768, 128, 8),
        "qwen3-235b-a22b": _layer("qwen3-235b-a22b", 4096, 1536, 128, 8),
        "qwen3-next-80b-a3b": _layer(
            "qwen3-next-80b-a3b", 2048, 512, 512, 10, shared_intermediate_size=512, shared_gate=True
        ),
        "deepseek-v3": _layer("deepseek-v3", 7168, 2048, 256, 8, shared_intermediate_size=2048),
        "kimi-k2": _layer("kimi-k2", 7168, 2048, 384, 8, shared_intermediate_size=2048),
        "glm-4.5": _layer("glm-4.5", 5120, 1536, 160, 8, shared_intermediate_size=1536),
        "glm-4.5-air": _layer("glm-4.5-air", 4096, 1408, 128, 8, shared_intermediate_size=1408),
        "gpt-oss-20b": _layer("gpt-oss-20b", 2880, 2880, 32, 4, **_GPT_OSS),
        "gpt-oss-120b": _layer("gpt-oss-120b", 2880, 2880, 128, 4, **_GPT_OSS),
        "granite-3-1b-a400m": _layer("granite-3-1b-a400m", 1024, 512, 32, 8),
        "granite-3-3b-a800m": _layer("granite-3-3b-a800m", 1536, 512, 40, 8),
    }
)


def _decoder(
    name: str, vocab_size: int, layers: int, heads: int, kv_heads: int, max_seq_len: int, **settings: Any
) -> ModelConfig:
    """The decoder with the layer of that name, with heads of width 128."""
    layer = MOE_PRESETS[name]
    return ModelConfig(vocab_size, layer.hidden_size, layers, heads, kv_heads, 128, max_seq_len, layer, **settings)


# Vocabulary, layers, heads, heads of keys and values, longest sequence.
MODEL_PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "mixtral-8x7b": _decoder(
            "mixtral-8x7b", 32_000, 32, 32, 8, 32_768, rope_theta=1_000_000.0, norm_eps=1e-5, qk_norm="none"
        ),
        "olmoe-1b-7b": _decoder("olmoe-1b-7b", 50_304, 16, 16, 16, 4096, norm_eps=1e-5, qk_norm="full"),
        "qwen3-30b-a3b": _decoder("qwen3-30b-a3b", 151_936, 48, 32, 4, 40_960, rope_theta=1_000_000.0),
        "qwen3-235b-a22b": _decoder("qwen3-235b-a22b", 151_936, 94, 64, 4, 40_960, rope_theta=1_000_000.0),
    }
)
