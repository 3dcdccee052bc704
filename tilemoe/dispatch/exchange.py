"""The differentiable exchanges of expert parallelism: each one's gradient is another's forward.

T tokens of this process · W ranks · M tokens at its experts · C copies of tokens, those for other ranks before this
rank's own · P pairs sent · Q pairs received · d model width

This rank's own rows are in no message: they are copied while the others travel.

x and do are sent to the experts; o and dx come back. If the experts compute in FP8, x and do are quantised before they
are sent, once per token and as the experts' GEMMs do it, this rank's own, too; o and dx are partial sums and are not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilemoe.dispatch.base import Sent
from tilemoe.dispatch.transport import Arrival, Transport, Way
from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.kernels.experts.formats.dense import compute_dtype
from tilemoe.ops.expert_parallel import count_sent, pack_rows, place_sent, plan_received, sum_copies, unpack_rows
from tilemoe.plan import RoutingPlan

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name in PyTorch 2.11


class ToExperts(torch.autograd.Function):
    """x (T, d) and scores, shaped for the plan -> those at this rank's experts: tokens (M, d), scores (Q,) in fp32 or
    fp64, and their plan; and the `Sent`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        routed: Routed,
        group: dist.ProcessGroup,
        transport: Transport,
        precision: str,
    ) -> tuple[Tensor, Tensor, RoutingPlan, Sent]:
        s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype))).contiguous()
        sizes, before = count_sent(*routed)
        side_stream = _side_stream(x.device)
        with side_stream:
            gathered = sizes.new_empty(routed.ranks * routed.ranks, 2)
            arrival = all_gather(gathered, sizes[0], group=group, async_op=True)
        # Everything that does not need the sizes is launched before the host waits for them.
        rows = _as_sent(x, precision)
        *places, words, position_of_pair, copies = place_sent(rows, s, sizes, before, *routed)
        with side_stream:
            sizes_on_host = _end_all_gather(arrival, gathered.view(routed.ranks, routed.ranks, 2), sizes, routed.here)
        sent = _sent(sizes_on_host, places, position_of_pair, routed.here, transport, precision)

        pairs = _send(words, sent.pairs, transport)
        tokens = _send(copies, sent.tokens, transport)
        _copy_own(words, sent.pairs, pairs)
        _gather_own(rows, sent, tokens)
        _end_all_to_all(pairs)
        experts = routed.experts_per_rank
        token_of_row, pair_of_row, row_of_pair, pair_start, row_start, rows_per_expert, s = plan_received(
            pairs.rows, sizes, routed.here, experts, len(tokens.rows)
        )
        arrays = (token_of_row, pair_of_row, row_of_pair, pair_start, row_start)
        plan = RoutingPlan(*arrays, experts, len(tokens.rows), unchecked=True)  # made while the tokens travel
        plan.derived.rows_per_expert = rows_per_expert
        received = _as_given(_end_all_to_all(tokens), x.dtype, precision)

        needs_x, needs_scores = ctx.needs_input_grad[:2]
        ctx.sent, ctx.scores_are = sent, (scores.shape, scores.dtype)
        ctx.tokens_back, ctx.pairs_back = (WayBack(way.back(), transport) for way in (sent.tokens, sent.pairs))
        ctx.input_grads_are_made = partial(_begin, ctx.tokens_back, ctx.pairs_back)
        ctx.mark_non_differentiable(*([] if needs_x else [received]), *([] if needs_scores else [s]))
        return received, s, plan, sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, ds: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        needs_x, needs_scores = ctx.needs_input_grad[:2]
        sent: Sent = ctx.sent
        _begin(ctx.tokens_back, ctx.pairs_back, dx if needs_x else None, ds if needs_scores else None)
        dx_home = dscores = None
        if needs_x:
            dx_home = _summed(ctx.tokens_back, sent)
        if needs_scores:
            shape, dtype = ctx.scores_are
            of_pairs = ctx.pairs_back.arrived()
            dscores = ds.new_zeros(shape.numel()).index_add_(0, sent.position_of_pair, of_pairs).to(dtype).view(shape)
        return dx_home, dscores, None, None, None, None


class FromExperts(torch.autograd.Function):
    """o (M, d) -> (T, d): each token's sum over the ranks that it was sent to, in fp32 or better, in rank order."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        tokens_back = WayBack(sent.tokens.back(), sent.transport)
        tokens_back.begin(o)
        return _summed(tokens_back, sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None]:
        sent: Sent = ctx.sent
        rows = _as_sent(do, sent.precision)
        copies = rows.index_select(0, sent.token_of_copy[: sum(sent.tokens.out)])
        tokens = _send(copies, sent.tokens, sent.transport)
        _gather_own(rows, sent, tokens)
        return _as_given(_end_all_to_all(tokens), do.dtype, sent.precision), None


class Travelling(NamedTuple):
    """Rows in flight to this rank, and its own; the other ranks' may be read only after ``arrival.wait()``."""

    rows: Tensor
    left: Tensor  # the rows sent, which must not be freed before the arrival
    arrival: Arrival  # last, so that it is released first: after an error it must still be waited for


class WayBack:
    """Sends rows back to the ranks that they came from, or what was computed from such rows.

    Sending begins as soon as the rows exist. For gradients of the layer's inputs that is before the weights' gradients.
    """

    def __init__(self, way: Way, transport: Transport) -> None:
        self._way, self._transport = way, transport
        self._begun: tuple[Tensor, int, Travelling] | None = None

    def begin(self, rows: Tensor) -> None:
        """Start sending ``rows``: first those of other ranks, then this rank's own.

        A second call sends again if the rows are other ones, or have changed by autograd's version counter. It does not
        see a change through ``.data``, NumPy or a custom kernel: rows already sent arrive without it, and rows that are
        being sent may have it or not.
        """
        # Not data_ptr, which is 0 for rows of no bytes: all ranks must decide alike. Inference tensors have no version.
        memory, version = rows.untyped_storage()._cdata, 0 if rows.is_inference() else rows._version
        if self._begun is not None:
            earlier, changes, travelling = self._begun
            if earlier.untyped_storage()._cdata == memory and earlier.shape == rows.shape and changes == version:
                return
            _end_all_to_all(travelling)  # what it reads and writes is freed here
        whole = rows.contiguous()
        travelling = _send(whole, self._way, self._transport)
        _copy_own(whole, self._way, travelling)
        self._begun = rows, version, travelling

    def arrived(self) -> Tensor:
        """The rows that came back: from other ranks, in rank order, then this rank's own."""
        assert self._begun is not None, "begin comes first"
        (_, _, travelling), self._begun = self._begun, None
        return _end_all_to_all(travelling)


def _begin(tokens_back: WayBack, pairs_back: WayBack, dx: Tensor | None, ds: Tensor | None) -> None:
    """Begin the exchanges, in the same order on all ranks. None: that gradient is not needed."""
    if dx is not None:
        tokens_back.begin(dx)
    if ds is not None:
        pairs_back.begin(ds)


def _summed(tokens_back: WayBack, sent: Sent) -> Tensor:
    """(T, d): each token's sum over the ranks that it was sent to."""
    return sum_copies(tokens_back.arrived(), sent.token_of_copy, sent.copy_of_token, sent.first_copy)


def _as_sent(rows: Tensor, precision: str) -> Tensor:
    """x or do (T, d) as sent: quantised and packed for fp8, else unchanged."""
    return pack_rows(rows) if precision == "fp8" else rows


def _as_given(arrived: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    """The received rows (M, d) in ``dtype``: unpacked for fp8, else unchanged."""
    return unpack_rows(arrived, dtype) if precision == "fp8" else arrived


def _send(rows: Tensor, way: Way, transport: Transport) -> Travelling:
    """Start sending ``rows`` to other ranks. Behind those that arrive there is room for this rank's own."""
    leaving, coming = sum(way.out), sum(way.into)
    arriving = rows.new_empty(coming + way.own, *rows.shape[1:])
    left = rows[:leaving]
    return Travelling(arriving, left, transport.send(left, arriving[:coming], way))


# Waiting for other ranks has functions of its own: `tilemoe.train.job.watch` reports their names if a job hangs.


def _end_all_gather(arrival: Arrival, between: Tensor, sizes: Tensor, here: int) -> list[list[list[int]]]:
    """Wait for ``between`` (W, W, 2) and read it, the only host sync. ``sizes[1]``: filled with those sent to here."""
    arrival.wait()
    sizes[1] = between[:, here]
    return between.tolist()


def _end_all_to_all(travelling: Travelling) -> Tensor:
    """Wait for the all-to-all; returns its rows."""
    travelling.arrival.wait()
    return travelling.rows


def _copy_own(rows: Tensor, way: Way, travelling: Travelling) -> None:
    """Copy this rank's own of ``rows``, which follow those for other ranks, behind the rows that arrive."""
    first, arriving = sum(way.out), travelling.rows
    arriving[len(arriving) - way.own :].copy_(rows[first : first + way.own])


def _gather_own(x: Tensor, sent: Sent, travelling: Travelling) -> None:
    arriving = travelling.rows
    own = arriving[len(arriving) - sent.tokens.own :]
    torch.index_select(x.detach(), 0, sent.token_of_copy[sum(sent.tokens.out) :], out=own)


def _sent(
    between: list[list[list[int]]],
    places: list[Tensor],
    position_of_pair: Tensor,
    here: int,
    transport: Transport,
    precision: str,
) -> Sent:
    """From how many (tokens, pairs) each rank sends to each, and the first three tensors of `place_sent`."""
    tokens, pairs = (_way([[size[column] for size in sent] for sent in between], here) for column in range(2))
    token_of_copy, copy_of_token, first_copy = places
    token_of_copy = token_of_copy[: sum(tokens.out) + tokens.own]
    position_of_pair = position_of_pair[: sum(pairs.out) + pairs.own]
    return Sent(token_of_copy, copy_of_token, first_copy, position_of_pair, tokens, pairs, transport, precision)


def _way(between: list[list[int]], here: int) -> Way:
    own = between[here][here]
    others = (tuple(0 if a == b else count for b, count in enumerate(sent)) for a, sent in enumerate(between))
    return Way(tuple(others), here, own)


def _side_stream(device: torch.device) -> AbstractContextManager[Any]:
    """A second stream, after the current one's work so far. Waiting for it does not wait for that one's later work."""
    if device.type != "cuda":
        return nullcontext()
    stream = _side_stream_of(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@cache
def _side_stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
