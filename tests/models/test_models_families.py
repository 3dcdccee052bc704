"""Sizes of whole models against transformers' classes, against published counts, and against figures by hand."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tilemoe.models.families import FAMILIES, sizes_from_hf
from tilemoe.models.flops import count_active_parameters, count_parameters, flops_per_token
from tilemoe.models.hf_config import config_from_hf
from tilemoe.models.preset_sizes import SIZES_PRESETS
from tilemoe.models.presets import MOE_PRESETS
from tilemoe.models.sizes import attention_mixer, sizes_of

BASE = MappingProxyType(
    {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
     "max_position_embeddings": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 8,
     "num_local_experts": 8, "n_routed_experts": 8, "intermediate_size": 40, "head_dim": 16}
)  # fmt: skip
LATENT = MappingProxyType(
    {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
     "num_key_value_heads": 4, "head_dim": 4}
)  # fmt: skip
DELTA = MappingProxyType(
    {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
)
# Of each family what changes its parameters: (family, settings). Kimi K2 is DeepSeek-V3's class.
VARIANTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("qwen2_moe", {"shared_expert_intermediate_size": 20}),
    ("qwen2_moe", {"shared_expert_intermediate_size": 20, "qkv_bias": False, "decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_next", {"shared_expert_intermediate_size": 20, **DELTA}),
    ("qwen3_next", {"shared_expert_intermediate_size": 20, **DELTA, "attention_bias": True,
                    "layer_types": ["full_attention", *["linear_attention"] * 4]}),
    ("mixtral", {}),
    ("mixtral", {"head_dim": 32, "sliding_window": 8}),
    ("olmoe", {}),
    ("deepseek_v2", {**LATENT, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "first_k_dense_replace": 0}),
    ("deepseek_v3", {**LATENT, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}),
    ("deepseek_v3", {**LATENT, "n_shared_experts": 1, "first_k_dense_replace": 3, "attention_bias": True}),
    ("glm4_moe", {"n_shared_experts": 1, "first_k_dense_replace": 1}),
    ("glm4_moe", {"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}),
    ("gpt_oss", {"sliding_window": 8}),
    ("granitemoe", {}),
    ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True}),
    ("granitemoeshared", {"shared_intermediate_size": 20}),
    ("glm4_moe_lite", {**LATENT, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    ("glm4_moe_lite", {**LATENT, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
                       "mlp_layer_types": ["sparse", *["dense"] * 3, "sparse"]}),
    ("phimoe", {}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True, "sliding_window": 8}),
    ("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "tie_word_embeddings": False}),
    ("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 0, "moe_layer_interval": 2,
                      "moe_layer_start_index": 0, "moe_layer_end_index": 3}),
    ("hunyuan_v1_moe", {"moe_topk": 2}),
    ("hunyuan_v1_moe", {"moe_topk": [2] * 5, "attention_bias": True, "tie_word_embeddings": True}),
    ("minimax_m2", {}),
    ("llama4_text", {"intermediate_size_mlp": 56, "num_experts_per_tok": 2}),
    ("llama4_text", {"intermediate_size_mlp": 56, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2}),
    ("llama4_text", {"intermediate_size_mlp": 56, "num_experts_per_tok": 2, "moe_layers": [0, 3, 3, 9],
                     "use_qk_norm": False}),
)  # fmt: skip


def settings_of(family: str, changed: Mapping[str, Any]) -> dict[str, Any]:
    base = dict(BASE)
    if family in ("granitemoe", "granitemoeshared", "olmoe"):
        del base["head_dim"]
    if family in ("granitemoe", "granitemoeshared", "mixtral", "olmoe", "gpt_oss", "phimoe", "hunyuan_v1_moe",
                  "minimax_m2", "llama4_text"):  # fmt: skip
        del base["moe_intermediate_size"]  # experts have intermediate_size
    return {**base, **changed}


def test_every_family_is_tried() -> None:
    assert {family for family, _ in VARIANTS} == set(FAMILIES) - {"kimi_k2"}
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]


@pytest.mark.parametrize(("family", "changed"), VARIANTS)
def test_parameters_are_those_of_transformers_class(family: str, changed: Mapping[str, Any]) -> None:
    """As it would write its config.json, and as it would build it."""
    config = AutoConfig.for_model(family, **settings_of(family, changed))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = sizes_from_hf(config.to_dict())
    assert count_parameters(sizes) == sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    routed = re.compile(r"(?<!shared_mlp)\.(experts\.|(input|output)_linear)")
    experts = sum(p.numel() for name, p in model.named_parameters() if routed.search(name))
    assert count_active_parameters(sizes) == count_parameters(sizes) - experts * 6 // 8, "2 of 8"


def test_a_config_that_both_read_counts_the_same() -> None:
    data = {"model_type": "qwen3_moe", **BASE, "mlp_only_layers": [1, 4]}
    ours, sizes = config_from_hf(data), sizes_from_hf(data)
    assert count_parameters(ours) == count_parameters(sizes)
    assert count_active_parameters(ours) == count_active_parameters(sizes)
    assert flops_per_token(ours, 33) == flops_per_token(sizes, 33)
    assert [mixer.kept for _, mixer in sizes_of(ours).mixers] == [mixer.kept for _, mixer in sizes.mixers]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # in billions, as their makers state them; without layers for multi-token prediction
        ("qwen3-30b-a3b", 30.53, 3.35),
        ("qwen3-235b-a22b", 235.09, 22.19),
        ("olmoe-1b-7b", 6.92, 1.28),
        ("mixtral-8x7b", 46.70, 12.88),
        ("qwen3-next-80b-a3b", 79.7, 3.9),
        ("deepseek-v3", 671.0, 37.6),
        ("kimi-k2", 1026.4, 32.9),
        ("glm-4.5", 352.8, 33.6),
        ("glm-4.5-air", 106.9, 13.4),
        ("gpt-oss-20b", 20.91, 4.19),  # 3.61 without the embedding
        ("gpt-oss-120b", 116.83, 5.71),  # 5.13
        ("granite-3-1b-a400m", 1.335, 0.43),
        ("granite-3-3b-a800m", 3.30, 0.88),
    ],
)
def test_presets_have_the_published_size(name: str, total: float, active: float) -> None:
    sizes = SIZES_PRESETS[name]
    assert count_parameters(sizes) / 1e9 == pytest.approx(total, rel=1e-3)
    assert count_active_parameters(sizes) / 1e9 == pytest.approx(active, rel=1e-2)
    assert sizes.moe == MOE_PRESETS[name]


def test_every_preset_is_a_whole_model() -> None:
    assert set(SIZES_PRESETS) == set(MOE_PRESETS)


def test_keys_of_a_window_by_hand() -> None:
    """Of six tokens with a window of 3: 1, 2, 3, 3, 3 and 3 keys."""
    assert attention_mixer(8, 2, 1, 4, window=3).keys(6) == pytest.approx(15 / 6)
    assert attention_mixer(8, 2, 1, 4, window=9).keys(6) == attention_mixer(8, 2, 1, 4).keys(6) == 3.5


def test_keys_of_chunks_by_hand() -> None:
    """Of eight tokens in chunks of 3: 1, 2, 3, 1, 2, 3, 1 and 2 keys."""
    chunked = replace(attention_mixer(8, 2, 1, 4), chunk=3)
    assert chunked.keys(8) == 15 / 8
    assert chunked.keys(3) == attention_mixer(8, 2, 1, 4).keys(3) == 2
    assert [mixer.chunk for _, mixer in sizes_from_hf({**BASE, "model_type": "llama4_text"}).mixers] == [8192, None]


def test_flops_by_hand() -> None:
    """One layer of each: latent attention of 4 heads with 12 + 12 products a key; four delta states of 8 x 12."""
    latent = sizes_from_hf(
        settings_of("deepseek_v3", {**LATENT, "model_type": "deepseek_v3"}) | {"num_hidden_layers": 1}
    )
    delta = sizes_from_hf(settings_of("qwen3_next", {**DELTA, "model_type": "qwen3_next"}) | {"num_hidden_layers": 1})
    for sizes, mixing in ((latent, 4 * (12 + 12) * (33 + 1) / 2), (delta, (2 * 16 + 48) * 4 + 3 * 4 * 8 * 12)):
        ((_, mixer),) = sizes.mixers
        assert sizes.moe is not None
        experts = 2 * 3 * 24 * 64 + 8 * 64
        assert flops_per_token(sizes, 33) == pytest.approx(6 * (mixer.matrices + experts + 99 * 64 + mixing))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "jetmoe"}, "model_type must be one of 'qwen2_moe', .* got 'jetmoe'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads must be >= 1"),
        ({"hidden_size": 10**40}, r"hidden_size must be >= 1 and below 2\*\*31"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 100000"),
        ({"use_sliding_window": True}, "use_sliding_window must be False"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
        ({"model_type": "qwen2_moe", "qkv_bias": "no"}, "qkv_bias must be true or false, got 'no'"),
        ({"model_type": "gpt_oss"}, "sliding_window is missing"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "layer_types must be a list of 5 of"),
        ({"model_type": "deepseek_v2", **LATENT, "first_k_dense_replace": 1, "moe_layer_freq": 2}, "moe_layer_freq"),
        ({"model_type": "deepseek_v3"}, "qk_rope_head_dim is missing"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(changed: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        sizes_from_hf({"model_type": "qwen3_moe", **BASE, **changed})


def test_sizes_of_a_model_in_parts_are_the_text_s() -> None:
    text = {"model_type": "qwen3_moe", **BASE}
    assert sizes_from_hf({"model_type": "seen", "text_config": text}) == sizes_from_hf(text)
    with pytest.raises(ValueError, match="must hold a table of settings, got list"):
        sizes_from_hf([])  # type: ignore[arg-type]
