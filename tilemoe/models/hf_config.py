"""The configuration of Hugging Face's Qwen3MoeForCausalLM from a `ModelConfig`, and back. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tilemoe.config import ModelConfig, MoEConfig, RouterConfig

_ARCHITECTURE = "Qwen3MoeForCausalLM"

Number = TypeVar("Number", int, float)


def hf_config_dict(config: ModelConfig) -> dict[str, Any]:
    """The contents of Qwen3-MoE's config.json for ``config``.

    Raises:
        ValueError: Qwen3-MoE has no place for a setting that changes what the model computes; the message names it.
    """
    moe = config.moe or _placeholder_moe(config)
    _require_expressible(moe)
    dense = [layer for layer in range(config.num_layers) if not config.is_moe_layer(layer)]
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "qwen3_moe",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_intermediate_size or moe.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        # Both spellings: releases before 5 read the first alone, those since write the second.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "moe_intermediate_size": moe.intermediate_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        # A softmax over the kept logits is the softmax over all, divided by the kept ones' sum.
        "norm_topk_prob": moe.router.normalize or moe.router.softmax_after_topk,
        "router_aux_loss_coef": moe.router.aux_loss_coef,
        "output_router_logits": False,
    }


def config_from_hf(data: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Qwen3-MoE config.json, read into a dict.

    Raises:
        ValueError: another architecture, a missing setting, or one that `DecoderLM` does not implement.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"config.json must hold a table of settings, got {type(data).__name__}")
    if data.get("model_type") != "qwen3_moe":
        raise ValueError(f"config.json: model_type must be 'qwen3_moe', got {data.get('model_type')!r}")
    rope = _rope(data)
    implemented = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
    for name, value in implemented.items():
        if data.get(name, value) != value:
            raise ValueError(f"config.json: {name} must be {value!r}, got {data[name]!r}; no other is implemented")
    layers = _number(data, "num_hidden_layers", int)
    step = _number(data, "decoder_sparse_step", int, 1)
    listed = set(data.get("mlp_only_layers") or ())
    dense = tuple(layer for layer in range(layers) if layer in listed or step == 0 or (layer + 1) % step)
    heads, width = _number(data, "num_attention_heads", int), _number(data, "hidden_size", int)
    std = _number(data, "initializer_range", float, 0.02)
    return ModelConfig(
        vocab_size=_number(data, "vocab_size", int),
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_number(data, "num_key_value_heads", int, heads),
        head_dim=_number(data, "head_dim", int, width // max(heads, 1)),
        max_seq_len=_number(data, "max_position_embeddings", int),
        moe=None if len(dense) == layers else _moe_from_hf(data, width, std),
        dense_intermediate_size=_number(data, "intermediate_size", int) if dense else 0,
        dense_layers=() if len(dense) == layers else dense,
        rope_theta=_number(rope, "rope_theta", float, 10_000.0),
        norm_eps=_number(data, "rms_norm_eps", float, 1e-6),
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        initializer_range=std,
    )


def _moe_from_hf(data: Mapping[str, Any], width: int, std: float) -> MoEConfig:
    # Saved by some releases under the second name, which is an alias of the first.
    experts = "num_local_experts" if "num_local_experts" in data else "num_experts"
    return MoEConfig(
        hidden_size=width,
        intermediate_size=_number(data, "moe_intermediate_size", int),
        num_experts=_number(data, experts, int),
        num_experts_per_tok=_number(data, "num_experts_per_tok", int),
        router=RouterConfig(
            normalize=bool(data.get("norm_topk_prob", False)),
            aux_loss_coef=_number(data, "router_aux_loss_coef", float, 0.001),
        ),
        initializer_range=std,
    )


def _rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in either spelling, as one table."""
    rope = {"rope_theta": data["rope_theta"]} if "rope_theta" in data else {}
    for name in ("rope_scaling", "rope_parameters"):
        more = data.get(name) or {}
        if not isinstance(more, Mapping):
            raise ValueError(f"config.json: {name} must be a table of settings or null, got {more!r}")
        rope |= more
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rope_type must be 'default', got {kind!r}; no other is implemented")
    return rope


def _number(data: Mapping[str, Any], name: str, kind: Callable[[Any], Number], default: Number | None = None) -> Number:
    """The setting ``name``; ``default`` where it is absent or null, which is how transformers writes an unset one."""
    value = default if data.get(name) is None else data[name]
    if value is None:
        raise ValueError(f"config.json: {name} is missing")
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"config.json: {name} must be a number, got {value!r}") from error


def _placeholder_moe(config: ModelConfig) -> MoEConfig:
    """What a dense model's config.json says of experts; no layer has any."""
    return MoEConfig(config.hidden_size, config.dense_intermediate_size, num_experts=1, num_experts_per_tok=1)


def _require_expressible(moe: MoEConfig) -> None:
    router = moe.router
    required = (
        ("moe.activation", moe.activation, "swiglu"),
        ("moe.expert_bias", moe.expert_bias, False),
        ("moe.shared_intermediate_size", moe.shared_intermediate_size, 0),
        ("moe.router.score", router.score, "softmax"),
        ("moe.router.scale", router.scale, 1.0),
        ("moe.router.selection_bias", router.selection_bias, False),
        ("moe.router.bias", router.bias, False),
        ("moe.router.num_groups", router.num_groups, 1),
    )
    for name, value, wanted in required:
        if value != wanted:
            raise ValueError(f"{name}={value!r} has no place in {_ARCHITECTURE}; only {wanted!r} can be exported")
