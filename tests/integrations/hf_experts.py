"""Single experts modules of transformers, for the tests of the integration."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

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
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return module


def routing(num_experts: int = E) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator)
    ids = torch.rand(T, num_experts, generator=generator).topk(K).indices
    return x, ids, torch.rand(T, K, generator=generator)


def run(module: Any, implementation: str, x: Tensor, ids: Tensor, scores: Tensor) -> list[Tensor]:
    """The output and the gradients of x, the scores and every parameter."""
    module.config._experts_implementation = implementation
    inputs = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
    out = module(inputs[0], ids, inputs[1])
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [*inputs, *module.parameters()])]
