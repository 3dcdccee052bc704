"""The operands of a GEMM: a tensor, an `Operand` quantised for one GEMM, or a weight that is stored in fewer bits.

E experts · p, q an operand's last two dimensions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.packed import PackedWeight, blocks_of
from tilemoe.plan import RoutingPlan


@dataclass(frozen=True)
class Operand:
    """A quantised GEMM operand: ``value = data * scale``, with one scale for each block of elements.

    data (..., p, q) · block (bp, bq), of data's last two dimensions · scale (..., ceil(p / bp), ceil(q / bq)), any
    float dtype · dtype: that of the tensor before quantisation, and of the GEMM's output.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        *batch, p, q = self.data.shape
        blocks = (-(-p // self.block[0]), -(-q // self.block[1]))
        assert self.scale.shape == (*batch, *blocks), "a scale for each block, the ragged ones, too"

    def __getitem__(self, parts: tuple[slice, ...]) -> Operand:
        """A view; parts has a slice for each leading dimension. The last two dimensions are cut at whole blocks."""
        sizes = (1,) * (self.data.ndim - 2) + self.block
        blocks = tuple(blocks_of(part, size) for part, size in zip(parts, sizes, strict=False))
        return Operand(self.data[parts], self.scale[blocks], self.block, self.dtype)

    def transpose(self, first: int, second: int) -> Operand:
        """The operand (E, p, q) with its last two dimensions exchanged."""
        assert {first, second} == {1, 2}, "experts stay first"
        return Operand(self.data.transpose(-2, -1), self.scale.transpose(-2, -1), self.block[::-1], self.dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in ``dtype``: data times scale in the scale's dtype, rounded once."""
        p, q = self.data.shape[-2:]
        scale = self.scale.repeat_interleave(self.block[0], -2)[..., :p, :]
        return (self.data.to(scale.dtype) * scale.repeat_interleave(self.block[1], -1)[..., :q]).to(dtype)


def contracted_by(gemm: str) -> int:
    """The dimension, 1 or 2, of a weight (E, p, q) that a GEMM contracts."""
    return 2 if gemm in ("up_proj_act", "down_proj") else 1


GemmOperand: TypeAlias = Tensor | Operand  # rows that a GEMM reads
WeightOperand: TypeAlias = Tensor | Operand | PackedWeight


class Format(Protocol):
    """A module that quantises a GEMM's operands to one format. This folder has it in plain PyTorch; a faster one is
    beside the kernels that read the format. A row of `tilemoe.kernels.experts.table` names the module.

    ``gemm``: one of `tilemoe.kernels.experts.triton.configs.KERNELS`. An `Operand` is returned unchanged.
    """

    def why_not(self, dtype: torch.dtype, *widths: int) -> str | None:
        """Why a layer of this dtype with these d and n cannot be quantised; None if it can."""

    def rows_for(self, gemm: str, rows: GemmOperand) -> Operand:
        """x, a, do or dh as the GEMM reads it."""

    def weight_for(self, gemm: str, weight: WeightOperand) -> Operand:
        """w1 or w2 as the GEMM reads it."""

    def quantizes_wgrad(self, rows: int, columns: int) -> bool:
        """Whether a weight gradient of these widths reads quantised operands."""

    def wgrad_operands(self, by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> Any:
        """(x or do, dh or a_scaled) as the weight gradients of the module's architecture read them."""
