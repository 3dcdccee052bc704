"""Inputs of `golden`'s cases: numbers that follow from a case's name alone, to the bit, on any machine.

T tokens · E experts · K experts per token · P pairs

Drawn on the CPU from uniform distributions and shaped by single sums and products, which IEEE arithmetic rounds in one
way only: a normal distribution's logarithms differ from one processor to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import tilemoe

# Of larger tensors this many numbers are drawn and repeated: a prime, so that no row equals another.
_PERIOD = 4_194_301
_TILE = 16  # rows whose edges the ragged routing straddles in the interpreter; a GPU's tiles are larger


@dataclass(frozen=True)
class Source:
    """Draws for one case; each tensor has a generator of its own, so their order does not matter."""

    case: str
    device: torch.device

    def uniform(self, name: str, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        """fp32 in [low, high)."""
        count = torch.Size(shape).numel()
        drawn = torch.rand(min(count, _PERIOD), generator=self.generator(name)).to(self.device)
        if count > _PERIOD:
            drawn = drawn.repeat(-(-count // _PERIOD))[:count]
        return drawn.mul_(high - low).add_(low).view(shape)

    def integers(self, name: str, *shape: int, high: int) -> Tensor:
        """int64 in [0, high), high below 2^24."""
        return self.uniform(name, *shape, low=0.0, high=float(high)).long().clamp_(max=high - 1)

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(f"{self.case}: {name}".encode()).digest()[:7], "big")
        return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Routed:
    """A plan and the shape of the scores that go with it."""

    plan: tilemoe.RoutingPlan
    scores: tuple[int, ...]


def distinct_ids(source: Source, tokens: int, experts: int, k: int) -> Tensor:
    """(T, K) int64, K different experts for each token."""
    return source.uniform("ids", tokens, experts).argsort(dim=1, stable=True)[:, :k].contiguous()


def make_routing(source: Source, name: str, tokens: int, experts: int, k: int) -> Routed:
    """One of `ROUTINGS`."""
    if name.startswith("pairs"):
        return _pairs(source, name, tokens, experts, tokens * k)
    ids = _ids(source, name, tokens, experts, k)
    return Routed(tilemoe.plan_topk(ids, experts), tuple(ids.shape))


ROUTINGS = (
    "random",
    "int32 ids",
    "balanced",
    "first and last expert empty",
    "all on the first",
    "all on the last",
    "ragged tiles",
    "sentinels",
    "all sentinels",
)
PAIRS = ("pairs", "pairs, sentinels", "pairs, repeated", "pairs, few tokens", "pairs, none")


def _ids(source: Source, name: str, tokens: int, experts: int, k: int) -> Tensor:
    random = distinct_ids(source, tokens, experts, k)
    if name == "random":
        return random
    if name == "int32 ids":
        return random.int()
    if name == "balanced":
        return (torch.arange(tokens * k, device=source.device) % experts).view(tokens, k)
    if name == "first and last expert empty":
        return 1 + distinct_ids(source, tokens, experts - 2, k)
    if name.startswith("all on"):
        return torch.full((tokens, 1), 0 if name.endswith("first") else experts - 1, device=source.device)
    if name == "ragged tiles":
        return _ragged_ids(source.device)
    if name == "all sentinels":
        return torch.full_like(random, experts)
    assert name == "sentinels", name
    random[0] = experts
    random[tokens // 2, 1:] = experts + 3
    random[-1, 0] = 2**31 - 1
    return random


def _ragged_ids(device: torch.device) -> Tensor:
    """(2 tiles + 1, 1) of four experts."""
    counts = torch.tensor([_TILE - 1, 1, 0, _TILE + 1], device=device)
    return torch.arange(4, device=device).repeat_interleave(counts)[:, None]


def _pairs(source: Source, name: str, tokens: int, experts: int, pairs: int) -> Routed:
    if name == "pairs, none":
        pairs = 0
    kinds = 2 if name == "pairs, few tokens" else tokens
    token = source.integers("token", pairs, high=kinds)
    expert = source.integers("expert", pairs, high=experts + 1 if name == "pairs, sentinels" else experts)
    if name == "pairs, repeated":
        token, expert = token.repeat(2), expert.repeat(2)
    return Routed(tilemoe.plan_pairs(token, expert, tokens, experts), (len(token),))


def fill(source: Source, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Overwrite parameters or buffers, in place: matrices by their fan-in, vectors within 0.3, of norms about 1."""
    with torch.no_grad():
        for name, tensor in tensors:
            scale = 1.7 * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else 0.3
            centre = 1.0 if "norm" in name else 0.0
            tensor.copy_(source.uniform(name, *tensor.shape, low=centre - scale, high=centre + scale))
