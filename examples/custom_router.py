"""Your own router in tilemoe's layer: expert choice (arXiv 2202.09368), where each expert picks its tokens.

    python examples/custom_router.py

`tilemoe.MoE(cfg, router=...)` takes any module that returns either logits, which are routed as the configuration says,
or, as here, a whole `tilemoe.Routing`: any (token, expert) pairs with their scores. The gradient reaches the router
through the scores.

T tokens · d hidden size · E experts
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tilemoe


class ExpertChoice(nn.Module):
    """x (T, d) -> a Routing in which each of E experts takes its ``capacity * T / E`` tokens of highest score."""

    def __init__(self, hidden_size: int, experts: int, capacity: float = 2.0) -> None:
        super().__init__()
        self.capacity = capacity
        self.linear = nn.Linear(hidden_size, experts, bias=False)

    def forward(self, x: Tensor) -> tilemoe.Routing:
        tokens, experts = x.shape[0], self.linear.out_features
        each = min(tokens, max(1, int(self.capacity * tokens / experts)))
        # (E, each): every expert has equally many tokens
        scores, token = self.linear(x).softmax(-1).t().topk(each)
        expert = torch.arange(experts, device=x.device)[:, None].expand_as(token)
        plan = tilemoe.plan_pairs(token.flatten(), expert.flatten(), num_tokens=tokens, num_experts=experts)
        no_loss = scores.new_zeros(())
        return tilemoe.Routing(plan, scores.flatten(), plan.rows_per_expert, no_loss)


def make_layer(hidden_size: int, intermediate_size: int, experts: int) -> tilemoe.MoE:
    cfg = tilemoe.MoEConfig(hidden_size, intermediate_size, experts, num_experts_per_tok=2, initializer_range=0.2)
    return tilemoe.MoE(cfg, router=ExpertChoice(hidden_size, experts))


def main(arguments: list[str] | None = None) -> list[float]:
    """Fit a random function whose form depends on the sign of one input; returns the loss of each step."""
    parser = argparse.ArgumentParser(description="Train a layer with expert-choice routing.")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    layer = make_layer(16, 32, experts=4)
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
