"""Small models of transformers' own classes, randomly initialised, for the tests of the integration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

VOCAB, SEQ = 61, 9
LIMIT = 1.5  # of gpt-oss's gate, low enough for random weights to meet it
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """The prefix of a model's classes, what its configuration has beside COMMON, and how many of its layers are MoE.

    ``config``: the class of its configuration, after the prefix.
    """

    prefix: str
    sizes: dict[str, Any]
    moe_layers: int = 2
    common: dict[str, Any] = field(default_factory=lambda: COMMON)
    config: str = "Config"

    def make(self, **more: Any) -> PreTrainedModel:
        """fp32 on the CPU, the same weights at every call; ``more`` goes to its configuration."""
        torch.manual_seed(0)
        config = getattr(transformers, self.prefix + self.config)(**(self.common | self.sizes | more))
        model: PreTrainedModel = getattr(transformers, f"{self.prefix}ForCausalLM")(config)
        with torch.no_grad():  # biases start at zero and norms at one, which would hide them
            for parameter in model.parameters():
                if parameter.ndim == 1 or not parameter.any():
                    parameter.add_(0.2 * torch.randn(parameter.shape))
        for module in model.modules():
            if hasattr(module, "limit"):
                module.limit = LIMIT
        return model.eval()


QWEN: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}
FAMILIES = {
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": Family("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "qwen3_moe": Family("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "qwen3_next": Family(
        "Qwen3Next",
        {
            **QWEN, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        {
            **DEEPSEEK, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
        moe_layers=1,
    ),
    "glm4_moe": Family("Glm4Moe", {**DEEPSEEK, "head_dim": 8, "n_group": 1, "topk_group": 1}, moe_layers=1),
    "gpt_oss": Family("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "gemma4": Family(
        "Gemma4",
        {
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
            "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        config="TextConfig",
    ),
}  # fmt: skip
GRANITE = Family("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2})
# Its experts could not be chosen yet in the oldest release that is served.
GRANITE_CAN_CHOOSE = tuple(int(part) for part in transformers.__version__.split(".")[:2]) > (5, 7)
if GRANITE_CAN_CHOOSE:
    FAMILIES["granite_moe"] = GRANITE


def tokens(batch: int = 2, length: int = SEQ) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def logits_and_gradients(
    model: nn.Module, implementation: str, chooses: PreTrainedModel | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Of `tokens`; ``chooses``: the model of transformers, where ``model`` wraps it."""
    (chooses or model).set_experts_implementation(implementation)
    model.zero_grad()
    out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_both(model: PreTrainedModel, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """What ``compute`` gives with the eager experts and with tilemoe's."""
    found = []
    for implementation in ("eager", "tilemoe"):
        model.set_experts_implementation(implementation)
        found.append(compute())
    return found[0], found[1]
