"""Routings that break kernels: empty and overfull experts, no tokens, sentinels, repeated pairs, ragged tiles.

T tokens · E experts · K experts per token · P pairs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilemoe.checks import require_int
from tilemoe.ops.rounding import round_rows
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk


@dataclass(frozen=True, eq=False)
class HostileRouting:
    """A named plan; ``is_topk`` says whether its scores are (T, K) or (P,). `hostile_routings` makes them.

    ``str`` gives its name, for ``pytest.mark.parametrize(..., ids=str)``.

    Examples:
        >>> from tilemoe.testing import hostile_routings
        >>> {str(routing): routing.is_topk for routing in hostile_routings()}["pairs, repeated"]
        False
    """

    name: str
    plan: RoutingPlan

    @property
    def is_topk(self) -> bool:
        """Whether every token has the same number of pairs, as in a plan of `tilemoe.plan_topk`."""
        return self.plan.pair_start_of_token is None

    def __str__(self) -> str:
        return self.name


def hostile_routings(tile: int = 8, device: torch.device | str = "cpu", seed: int = 0) -> Iterator[HostileRouting]:
    """Every kind of routing that a backend must handle. Ragged ones give experts ``tile`` - 1 to ``tile`` + 1 rows.

    There are at most 5 experts and about ``3 * tile`` pairs.

    Raises:
        ValueError: ``tile`` is below 4: there would be too few tokens.

    Examples:
        >>> from tilemoe.testing import hostile_routings
        >>> [routing.name for routing in hostile_routings(tile=16)][:3]
        ['balanced', 'random', 'first and last expert empty']
    """
    require_int("tile", tile, 4)
    generator = torch.Generator().manual_seed(seed)
    for name, expert_ids, num_experts in _topk_cases(tile, generator):
        yield HostileRouting(name, plan_topk(expert_ids.to(device), num_experts))
    for name, token, expert, num_tokens, num_experts in _pairs_cases(tile, generator):
        plan = plan_pairs(token.to(device), expert.to(device), num_tokens, num_experts)
        yield HostileRouting(name, plan)
    for mode in ("up", "down"):
        yield HostileRouting(f"rounded {mode}", _rounded_plan(mode, tile, generator, device))


def used_pairs(plan: RoutingPlan) -> Tensor:
    """(P,) bool, in the caller's order: False for a pair that was skipped. A host sync.

    A plan is checked when it is made, so no ValueError is raised here.

    Examples:
        >>> from tilemoe.testing import used_pairs
        >>> used_pairs(tilemoe.plan_topk(torch.tensor([[0, 1], [9, 0]]), num_experts=3))
        tensor([ True,  True, False,  True])
    """
    used = torch.zeros(plan.num_pairs, dtype=torch.bool, device=plan.device)
    num_rows = int(plan.row_start_of_expert[-1])
    used[plan.pair_of_row[:num_rows].long()] = True
    return used


def _distinct(num_tokens: int, num_experts: int, k: int, generator: torch.Generator) -> Tensor:
    """(T, K) int64, K different experts for each token."""
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :k].contiguous()


def _rounded_plan(mode: str, tile: int, generator: torch.Generator, device: torch.device | str) -> RoutingPlan:
    """A rounded plan: tokens gained experts or lost some or all, rows number the pairs, and R is below the capacity."""
    tokens, experts = tile + 5, 3
    scores = torch.rand(tokens, experts, generator=generator).to(device)
    kept, ids = scores.max(dim=1, keepdim=True)
    capacity = tokens + experts * tile
    token_of_row, pair_of_row, row_of_pair, pair_start, row_start, _ = round_rows(
        scores, ids, kept, None, None, mode, tile, 1.0, capacity
    )
    return RoutingPlan(token_of_row, pair_of_row, row_of_pair, pair_start, row_start, experts, tokens)


def _topk_cases(tile: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor, int]]:
    tokens = tile + 3
    yield "balanced", (torch.arange(2 * tokens) % 4).view(tokens, 2), 4
    yield "random", _distinct(tokens, 5, 2, generator).int(), 5
    yield "first and last expert empty", 1 + _distinct(tokens, 3, 2, generator), 5
    yield "middle experts empty", _distinct(tokens, 2, 2, generator) * 4, 5
    yield "all tokens on the first expert", torch.zeros(tokens, 1, dtype=torch.int64), 4
    yield "all tokens on the last expert", torch.full((tokens, 1), 3), 4
    yield "no tokens", torch.zeros(0, 2, dtype=torch.int64), 3
    yield "one token", torch.tensor([[2, 0]]), 3
    yield "K = E", _distinct(tokens, 3, 3, generator), 3
    yield "one expert", torch.zeros(tokens, 1, dtype=torch.int32), 1
    counts = torch.tensor([tile - 1, 1, tile, 0, tile + 1])
    yield "ragged tiles", torch.arange(5).repeat_interleave(counts)[:, None], 5
    some = _distinct(tokens, 4, 3, generator)
    some[0] = 4  # rows past R refer to the first token, which has no expert
    some[tokens // 2, 1:] = 7
    some[-1, 0] = 2**31 - 1
    yield "sentinels", some, 4
    yield "all sentinels", torch.full((tokens, 2), 4), 4
    yield "one token on a sentinel", torch.tensor([[3]], dtype=torch.int32), 3


def _pairs_cases(tile: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Tensor, int, int]]:
    tokens, pairs = tile + 1, 3 * tile
    token = torch.randint(0, tokens, (pairs,), generator=generator)
    expert = torch.randint(0, 4, (pairs,), generator=generator)
    yield "pairs, unordered", token, expert, tokens, 4
    yield "pairs, many per token", torch.randint(0, 2, (pairs,), generator=generator).int(), expert.int(), 2, 4
    yield "pairs, repeated", torch.tensor([1, 1, 0, 1, 2, 1]), torch.tensor([2, 2, 0, 2, 1, 0]), 3, 3
    yield "pairs, tokens without any", torch.tensor([tokens - 2, 3, 3]), torch.tensor([1, 2, 0]), tokens, 3
    yield "pairs, sentinels", token, torch.where(torch.arange(pairs) % 3 == 0, 4, expert), tokens, 4
    yield "pairs, all sentinels", token, torch.full_like(token, 9), tokens, 4
    none = torch.zeros(0, dtype=torch.int64)
    yield "pairs, none", none, none, tokens, 3
    yield "pairs, none and no tokens", none.int(), none.int(), 0, 3
    yield "pairs, one expert", token, torch.zeros_like(token), tokens, 1
    yield "pairs, all on one expert", token, torch.full_like(token, 2), tokens, 4
    yield "pairs, one", torch.tensor([0]), torch.tensor([1]), 1, 2
