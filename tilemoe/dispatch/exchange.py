"""The differentiable exchanges of expert parallelism: each one's gradient is another's forward.

T tokens of this process · W ranks · M tokens at its experts · C copies of tokens, those for other ranks before this
rank's own · P pairs sent · Q pairs received · d model width

What is for this rank itself is copied here, while the rest travels: no message holds it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilemoe.dispatch.base import Sent
from tilemoe.kernels.base import compute_dtype
from tilemoe.kernels.torch.exchange import Routed
from tilemoe.ops.exchange import count_sent, place_sent, plan_received, sum_copies
from tilemoe.routing.plan import ROWS_PER_EXPERT, RoutingPlan


def tokens_to_experts(
    x: Tensor, scores: Tensor, routed: Routed, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, RoutingPlan, Sent]:
    """x (T, d), scores as the plan asks -> those at the experts here: tokens (M, d), scores (Q,) fp32 or fp64, their
    plan; and what was sent.
    """
    arrived: tuple[Tensor, Tensor, RoutingPlan, Sent] = _ToExperts.apply(x, scores, routed, group)
    return arrived


def sums_from_experts(o: Tensor, sent: Sent) -> Tensor:
    """o (M, d) -> (T, d): of each token the sum over the ranks that it went to, in fp32 or better, in rank order."""
    return _FromExperts.apply(o, sent)


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, routed: Routed, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, RoutingPlan, Sent]:
        s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype))).contiguous()
        sizes, before = count_sent(routed)
        beside = _beside(x.device)
        with beside:
            arrival = dist.all_to_all_single(sizes[1], sizes[0], group=group, async_op=True)
        # All that does not need the sizes is begun before the host waits for them.
        *places, words, position_of_pair, copies = place_sent(x, s, sizes, before, routed)
        with beside:
            arrival.wait()
            sent = _sent(sizes.tolist(), places, position_of_pair, routed, group)  # the one read from the device

        pairs = _leave(words, sent.pairs_out, sent.own_pairs, sent.pairs_in, group)
        tokens = _leave(copies, sent.tokens_out, sent.own_tokens, sent.tokens_in, group)
        _keep(words, sent.own_pairs, sent.pairs_out, pairs)
        _gather_own(x, sent, tokens)
        pairs.arrival.wait()
        plan, s = _plan_of(pairs.rows, sizes, routed, len(tokens.rows))  # while the tokens travel
        tokens.arrival.wait()

        ctx.way_back, ctx.scores_are = WayBack(sent), (scores.shape, scores.dtype)
        ctx.input_grad_is_made = ctx.way_back.begin
        needs_x, needs_scores = ctx.needs_input_grad[:2]
        ctx.mark_non_differentiable(*([] if needs_x else [tokens.rows]), *([] if needs_scores else [s]))
        return tokens.rows, s, plan, sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, ds: Tensor, *_: None) -> tuple[Tensor | None, Tensor | None, None, None]:
        needs_x, needs_scores = ctx.needs_input_grad[:2]
        sent: Sent = ctx.way_back.sent
        if needs_x:
            ctx.way_back.begin_unless_begun(dx)
        dscores = None
        if needs_scores:
            home = _return(ds, sent.pairs_in, sent.own_pairs, sent.pairs_out, sent.group)
            home.arrival.wait()
            shape, dtype = ctx.scores_are
            dscores = ds.new_zeros(shape.numel()).index_add_(0, sent.position_of_pair, home.rows).to(dtype).view(shape)
        return ctx.way_back.finish() if needs_x else None, dscores, None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        way_back = WayBack(sent)
        way_back.begin(o)
        return way_back.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None]:
        sent: Sent = ctx.sent
        copies = do.index_select(0, sent.token_of_copy[: sum(sent.tokens_out)])
        tokens = _leave(copies, sent.tokens_out, sent.own_tokens, sent.tokens_in, sent.group)
        _gather_own(do, sent, tokens)
        tokens.arrival.wait()
        return tokens.rows, None


class Travelling(NamedTuple):
    """Rows on their way here, this rank's own among them; nothing may read the others before ``arrival.wait()``."""

    rows: Tensor
    arrival: dist.Work
    left: Tensor  # what was sent, which must not be freed before


class WayBack:
    """Of M rows to the tokens that they were made of: what each rank made of a token is summed.

    It begins as soon as the rows are there, which for the gradient of x is before those of the weights are.
    """

    def __init__(self, sent: Sent) -> None:
        self.sent = sent
        self._begun: tuple[Tensor, Travelling] | None = None

    def begin(self, rows: Tensor) -> None:
        """rows (M, d)"""
        sent = self.sent
        self._begun = rows, _return(rows, sent.tokens_in, sent.own_tokens, sent.tokens_out, sent.group)

    def begin_unless_begun(self, rows: Tensor) -> None:
        """Also where other rows were begun with, which something has changed since, or added to."""
        if self._begun is None or self._begun[0] is not rows:
            self.begin(rows)

    def finish(self) -> Tensor:
        """(T, d)"""
        assert self._begun is not None, "begin comes first"
        (_, copies), self._begun = self._begun, None
        copies.arrival.wait()
        sent = self.sent
        return sum_copies(copies.rows, sent.token_of_copy, sent.copy_of_token, sent.first_copy)


def _leave(rows: Tensor, out: list[int], own: int, into: list[int], group: dist.ProcessGroup) -> Travelling:
    """``rows`` for other ranks set out, ``out`` of them for each, and ``into`` come; there is room for ``own`` more."""
    leaving, coming = sum(out), sum(into)
    arriving = rows.new_empty(coming + own, *rows.shape[1:])
    left = rows[:leaving]
    return Travelling(
        arriving, dist.all_to_all_single(arriving[:coming], left, into, out, group=group, async_op=True), left
    )


def _return(rows: Tensor, out: list[int], own: int, into: list[int], group: dist.ProcessGroup) -> Travelling:
    """As `_leave`, of contiguous rows whose last ``own`` are this rank's: these are copied."""
    rows = rows.contiguous()
    travelling = _leave(rows, out, own, into, group)
    _keep(rows, own, out, travelling)
    return travelling


def _keep(rows: Tensor, own: int, out: list[int], travelling: Travelling) -> None:
    """This rank's own of ``rows``, which lie behind those for the others, to where the others' come."""
    first = sum(out)
    arriving = travelling.rows
    arriving[len(arriving) - own :].copy_(rows[first : first + own])


def _gather_own(x: Tensor, sent: Sent, travelling: Travelling) -> None:
    arriving = travelling.rows
    own = arriving[len(arriving) - sent.own_tokens :]
    torch.index_select(x.detach(), 0, sent.token_of_copy[sum(sent.tokens_out) :], out=own)


def _sent(
    sizes: list[list[list[int]]],
    places: list[Tensor],
    position_of_pair: Tensor,
    routed: Routed,
    group: dist.ProcessGroup,
) -> Sent:
    """From the tokens and pairs for each rank and of each, and the first three tensors of `place_sent`."""
    counts = [[size[column] for size in way] for column in range(2) for way in sizes]
    own_tokens, _, own_pairs, _ = (count[routed.here] for count in counts)
    for count in counts:
        count[routed.here] = 0
    tokens_out, tokens_in, pairs_out, pairs_in = counts
    token_of_copy, copy_of_token, first_copy = places
    return Sent(
        token_of_copy[: sum(tokens_out) + own_tokens],
        copy_of_token,
        first_copy,
        position_of_pair[: sum(pairs_out) + own_pairs],
        tokens_out,
        tokens_in,
        own_tokens,
        pairs_out,
        pairs_in,
        own_pairs,
        group,
    )


def _plan_of(words: Tensor, sizes: Tensor, routed: Routed, num_tokens: int) -> tuple[RoutingPlan, Tensor]:
    """Of the pairs received: (the plan of the M tokens that they are of, their scores)."""
    experts = routed.experts_per_rank
    token_of_row, pair_of_row, row_of_pair, pair_start, row_start, rows_per_expert, scores = plan_received(
        words, sizes, routed.here, experts, num_tokens
    )
    plan = RoutingPlan(token_of_row, pair_of_row, row_of_pair, pair_start, row_start, experts, num_tokens)
    plan.derived[ROWS_PER_EXPERT] = rows_per_expert
    return plan, scores


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """A stream beside the current one, which it follows: what the host waits for there is not what comes here later."""
    if device.type != "cuda":
        return nullcontext()
    stream = _stream_beside(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
