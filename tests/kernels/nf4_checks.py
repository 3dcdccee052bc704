"""Layers with adapters on experts in 4 bits against the torch backend in fp64, on the weights that each multiplies.

T tokens · d hidden_size
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.layers.lora import PackedLoRAExperts, add_lora
from tilemoe.layers.moe import MoE
from tilemoe.testing import relative_error

LIMIT = 2e-2  # of an RMS-relative error in bf16


def frozen_bytes(layer: MoE) -> int:
    """Of the storages that hold w1 and w2."""
    experts = layer.experts.named_parameters()
    return sum(each.untyped_storage().nbytes() for name, each in experts if name.startswith(("w1", "w2")))


def in_fp64(layer: MoE) -> MoE:
    """A dense copy that computes in fp64 with what the kernels multiply."""
    cfg, experts = layer.cfg, layer.experts
    assert isinstance(experts, PackedLoRAExperts)
    exact = MoE(cfg, device=experts.up_a.device, dtype=torch.float64, kernels="torch")
    add_lora(exact, experts.rank, experts.alpha)
    weights = dict(layer.state_dict())
    for name in ("w1", "w2"):
        weight = experts._frozen(name, lambda t: t)
        decoded = [weight.expert(index, experts.up_a.dtype) for index in range(cfg.num_experts)]
        weights[f"experts.{name}"] = torch.stack(decoded)
        for part in weight.tensors:
            del weights[f"experts.{name}_{part}"]
    exact.load_state_dict(weights)
    return exact


def gradients(layer: MoE, x: Tensor, expert_ids: Tensor | None, do: Tensor) -> dict[str, Tensor]:
    """The output and the gradients of x (T, d) and the adapters, of tokens that go where ``expert_ids`` says, or where
    the router says."""
    x = x.detach().requires_grad_()
    adapters = {name: each for name, each in layer.named_parameters() if each.requires_grad}
    hidden = layer(x, expert_ids=expert_ids).hidden
    found = torch.autograd.grad(hidden, [x, *adapters.values()], do)
    return {"o": hidden.detach(), **dict(zip(["dx", *adapters], found, strict=True))}


def errors_of(layer: MoE, tokens: int) -> dict[str, float]:
    """RMS-relative, against fp64, of inputs drawn anew."""
    like, d = layer.get_parameter("router.weight"), layer.cfg.hidden_size
    generator = torch.Generator(like.device)
    generator.seed()
    x, do = (torch.randn(tokens, d, device=like.device, generator=generator).to(like) for _ in range(2))
    scores = torch.rand(tokens, layer.cfg.num_experts, device=like.device, generator=generator)
    ids = scores.topk(layer.cfg.num_experts_per_tok, dim=1).indices
    found = gradients(layer, x, ids, do)
    exact = gradients(in_fp64(layer), x.double(), ids, do.double())
    return {name: relative_error(each, exact[name]) for name, each in found.items()}
