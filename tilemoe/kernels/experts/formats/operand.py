"""What a GEMM reads: a tensor, an `Operand` quantised for one GEMM, or a weight that is stored in fewer bits.

E experts · p, q an operand's last two dimensions
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.nf4 import Nf4Weight, blocks_of


@dataclass(frozen=True)
class Operand:
    """A quantised GEMM operand: ``value = data * scale``, with one scale for each block of elements.

    data (..., p, q) · block (bp, bq), of data's last two dimensions · scale (..., ceil(p / bp), ceil(q / bq)), any
    float dtype · dtype: of the tensor that was quantised, and of the GEMM's output.
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
        """A view, by a slice for each leading dimension; slices of the last two dimensions must be of whole blocks."""
        sizes = (1,) * (self.data.ndim - 2) + self.block
        blocks = tuple(blocks_of(part, size) for part, size in zip(parts, sizes, strict=False))
        return Operand(self.data[parts], self.scale[blocks], self.block, self.dtype)

    def transposed(self) -> Operand:
        """The last two dimensions exchanged."""
        return Operand(self.data.transpose(-2, -1), self.scale.transpose(-2, -1), self.block[::-1], self.dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in ``dtype``, for a GEMM without scales: multiplied in the scale's dtype, rounded once."""
        p, q = self.data.shape[-2:]
        scale = self.scale.repeat_interleave(self.block[0], -2)[..., :p, :]
        return (self.data.to(scale.dtype) * scale.repeat_interleave(self.block[1], -1)[..., :q]).to(dtype)


Weight: TypeAlias = Tensor | Nf4Weight
# An operand that a backend has made for one of its own row GEMMs: a tensor, or an `Operand` where it quantises.
GemmOperand = Any
