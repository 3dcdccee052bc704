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
from tilemoe.dispatch.exchange import pairs_to_experts, sums_from_experts, tokens_to_experts
from tilemoe.kernels.base import compute_dtype
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.routing.plan import RoutingPlan


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
        kind = x.device.type
        if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # as the experts would: before it is sent
        rank_of_row, send_plan = self._send_plan(plan)
        sizes = self._exchange_sizes(plan, send_plan)
        sent = Sent(_trimmed(send_plan, sum(sizes.tokens_out)), *sizes[:4], group=self.group)

        rows = slice(sum(sizes.pairs_out))
        rank, token = rank_of_row[rows], plan.token_of_row[rows].long()
        slots = send_plan.row_of_pair[token * self.ranks + rank] - send_plan.row_start_of_expert[rank]
        s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype)))
        s = s.index_select(0, plan.pair_of_row[rows])
        s, slots = pairs_to_experts(s, slots, sent)
        local_plan = self._local_plan(slots, sizes)
        return Dispatched(tokens_to_experts(x, sent), local_plan, s, sent)

    @torch.compiler.disable
    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        assert dispatched.sent is not None, "the other half of what `dispatch` gave"
        return sums_from_experts(o, dispatched.sent)

    def local_weight(self, weight: Tensor) -> Tensor:
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def _send_plan(self, plan: RoutingPlan) -> tuple[Tensor, RoutingPlan]:
        """(rank of row (R_max,), W past R; the plan of tokens to ranks)."""
        rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
        expert_of_row = torch.searchsorted(plan.row_start_of_expert[1:].contiguous(), rows, right=True)
        rank_of_row = expert_of_row // self.experts_per_rank
        # A column more for the rows past R, which all name token 0.
        goes = torch.zeros(plan.num_tokens, self.ranks + 1, dtype=torch.bool, device=plan.device)
        goes[plan.token_of_row.long(), rank_of_row] = True
        ranks = torch.arange(self.ranks, device=plan.device)
        return rank_of_row, plan_topk(torch.where(goes[:, : self.ranks], ranks, self.ranks), self.ranks)

    def _exchange_sizes(self, plan: RoutingPlan, send_plan: RoutingPlan) -> _Sizes:
        tokens = send_plan.rows_per_expert[:, None]
        out = torch.cat((tokens, plan.rows_per_expert.view(self.ranks, self.experts_per_rank)), dim=1).contiguous()
        into = torch.empty_like(out)
        dist.all_to_all_single(into, out, group=self.group)
        both = torch.stack((out, into))
        host = torch.stack((both[:, :, 0], both[:, :, 1:].sum(2)), dim=1).tolist()  # the one read from the device
        (tokens_out, pairs_out), (tokens_in, pairs_in) = host
        return _Sizes(tokens_out, tokens_in, pairs_out, pairs_in, into)

    def _local_plan(self, slots: Tensor, sizes: _Sizes) -> RoutingPlan:
        """Of the pairs received, sorted by source, then by expert; slots (P,): a token's place among its source's."""
        tokens, pairs = sizes.received[:, 0], sizes.received[:, 1:]
        num_pairs = sum(sizes.pairs_in)
        experts = torch.arange(self.experts_per_rank, device=slots.device).repeat(self.ranks)
        expert = torch.repeat_interleave(experts, pairs.flatten(), output_size=num_pairs)
        first_token = torch.cumsum(tokens, 0) - tokens
        token = slots + torch.repeat_interleave(first_token, pairs.sum(1), output_size=num_pairs)
        return plan_pairs(token, expert, sum(sizes.tokens_in), self.experts_per_rank)


class _Sizes(NamedTuple):
    """As in `Sent`; received (W, 1 + e) on the device: tokens from each source, then pairs of each expert."""

    tokens_out: list[int]
    tokens_in: list[int]
    pairs_out: list[int]
    pairs_in: list[int]
    received: Tensor


def _trimmed(plan: RoutingPlan, rows: int) -> RoutingPlan:
    """``plan``, its capacity cut down to the rows that it has."""
    return replace(plan, token_of_row=plan.token_of_row[:rows], pair_of_row=plan.pair_of_row[:rows])
