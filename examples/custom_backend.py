"""Your own backend: one of the experts' kernels in plain PyTorch, the others inherited from the torch backend.

    python examples/custom_backend.py

A registered name is accepted wherever tilemoe takes ``kernels``. The operators around the kernels stay the same, so the
layer trains and compiles with it and saves the same tensors for backward. `tilemoe.Backend` has the equation of each
kernel.

T tokens · d hidden size · n expert width · E experts · R_max rows of a buffer
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import Tensor

import tilemoe
from tilemoe.kernels.experts.torch.backend import TorchBackend


class LoopBackend(TorchBackend):
    """The down projection as a loop over the experts, in fp64 whatever the layer's dtype."""

    name = "loop"

    def down_proj(self, a: Tensor, w2: Tensor, b2: Tensor | None, plan: tilemoe.RoutingPlan) -> Tensor:
        """``y = a w2^T + b2``: (R_max, c) of a (R_max, n), w2 (E, c, n), b2 (E, c); c is d or a part of it."""
        y = a.new_zeros(a.shape[0], w2.shape[1])
        # The rows of expert e begin at row_start_of_expert[e]. On a GPU tolist() waits for the device.
        for expert, (start, end) in enumerate(pairwise(plan.row_start_of_expert.tolist())):
            rows = a[start:end].double() @ w2[expert].double().t()
            y[start:end] = rows if b2 is None else rows + b2[expert]
        return y


tilemoe.register_backend("loop", LoopBackend)


def main(arguments: list[str] | None = None) -> list[float]:
    """Fit a random function of tokens; returns the loss of each step."""
    parser = argparse.ArgumentParser(description="Train a layer whose down projection is a kernel of one's own.")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    cfg = tilemoe.MoEConfig(16, 32, num_experts=4, num_experts_per_tok=2, initializer_range=0.2)
    layer = tilemoe.MoE(cfg, kernels="loop")
    maps = torch.randn(2, 16, 16) / 4
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for step in range(options.steps):
        x = torch.randn(256, 16)
        target = torch.einsum("tij,tj->ti", maps[(x[:, 0] > 0).long()], x)
        loss = (layer(x).hidden - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
