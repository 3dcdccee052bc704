"""Expert parallelism by all-to-all: each token is sent once to every process that holds some of its experts.

T tokens of this process · M tokens at its experts · W processes (ranks) that share a layer's experts
E experts · e = E / W experts of a process · P pairs, here of a token and an expert of one process · d model width
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tilemoe.dispatch.base import Dispatched, Sent
from tilemoe.dispatch.exchange import begin_tokens_to_experts, pairs_to_experts, sums_from_experts, tokens_to_experts
from tilemoe.kernels.base import compute_dtype
from tilemoe.routing.build import plan_topk
from tilemoe.routing.plan import RoutingPlan

_INT32_MAX = 2**31 - 1


class AllToAllDispatcher:
    """Experts ``[r e, (r + 1) e)`` live in the group's rank r; all its ranks call the layer together.

    A token crosses once to each rank that holds one of its experts, however many it holds, with one score and one
    index for each of these. There the experts' outputs are summed with their scores, and that sum alone comes back:
    no order of experts on ranks needs fewer bytes. The host reads the sizes once in the forward, which waits for the
    device; the backward uses them again. A process may have no tokens, and a process' experts may get none.

    The gradient of an expert is that of all W processes' tokens, summed.

    Memory, beside that of `tilemoe.moe` for M tokens: M d elements received, kept for backward as the layer's x, and
    for a moment the copies sent, at most ``min(W, experts of a token) T d``. Every token of every rank may choose
    experts of one, so M is at most the sum of T over the group, whatever the number of experts per token.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """ValueError: the group's ranks do not divide ``num_experts``."""
        ranks = dist.get_world_size(group)
        if num_experts % ranks:
            raise ValueError(
                f"num_experts ({num_experts}) must be divisible by the {ranks} processes that share the experts; "
                "choose an expert-parallel size that divides it"
            )
        self.group, self.num_experts, self.ranks = group, num_experts, ranks
        self.experts_per_rank = num_experts // ranks

    # Sizes that the host reads are no part of a graph, and an exchange would end one anyway.
    @torch.compiler.disable
    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        self._check_size(plan)
        kind = x.device.type
        if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # as the experts would: before it is sent
        row = plan.row_of_pair.clamp(min=0, max=max(0, plan.capacity - 1))
        expert, rank = self._experts_and_ranks(plan, row)
        copies, pairs = self._copies_plan(plan, row, rank), plan_topk(rank[:, None], self.ranks)
        # All that does not need the sizes comes before the host waits for them: then the device has no more to do.
        pair_of_score, place = self._pairs_to_send(plan, row, expert, rank, copies, pairs)
        s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype)))
        sizes = self._exchange_sizes(copies, pairs)
        sent = Sent(_trimmed(copies, sum(sizes.tokens_out)), *sizes[:4], group=self.group)
        num_pairs = sum(sizes.pairs_out)
        s, place = pairs_to_experts(s.index_select(0, pair_of_score[:num_pairs]), place[:num_pairs], sent)
        travelling = begin_tokens_to_experts(x, sent)
        here = self._local_plan(place, sizes)  # meanwhile
        return Dispatched(tokens_to_experts(x, sent, travelling), here, s, sent)

    @torch.compiler.disable
    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        assert dispatched.sent is not None, "the other half of what `dispatch` gave"
        return sums_from_experts(o, dispatched.sent)

    def local_weight(self, weight: Tensor) -> Tensor:
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def _check_size(self, plan: RoutingPlan) -> None:
        if plan.num_tokens * self.experts_per_rank > _INT32_MAX:
            raise ValueError(
                f"{plan.num_tokens} tokens times {self.experts_per_rank} experts of a process exceed the int32 that "
                "names a pair; split the batch"
            )

    def _experts_and_ranks(self, plan: RoutingPlan, row: Tensor) -> tuple[Tensor, Tensor]:
        """(expert, rank) of each pair (P,), in the plan's order; E and W for one that has no row."""
        rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
        expert_of_row = torch.searchsorted(plan.row_start_of_expert[1:].contiguous(), rows, right=True)
        has_none = plan.row_of_pair < 0
        if plan.pair_start_of_token is not None:  # past its end nothing is said
            has_none |= torch.arange(plan.num_pairs, device=plan.device) >= plan.pair_start_of_token[-1]
        expert = expert_of_row[row].masked_fill(has_none, self.num_experts)
        return expert, expert // self.experts_per_rank

    def _pairs_to_send(
        self, plan: RoutingPlan, row: Tensor, expert: Tensor, rank: Tensor, copies: RoutingPlan, pairs: RoutingPlan
    ) -> tuple[Tensor, Tensor]:
        """Of the pairs sorted by rank, then as the plan has them, by token: (where their scores are, their place as in
        `_local_plan`), (P,) each; past those that have a row the values mean nothing.
        """
        pair = pairs.token_of_row.clamp(min=0, max=max(0, plan.num_pairs - 1))
        row, rank = row[pair], rank[pair].clamp(max=self.ranks - 1)
        slot = copies.row_of_pair[plan.token_of_row[row] * self.ranks + rank] - copies.row_start_of_expert[rank]
        place = slot * self.experts_per_rank + expert[pair] % self.experts_per_rank
        return plan.pair_of_row[row], place.int()

    def _copies_plan(self, plan: RoutingPlan, row: Tensor, rank: Tensor) -> RoutingPlan:
        """Which ranks each token goes to: a plan whose experts are the ranks."""
        # A column more for the pairs that have no row. Values that are numbers of the host, as `x[index] = True` and
        # `torch.where` take them, would be copied to the device while the host waits; these fills are told them.
        stays = torch.ones(plan.num_tokens, self.ranks + 1, dtype=torch.bool, device=plan.device)
        stays.view(-1).index_fill_(0, plan.token_of_row[row].long() * (self.ranks + 1) + rank, False)
        ranks = torch.arange(self.ranks, device=plan.device).expand(plan.num_tokens, -1)
        return plan_topk(ranks.masked_fill(stays[:, : self.ranks], self.ranks), self.ranks)

    def _exchange_sizes(self, copies: RoutingPlan, pairs: RoutingPlan) -> _Sizes:
        out = torch.stack((copies.rows_per_expert, pairs.rows_per_expert), dim=1)
        into = torch.empty_like(out)
        dist.all_to_all_single(into, out, group=self.group)
        (tokens_out, pairs_out), (tokens_in, pairs_in) = (
            torch.stack((out, into)).transpose(1, 2).tolist()  # the one read from the device
        )
        return _Sizes(tokens_out, tokens_in, pairs_out, pairs_in, into)

    def _local_plan(self, place: Tensor, sizes: _Sizes) -> RoutingPlan:
        """Of the pairs received, which come sorted by source and there by token; place (P,): ``slot * e + expert``,
        slot being a token's place among its source's. What `plan_pairs` would give, without its sort by token.
        """
        num_tokens, experts = sum(sizes.tokens_in), self.experts_per_rank
        tokens_in, pairs_in = sizes.received.unbind(1)
        first_token = tokens_in.cumsum(0) - tokens_in
        token = torch.repeat_interleave(first_token, pairs_in, output_size=place.shape[0]) + place // experts
        by_expert = plan_topk(place[:, None] % experts, experts)
        tokens = torch.arange(num_tokens + 1, device=place.device)
        return replace(
            by_expert,
            token_of_row=token[by_expert.token_of_row].int(),
            pair_start_of_token=torch.searchsorted(token, tokens, out_int32=True),
            num_tokens=num_tokens,
        )


class _Sizes(NamedTuple):
    """As in `Sent`; received (W, 2): tokens and pairs from each source, on the device."""

    tokens_out: list[int]
    tokens_in: list[int]
    pairs_out: list[int]
    pairs_in: list[int]
    received: Tensor


def _trimmed(plan: RoutingPlan, rows: int) -> RoutingPlan:
    """``plan``, its capacity cut down to the rows that it has."""
    return replace(plan, token_of_row=plan.token_of_row[:rows], pair_of_row=plan.pair_of_row[:rows])
