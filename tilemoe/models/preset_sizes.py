"""Sizes of the whole models of `presets`. Only the planner imports them, so that naming a layer does not build them.

Sources: each model's published config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tilemoe.models.families import sizes_from_hf
from tilemoe.models.presets import MODEL_PRESETS, MOE_PRESETS
from tilemoe.models.sizes import ModelSizes, sizes_of


def _sizes(
    name: str, family: str, vocab_size: int, layers: int, heads: int, kv_heads: int, max_seq_len: int, **settings: Any
) -> ModelSizes:
    """Sizes of the model with the layer of that name; ``settings``: more of its config.json, special to its family."""
    layer = MOE_PRESETS[name]
    sizes = sizes_from_hf(
        {
            "model_type": family,
            "vocab_size": vocab_size,
            "hidden_size": layer.hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": max_seq_len,
            "moe_intermediate_size": layer.intermediate_size,
            "num_local_experts": layer.num_experts,
            "num_experts_per_tok": layer.num_experts_per_tok,
            **settings,
        }
    )
    return replace(sizes, moe=layer)


_LATENT = MappingProxyType(
    {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
_GLM = MappingProxyType({"head_dim": 128, "attention_bias": True})
_OSS = MappingProxyType({"head_dim": 64, "sliding_window": 128})
SIZES_PRESETS: Mapping[str, ModelSizes] = MappingProxyType(
    {
        **{name: sizes_of(model) for name, model in MODEL_PRESETS.items()},
        "qwen3-next-80b-a3b": _sizes("qwen3-next-80b-a3b", "qwen3_next", 151_936, 48, 16, 2, 262_144, head_dim=256),
        "deepseek-v3": _sizes(
            "deepseek-v3", "deepseek_v3", 129_280, 61, 128, 128, 163_840,
            first_k_dense_replace=3, intermediate_size=18_432, **_LATENT,
        ),
        "kimi-k2": _sizes(
            "kimi-k2", "kimi_k2", 163_840, 61, 64, 64, 131_072,
            first_k_dense_replace=1, intermediate_size=18_432, **_LATENT,
        ),
        "glm-4.5": _sizes(
            "glm-4.5", "glm4_moe", 151_552, 92, 96, 8, 131_072,
            first_k_dense_replace=3, intermediate_size=12_288, use_qk_norm=True, **_GLM,
        ),
        "glm-4.5-air": _sizes(
            "glm-4.5-air", "glm4_moe", 151_552, 46, 96, 8, 131_072,
            first_k_dense_replace=1, intermediate_size=10_944, **_GLM,
        ),
        "gpt-oss-20b": _sizes("gpt-oss-20b", "gpt_oss", 201_088, 24, 64, 8, 131_072, **_OSS),
        "gpt-oss-120b": _sizes("gpt-oss-120b", "gpt_oss", 201_088, 36, 64, 8, 131_072, **_OSS),
        "granite-3-1b-a400m": _sizes(
            "granite-3-1b-a400m", "granitemoe", 49_155, 24, 16, 8, 4096, tie_word_embeddings=True
        ),
        "granite-3-3b-a800m": _sizes(
            "granite-3-3b-a800m", "granitemoe", 49_155, 32, 24, 8, 4096, tie_word_embeddings=True
        ),
    }
)  # fmt: skip
