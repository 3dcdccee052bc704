"""`formats.fp8` in Triton kernels. Rows are quantised in each call, weights once per block shape until they change.

T tokens · E experts · R_max static row capacity · p, q an operand's last two dimensions
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tilemoe.config import quantizes_wgrad
from tilemoe.kernels.experts.formats.fp8 import BLOCK, WEIGHTS, kept, weight_block, why_not
from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand, contracted_by
from tilemoe.kernels.experts.triton.descriptors import aligned_rows
from tilemoe.kernels.experts.triton.formats import transpose
from tilemoe.kernels.experts.triton.formats.quantize import quantized_blocks, quantized_weight
from tilemoe.plan import RoutingPlan

__all__ = ["quantizes_wgrad", "rows_for", "weight_for", "wgrad_operands", "why_not"]


def rows_for(gemm: str, rows: GemmOperand) -> Operand:
    """x, a, do or dh (., p) as ``gemm`` reads it."""
    if isinstance(rows, Operand):
        return rows
    return quantized_blocks(aligned_rows(rows), BLOCK if gemm == "down_proj" else rows.shape[1])


def weight_for(gemm: str, weight: WeightOperand) -> Operand:
    """w1 or w2 (E, p, q) as ``gemm`` reads it, contiguous along the contraction. Cached until the weight changes."""
    if isinstance(weight, Operand):
        return weight
    assert isinstance(weight, Tensor), "packed weights are for precision bf16"
    block = WEIGHTS if gemm == "down_proj" else weight_block(weight, contracted_by(gemm))
    return kept(weight, block, quantized_weight)


def wgrad_operands(by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> Iterator[transpose.WgradOperands]:
    """`transpose.wgrad_operands` of by_token (T, p) and by_row (R_max, q); p and q are multiples of 128."""
    return transpose.wgrad_operands(aligned_rows(by_token), by_row.contiguous(), plan)
