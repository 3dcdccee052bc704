"""Toy formats, all that a new one has to have: int8 with a scale for each line along the contraction; and of frozen
weights, 4-bit integers with a power of two for each 16, its exponent in a byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand, contracted_by
from tilemoe.kernels.experts.formats.packed import PackedWeight, codes_of
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


@dataclass(frozen=True)
class Int4Weight(PackedWeight):
    name = "int4"
    block = 16
    values = tuple(float(value) for value in range(-8, 8))
    high_first = True

    powers: Tensor

    @property
    def scales(self) -> Tensor:
        return self.powers

    def factors(self) -> Tensor:
        return (self.powers.float() - 64).exp2()

    def _view(self, codes: Tensor, scales: Tensor) -> Int4Weight:
        return Int4Weight(codes, scales)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """``weight`` (E, p, q), whose largest magnitude in a block becomes at most 7."""
    blocks = weight.float().unflatten(-1, (-1, Int4Weight.block))
    power = (blocks.abs().amax(-1) / 7).clamp(min=1e-9).log2().ceil().int()
    nibbles = (torch.ldexp(blocks, -power.unsqueeze(-1)).round() + 8).flatten(-2).to(torch.uint8)
    return Int4Weight(codes_of(nibbles, Int4Weight.high_first), (power + 64).to(torch.uint8))
