"""A toy architecture, all that a new one has to have: one mainloop, which takes a load for each format.

E experts · R_max static row capacity · p, q a weight's last two dimensions
"""

from __future__ import annotations

import toy_format
from torch import Tensor

from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.plan import RoutingPlan

BN = 8  # columns of a tile


class ToyBackend(TorchBackend):
    """down_proj and up_proj_dgrad by the toy's mainloop; every other kernel is the torch backend's."""

    name = "toy"

    def down_proj(self, a: GemmOperand, w2: WeightOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        rows, weight = self.operands("down_proj", a, w2)
        return mainloop(rows, weight.transpose(1, 2), b2, plan)

    def up_proj_dgrad(self, dh: GemmOperand, w1: WeightOperand, plan: RoutingPlan) -> Tensor:
        return mainloop(*self.operands("up_proj_dgrad", dh, w1), None, plan)


def load(tile: GemmOperand) -> Tensor:
    return toy_format.load(tile) if isinstance(tile, Operand) else tile


def mainloop(rows: GemmOperand, weight: WeightOperand, bias: Tensor | None, plan: RoutingPlan) -> Tensor:
    """Each expert's rows (R_max, p) times its weight (E, p, q), plus bias (E, q), a tile of columns after the other."""
    assert isinstance(weight, Tensor | Operand)
    experts, _, width = (weight if isinstance(weight, Tensor) else weight.data).shape
    out, start = plan.row_start_of_expert.new_empty(plan.capacity, width).float(), plan.row_start_of_expert.tolist()
    for expert in range(experts):
        own = slice(start[expert], start[expert + 1])
        for col in range(0, width, BN):
            columns = slice(col, col + BN)
            tile = load(weight[expert : expert + 1, :, columns])[0]
            out[own, columns] = load(rows[own,]) @ tile + (0 if bias is None else bias[expert, columns])
    return out
