"""The differentiable exchanges of expert parallelism: each one's gradient is another's forward.

T tokens of this process · M tokens at its experts · S copies of tokens sent · P pairs sent · d model width
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilemoe.dispatch.base import Sent
from tilemoe.kernels.select import kernel_set, name_for


class Travelling(NamedTuple):
    """Tokens (M, d) on their way here; nothing may read them before ``arrival.wait()``."""

    tokens: Tensor
    arrival: dist.Work
    copies: Tensor  # what is sent, which must not be freed before


def begin_tokens_to_experts(x: Tensor, sent: Sent) -> Travelling:
    """Send a copy of each token of x (T, d) to each rank that holds one of its experts, and do not wait for them."""
    copies = x.detach().index_select(0, sent.plan.token_of_row)
    received = copies.new_empty(sum(sent.tokens_in), copies.shape[1])
    sizes = (sent.tokens_in, sent.tokens_out)
    return Travelling(
        received, dist.all_to_all_single(received, copies, *sizes, group=sent.group, async_op=True), copies
    )


def tokens_to_experts(x: Tensor, sent: Sent, travelling: Travelling) -> Tensor:
    """x (T, d) -> (M, d), what `begin_tokens_to_experts` has sent of it."""
    return _ToExperts.apply(x, sent, travelling)


def sums_from_experts(o: Tensor, sent: Sent) -> Tensor:
    """o (M, d) -> (T, d): of each token the sum over the ranks that it went to, in fp32 or better, in rank order."""
    return _FromExperts.apply(o, sent)


def pairs_to_experts(scores: Tensor, places: Tensor, sent: Sent) -> tuple[Tensor, Tensor]:
    """scores (P,) fp32 or fp64 and places (P,) int32, sorted by rank, to their ranks in one message."""
    received: tuple[Tensor, Tensor] = _PairsToExperts.apply(scores, places, sent)
    return received


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sent, travelling: Travelling) -> Tensor:
        ctx.sent = sent
        travelling.arrival.wait()
        return travelling.tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _return_sums(dx, ctx.sent), None, None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        return _return_sums(o, sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None]:
        travelling = begin_tokens_to_experts(do, ctx.sent)
        travelling.arrival.wait()
        return travelling.tokens, None


class _PairsToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, places: Tensor, sent: Sent) -> tuple[Tensor, Tensor]:
        ctx.sent = sent
        words = scores.contiguous()[:, None].view(torch.int32)  # (P, 1), or (P, 2) of fp64
        received = _exchange(torch.cat((words, places[:, None]), dim=1), sent.pairs_out, sent.pairs_in, sent.group)
        there = received[:, :-1].flatten().view(scores.dtype), received[:, -1].contiguous()
        ctx.mark_non_differentiable(there[1])
        return there

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return _exchange(ds, ctx.sent.pairs_in, ctx.sent.pairs_out, ctx.sent.group), None, None


def _return_sums(rows: Tensor, sent: Sent) -> Tensor:
    copies = _exchange(rows, sent.tokens_in, sent.tokens_out, sent.group)
    if copies.shape[0] == 0:  # there may be tokens all the same: none was routed
        return rows.new_zeros(sent.plan.num_tokens, rows.shape[1])
    total = rows.new_empty(sent.plan.num_tokens, rows.shape[1])
    # The sum over a token's ranks is what the layer's backward does over a token's rows.
    kernel_set(name_for(rows.device, rows.dtype, rows.shape[1])).combine_grad(copies, sent.plan, total)
    return total


def _exchange(rows: Tensor, rows_out: list[int], rows_in: list[int], group: dist.ProcessGroup) -> Tensor:
    """``rows`` (sum(rows_out), ...), sorted by rank, each to its rank; what came, sorted by source rank."""
    received = rows.new_empty(sum(rows_in), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), rows_in, rows_out, group=group)
    return received
