"""The expert-parallel dispatcher: sends each token once to every process that holds some of its experts.

T tokens of this process · M tokens at its experts · W processes (ranks) that share a layer's experts
E experts · d model width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from tilemoe.dispatch.base import Capacity, Dispatched, LayerRoom
from tilemoe.dispatch.choose import Transports
from tilemoe.dispatch.collective import Collective
from tilemoe.plan import RoutingPlan

_INT32_MAX = 2**31 - 1


class AllToAllDispatcher:
    """Experts ``[r e, (r + 1) e)`` live in the group's rank r; all its ranks call the layer together.

    A token is sent once to each rank that holds any of its experts, with a score and an index for each of these. That
    rank computes the score-weighted sum of its experts' outputs, and returns only that sum.
    If the experts compute in FP8, tokens and the gradients of their outputs are sent in FP8 (docs/fp8.md).
    A process may have no tokens, and a process' experts may get none. An expert's gradient is the sum over all W
    processes' tokens, divided by ``gradient_divide_factor``.

    The group's `Transports` choose how tokens are sent: by `tilemoe.dispatch.window`, where the host reads no sizes,
    buffers have a fixed capacity, and the backward pulls the M tokens again; or by `tilemoe.dispatch.collective`, where
    the host waits for the sizes in the forward, and the M tokens are saved.
    """

    def __init__(
        self,
        transports: Transports,
        num_experts: int,
        gradient_divide_factor: float = 1.0,
        precision_of: Callable[[Tensor], str] | None = None,
    ) -> None:
        """``transports``: the group's; the layers of a model share it. ``precision_of(x)``: which of
        `tilemoe.config.PRECISIONS` the experts compute x (T, d) in; x has the dtype that they get. None: they never
        quantise.

        ValueError: the group's ranks do not divide ``num_experts``.
        """
        ranks = dist.get_world_size(transports.group)
        if num_experts % ranks:
            raise ValueError(
                f"num_experts ({num_experts}) must be divisible by the {ranks} processes that share the experts; "
                "choose an expert-parallel size that divides it"
            )
        self.transports, self.experts_per_rank = transports, num_experts // ranks
        self.gradient_divide_factor, self._precision_of = gradient_divide_factor, precision_of
        self._room = LayerRoom()
        transports.layers.append(self._room)

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        if plan.num_tokens * self.experts_per_rank > _INT32_MAX:
            raise ValueError(
                f"{plan.num_tokens} tokens times {self.experts_per_rank} experts per process exceed int32, the dtype "
                "of pair indices; split the batch"
            )
        kind = x.device.type
        if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))  # the experts would cast it, too, but after it is sent
        precision = "bf16" if self._precision_of is None else self._precision_of(x)
        return self.transports.of(x.device).dispatch(x, plan, scores, precision, self._room)

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        assert dispatched.sent is not None, "the other half of what `dispatch` gave"
        return dispatched.sent.combine(o)

    def local_weight(self, weight: Tensor) -> Tensor:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if self.gradient_divide_factor == 1:
            return local
        return _DivideGradient.apply(local, self.gradient_divide_factor)

    def capacity(self, device: torch.device) -> Capacity | None:
        transport = self.transports.of(device)
        return None if isinstance(transport, Collective) else transport


class _DivideGradient(torch.autograd.Function):
    """Returns the weight, and divides its gradient in place: the experts have just made it for this weight alone.

    When traced, it makes a new tensor: a traced Function that changes its gradient in place behaves differently.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.factor if torch.compiler.is_compiling() else gradient.div_(ctx.factor), None
