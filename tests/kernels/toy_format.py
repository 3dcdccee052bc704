"""A toy format, all that a new one has to have: int8 with a scale for each line along the contraction."""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand, contracted_by
from tilemoe.plan import RoutingPlan


def why_not(dtype: torch.dtype, *widths: int) -> str | None:
    return None if dtype == torch.float32 else f"the toy quantises fp32, not {dtype}"


def rows_for(gemm: str, rows: GemmOperand) -> Operand:
    return rows if isinstance(rows, Operand) else quantize(rows, 1)


def weight_for(gemm: str, weight: WeightOperand) -> Operand:
    assert isinstance(weight, Tensor | Operand)
    return weight if isinstance(weight, Operand) else quantize(weight, contracted_by(gemm))


def quantizes_wgrad(rows: int, columns: int) -> bool:
    return False


def wgrad_operands(by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
    return by_token, by_row


def quantize(values: Tensor, along: int) -> Operand:
    """``values`` (..., p, q), each line along dimension ``along`` to within half of its largest magnitude / 127."""
    scale = (values.abs().amax(along, keepdim=True) / 127).clamp(min=1e-30)
    block = [1, 1]
    block[along - values.ndim] = values.shape[along]
    return Operand((values / scale).round().to(torch.int8), scale, (block[0], block[1]), values.dtype)


def load(tile: Operand) -> Tensor:
    """A tile as `toy_architecture.mainloop` multiplies it."""
    return tile.data.float() * tile.scale
