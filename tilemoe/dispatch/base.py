"""The dispatcher for one process, and what all dispatchers give: a dispatch and a combine around the experts.

T tokens of this process · M tokens at its experts · d model width · E experts · e experts of this process · P pairs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.plan import RoutingPlan


class Dispatched(NamedTuple):
    """The inputs of this process' experts; ``tilemoe.moe(x, w1, w2, plan, scores)`` is the output to combine.

    x (M, d) · plan over the e local experts and M tokens · scores, shaped for that plan · sent: the transport's, whose
    ``combine`` brings the outputs back; None if nothing was sent
    """

    x: Tensor
    plan: RoutingPlan
    scores: Tensor
    sent: Any


class LayerRoom:
    """One layer's room in this process. rows: the most rows that it can receive; 0 before any were sent · index (1,)
    int32, on the device: the layer's number.
    """

    rows = 0
    index: Tensor


class LocalDispatcher:
    """The dispatcher if all experts are in this process: it sends nothing. Its methods are `AllToAllDispatcher`'s."""

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        return Dispatched(x, plan, scores, None)

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        return o

    def local_weight(self, weight: Tensor) -> Tensor:
        return weight

    def capacity(self, device: torch.device) -> None:
        return None
