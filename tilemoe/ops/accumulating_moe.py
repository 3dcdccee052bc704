"""`moe` with accumulate=True as a graph break under torch.compile. Imported on demand: importing it changes torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan


@torch.compiler.disable  # a graph cannot write to a leaf's gradient
def accumulating_moe(x: Tensor, w1: Tensor, w2: Tensor, plan: RoutingPlan, scores: Tensor, **options: Any) -> Tensor:
    return moe(x, w1, w2, plan, scores, accumulate=True, **options)
