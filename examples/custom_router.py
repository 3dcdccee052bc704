"""A router of one's own over tilemoe's experts: expert choice (arXiv 2202.09368), where each expert picks its tokens.

    python examples/custom_router.py

`tilemoe.plan_pairs` takes any (token, expert) pairs, and `tilemoe.moe` computes them; whatever makes the pairs and
their scores is ordinary PyTorch. The gradient reaches the router through the scores.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import tilemoe


class ExpertChoiceMoE(nn.Module):
    """(T, d) -> (T, d): each of the experts takes the ``capacity * T / experts`` tokens that it scores highest."""

    def __init__(self, hidden_size: int, intermediate_size: int, experts: int, capacity: float = 2.0) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(hidden_size, experts, bias=False)
        self.w1 = nn.Parameter(torch.randn(experts, 2 * intermediate_size, hidden_size) * hidden_size**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden_size, intermediate_size) * intermediate_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens, experts = x.shape[0], self.w1.shape[0]
        each = min(tokens, max(1, int(self.capacity * tokens / experts)))
        scores, token = (
            self.router(x).softmax(-1).t().topk(each)
        )  # (experts, each): every expert is full, none too full
        expert = torch.arange(experts, device=x.device)[:, None].expand_as(token)
        plan = tilemoe.plan_pairs(token.flatten(), expert.flatten(), num_tokens=tokens, num_experts=experts)
        return tilemoe.moe(x, self.w1, self.w2, plan, scores.flatten())


def main(arguments: list[str] | None = None) -> list[float]:
    """Fit a random function whose form depends on the sign of one input; returns the loss of each step."""
    parser = argparse.ArgumentParser(description="Train a layer with expert-choice routing.")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = ExpertChoiceMoE(16, 32, experts=4)
    maps = torch.randn(2, 16, 16) / 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(options.steps):
        x = torch.randn(256, 16)
        target = torch.einsum("tij,tj->ti", maps[(x[:, 0] > 0).long()], x)
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
