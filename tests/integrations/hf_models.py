"""Small models of transformers' own classes and single experts of theirs, randomly initialised."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from helpers import redraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
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
if hasattr(transformers, "DeepseekV4Config"):
    FAMILIES["deepseek_v4"] = Family(
        "DeepseekV4",
        {
            "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8,
            "sliding_window": 8, "layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["moe"] * 2,
        },
    )  # fmt: skip


def tokens(batch: int = 2, length: int = SEQ) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The loss, the logits and the gradients of `tokens`."""
    model.zero_grad()
    out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return out.loss.detach(), out.logits.detach(), gradients


E, K, T, D = 4, 2, 10, 16
SETTINGS: dict[str, Any] = {
    "model_type": "made_up", "hidden_size": D, "moe_hidden_size": D, "intermediate_size": 8,
    "moe_intermediate_size": 8, "moe_latent_size": None, "num_experts": E, "num_local_experts": E,
    "n_routed_experts": E, "moe_num_experts": E, "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2", "swiglu_limit": 1.0, "swiglu_alpha": 1.702, "post_norm_eps": 1e-6,
    "_experts_implementation": "tilemoe",
}  # fmt: skip


def experts(kind: Callable[[Any], nn.Module], **settings: Any) -> Any:
    """One module of this class with random weights, of a configuration that has all the names they look for."""
    module = kind(SimpleNamespace(**(SETTINGS | settings)))
    redraw(module.parameters(), 0.5, seed=0)
    return module


def routing() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator)
    ids = torch.rand(T, E, generator=generator).topk(K).indices
    return x, ids, torch.rand(T, K, generator=generator)


def run(module: Any, implementation: str, x: Tensor, ids: Tensor, scores: Tensor) -> list[Tensor]:
    """The output and the gradients of x, the scores and every parameter."""
    module.config._experts_implementation = implementation
    inputs = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
    out = module(inputs[0], ids, inputs[1])
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [*inputs, *module.parameters()])]


def word_tokenizer() -> Tokenizer:
    """Of the letters a to h."""
    words = {"<unk>": 0, **{word: id_ for id_, word in enumerate("abcdefgh", start=3)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer
