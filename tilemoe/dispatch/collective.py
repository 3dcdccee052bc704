"""Exchange of tokens by ``all_to_all_single``, on any device and over several hosts; the host reads the sizes.

T tokens of this process · W ranks · M tokens at its experts · C copies of tokens sent · P pairs sent · Q pairs
received · d model width

x and do are sent to the experts; o and dx come back. If the experts compute in FP8, x and do are quantised before they
are sent, once per token and as the experts' GEMMs do it; o and dx are partial sums and are not quantised.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilemoe.dispatch.base import Dispatched, LayerRoom
from tilemoe.kernels.choose import choose_expert_parallel, choose_experts, choose_packing
from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.kernels.experts.formats.dense import compute_dtype
from tilemoe.plan import RoutingPlan, plan_of

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in PyTorch 2.11


class Way(NamedTuple):
    """The numbers of rows from this rank to each rank, and from each rank to this one."""

    out: list[int]
    into: list[int]

    def back(self) -> Way:
        """The numbers for sending the same rows back."""
        return Way(self.into, self.out)


class SentByCollective(NamedTuple):
    """Where this process' tokens were sent. Copies of tokens, and pairs, are ordered by the rank they are sent to.

    token_of_copy (C) · copy_of_token (T W), token-major, -1 for ranks that a token is not sent to · position_of_pair
    (P): for each pair sent, the index of its score in the scores
    """

    token_of_copy: Tensor
    copy_of_token: Tensor
    position_of_pair: Tensor
    tokens: Way
    pairs: Way
    group: dist.ProcessGroup
    precision: str

    @torch.compiler.disable
    def combine(self, o: Tensor) -> Tensor:
        """o (M, d) -> (T, d): each token's sum over the ranks that it was sent to, in fp32 or better, in rank order."""
        return _FromExperts.apply(o, self)


class Collective:
    """The exchange of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @torch.compiler.disable  # a graph cannot contain sizes that the host reads
    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor, precision: str, room: LayerRoom) -> Dispatched:
        """See `Dispatcher`. precision: "bf16" sends x and do in their own dtype, "fp8" in e4m3. room: not used, since
        any number of rows fits.
        """
        return Dispatched(*_ToExperts.apply(x, scores, plan, self.group, precision))


class _ToExperts(torch.autograd.Function):
    """x (T, d) and scores, shaped for the plan -> what this rank's experts receive: tokens (M, d), their plan, scores
    (Q,) in fp32 or fp64; and the `SentByCollective`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, plan: RoutingPlan, group: dist.ProcessGroup, precision: str
    ) -> tuple[Tensor, RoutingPlan, Tensor, SentByCollective]:
        ranks, here = dist.get_world_size(group), dist.get_rank(group)
        s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype))).contiguous()
        arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
        routed = Routed(*arrays, plan.num_tokens, ranks)
        kernels = choose_expert_parallel(x.device, plan.num_tokens, plan.num_pairs, plan.num_experts, ranks).impl
        sizes, between = s.new_empty(ranks, 2, dtype=torch.int32), s.new_empty(ranks * ranks, 2, dtype=torch.int32)
        token_of_copy = sizes.new_empty(plan.num_tokens * ranks)
        words = sizes.new_empty(plan.num_pairs, 1 + s.element_size() // 4)
        before = kernels.count_sent(routed, sizes)
        all_gather(between, sizes, group=group)
        copy_of_token, position_of_pair = kernels.place_sent(s, sizes, before, token_of_copy, words, routed)
        by_source = between.view(ranks, ranks, 2).tolist()  # the only host sync
        tokens, pairs = (_way(by_source, here, column) for column in (0, 1))
        sent = SentByCollective(
            token_of_copy[: sum(tokens.out)],
            copy_of_token,
            position_of_pair[: sum(pairs.out)],
            tokens,
            pairs,
            group,
            precision,
        )
        words = _all_to_all(words[: sum(pairs.out)], pairs, group)
        received = _to_experts(x, sent)
        came = between.view(ranks, ranks, 2)[:, here].contiguous()
        experts = routed.experts_per_rank
        there = choose_expert_parallel(x.device, len(received), len(words), experts, ranks).impl
        *arrays, rows_per_expert, s = there.plan_received(words, came, experts, len(received))
        plan = plan_of(tuple(arrays), len(received), counted_rows=rows_per_expert)

        needs_x, needs_scores = ctx.needs_input_grad[:2]
        ctx.sent, ctx.scores_are = sent, (scores.shape, scores.dtype)
        ctx.mark_non_differentiable(*([] if needs_x else [received]), *([] if needs_scores else [s]))
        return received, plan, s, sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, _: None, ds: Tensor, __: None) -> tuple[Tensor | None, ...]:
        needs_x, needs_scores = ctx.needs_input_grad[:2]
        sent: SentByCollective = ctx.sent
        dx_home = _sums_home(dx, sent) if needs_x else None
        dscores = None
        if needs_scores:
            shape, dtype = ctx.scores_are
            of_pairs = _all_to_all(ds, sent.pairs.back(), sent.group)
            dscores = ds.new_zeros(shape.numel()).index_add_(0, sent.position_of_pair, of_pairs).to(dtype).view(shape)
        return dx_home, dscores, None, None, None


class _FromExperts(torch.autograd.Function):
    """o (M, d) -> (T, d)."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, sent: SentByCollective) -> Tensor:
        ctx.sent = sent
        return _sums_home(o, sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None]:
        return _to_experts(do, ctx.sent), None


def _to_experts(rows: Tensor, sent: SentByCollective) -> Tensor:
    """x or do (T, d) -> (M, d), at the experts."""
    packing = choose_packing(rows.device, rows.dtype).impl if sent.precision == "fp8" else None
    leaving = rows if packing is None else packing.pack_rows(rows)
    arrived = _all_to_all(leaving.index_select(0, sent.token_of_copy), sent.tokens, sent.group)
    return arrived if packing is None else packing.unpack_rows(arrived, rows.dtype)


def _sums_home(rows: Tensor, sent: SentByCollective) -> Tensor:
    """(M, d) -> (T, d): each token's sum over its copies, in fp32 or better, in the order of the ranks."""
    copies = _all_to_all(rows, sent.tokens.back(), sent.group)
    ranks = len(sent.tokens.out)
    total = copies.new_empty(len(sent.copy_of_token) // ranks, copies.shape[1])
    if len(copies) == 0:  # no token was sent, but there may be tokens
        return total.zero_()
    # combine_grad, of a plan whose experts are the ranks and whose rows are the copies, sums over a token's copies.
    first_copy = torch.tensor([0, *sent.tokens.out], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    first_copy = first_copy.to(copies.device, non_blocking=True)
    arrays = (sent.token_of_copy, sent.token_of_copy, sent.copy_of_token, None, first_copy)
    choose_experts(copies.device, copies.dtype, copies.shape[1:]).impl.combine_grad(
        copies, plan_of(arrays, len(total)), total
    )
    return total


def _way(by_source: list[list[list[int]]], here: int, column: int) -> Way:
    """The `Way` of rank ``here``, from counts indexed [source][destination][``column``: 0 tokens, 1 pairs]."""
    return Way([to[column] for to in by_source[here]], [source[here][column] for source in by_source])


def _all_to_all(rows: Tensor, way: Way, group: dist.ProcessGroup) -> Tensor:
    """The rows that all ranks send to this one; each rank's ``rows`` are grouped by destination."""
    arrived = rows.new_empty(sum(way.into), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), way.into, way.out, group=group)
    return arrived
