"""Public models of few layers, as transformers' configurations: widths are the models' own, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    """``model_type`` and ``config`` are transformers'; a batch is (batch, sequence) tokens.

    ``bar``: how many times as fast as grouped_mm a step has to be; None: no promise.
    """

    model_type: str
    config: Mapping[str, Any]
    batch: int = 4
    sequence: int = 4096
    attention: str = "sdpa"
    bar: float | None = None

    def with_config(self, **changes: Any) -> Model:
        return replace(self, config={**self.config, **changes})


_QWEN3 = {
    "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
}  # fmt: skip
_OLMOE = {
    "num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
    "num_experts_per_tok": 8, "norm_topk_prob": False, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 50304,
}  # fmt: skip
_MIXTRAL = {
    "num_hidden_layers": 2, "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "sliding_window": None,
}  # fmt: skip
_GPT_OSS = {
    "num_hidden_layers": 4, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
    "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "sliding_window": 128,
}  # fmt: skip
_GLM = {  # behind its dense first layer all are alike
    "num_hidden_layers": 2, "first_k_dense_replace": 0, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
_GRANITE = {
    "num_hidden_layers": 8, "hidden_size": 1536, "intermediate_size": 512, "num_local_experts": 40,
    "num_experts_per_tok": 8, "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 49155,
    "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625, "tie_word_embeddings": True,
}  # fmt: skip
_DEEPSEEK = {  # its vocabulary, 129280, is cut: one layer of 61 would vanish behind the head
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 8192,
}  # fmt: skip

MODELS = MappingProxyType(
    {
        "Qwen3-30B-A3B": Model("qwen3_moe", _QWEN3, bar=1.30),
        "OLMoE-1B-7B": Model("olmoe", _OLMOE, bar=1.50),
        "Mixtral-8x7B": Model("mixtral", _MIXTRAL, bar=1.12),
        # Its attention has sinks, which PyTorch's own has not: "eager" stores every score.
        "gpt-oss-20b": Model("gpt_oss", _GPT_OSS, batch=8, sequence=1024, attention="eager", bar=1.35),
        "GLM-4.5-Air": Model("glm4_moe", _GLM),
        "Granite-3b-a800m": Model("granitemoe", _GRANITE),
        "DeepSeek-V3": Model("deepseek_v3", _DEEPSEEK, batch=2),
    }
)
_TINY = MappingProxyType(
    {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48,
        "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
        "sliding_window": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
)  # fmt: skip


def tiny(model: Model) -> Model:
    """The same architecture, small enough for any machine."""
    config = {key: _TINY.get(key, value) for key, value in model.config.items()}
    if model.model_type == "deepseek_v3":  # a head of its own for every query
        config["num_key_value_heads"] = config["num_attention_heads"]
    return replace(model, config=config, batch=2, sequence=32)


def build(model: Model, device: torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The model with random weights, in training mode, made on ``device``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model.model_type, use_cache=False, pad_token_id=None, **model.config)
    torch.manual_seed(seed)
    with device:
        built = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=model.attention)
    return built.to(device).train()
