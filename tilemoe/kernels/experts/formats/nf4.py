"""NF4, the 4-bit format of QLoRA (arXiv 2305.14314), in the bytes of bitsandbytes: for weights that stay frozen.

E experts · p, q a weight's last two dimensions, as stored

``value = code * absmax``: each 64 neighbours along q of a weight (E, p, q) share absmax, their largest magnitude, in
fp32; the code is the nearest of 16, the lower one of a tie. A byte holds two neighbours, the first in its high bits.
bitsandbytes' ``quantize_4bit(weight, quant_type="nf4")`` gives the same bytes in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.operand import blocks_of

BLOCK = 64
# Quantiles of the normal distribution, bitsandbytes' numbers.
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_SMALLEST_SCALE = 1e-38  # smallest divisor, against division by zero


@dataclass(frozen=True)
class Nf4Weight:
    """A frozen weight (E, p, q) in NF4: codes (E, p, q / 2) uint8 and absmax (E, p, q / 64) fp32, or a transposed view
    of both, whose blocks run along p.

    It is indexed and transposed like the tensor that it stands for (along the blocks only by whole blocks), and can be
    multiplied in any dtype.
    """

    codes: Tensor
    absmax: Tensor

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8, "two codes a byte"
        assert self.codes.device == self.absmax.device, "moved together"
        assert 2 * self.codes.numel() == BLOCK * self.absmax.numel(), "a scale for each whole block"

    @property
    def blocked(self) -> int:
        """The dimension, 1 or 2, along which blocks run."""
        return 2 if self.codes.shape[1] == self.absmax.shape[1] else 1

    @property
    def shape(self) -> torch.Size:
        experts, p, q = self.codes.shape
        return torch.Size((experts, p, 2 * q) if self.blocked == 2 else (experts, 2 * p, q))

    def transpose(self, first: int, second: int) -> Nf4Weight:
        """The last two dimensions exchanged."""
        assert {first, second} == {1, 2}, "experts stay first"
        return Nf4Weight(self.codes.transpose(1, 2), self.absmax.transpose(1, 2))

    def __getitem__(self, parts: tuple[slice, ...]) -> Nf4Weight:
        """A slice for each leading dimension."""
        return Nf4Weight(self.codes[self._scaled(parts, 2)], self.absmax[self._scaled(parts, BLOCK)])

    def _scaled(self, parts: tuple[slice, ...], values: int) -> tuple[slice, ...]:
        """``parts``, in units of elements that each hold ``values`` values along the blocks."""
        if len(parts) <= self.blocked:
            return parts
        return (*parts[: self.blocked], blocks_of(parts[self.blocked], values), *parts[self.blocked + 1 :])

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """An expert's matrix (p, q): codes times scales in fp32, rounded once to ``dtype``."""
        codes, absmax = self.codes[index], self.absmax[index]
        if self.blocked == 1:
            codes, absmax = codes.t(), absmax.t()
        nibbles = torch.stack((codes >> 4, codes & 15), -1).flatten(-2)
        table = torch.tensor(CODES, dtype=torch.float32, device=codes.device)
        values = table[nibbles.int()].unflatten(-1, (-1, BLOCK)) * absmax.float().unsqueeze(-1)
        matrix = values.flatten(-2).to(dtype)
        return matrix if self.blocked == 2 else matrix.t()


Weight: TypeAlias = Tensor | Nf4Weight


@torch.no_grad()
def quantize_nf4(weight: Tensor) -> Nf4Weight:
    """``weight`` (E, p, q), q a multiple of 64, any float dtype but fp64, in NF4; quantised one expert at a time."""
    experts, p, q = weight.shape
    assert q % BLOCK == 0, "whole blocks in each row"
    codes = torch.empty(experts, p, q // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(experts, p, q // BLOCK, dtype=torch.float32, device=weight.device)
    table = torch.tensor(CODES, dtype=torch.float32, device=weight.device)
    middles = (table[:-1] + table[1:]) / 2
    for matrix, of_codes, of_absmax in zip(weight, codes, absmax, strict=True):
        blocks = matrix.float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        scaled = blocks * (1.0 / largest.clamp(min=_SMALLEST_SCALE)).unsqueeze(-1)
        nibbles = torch.bucketize(scaled.clamp(-1, 1), middles, out_int32=True).flatten(-2).to(torch.uint8)
        of_codes.copy_(nibbles[:, ::2] << 4 | nibbles[:, 1::2])
        of_absmax.copy_(largest)
    return Nf4Weight(codes, absmax)


def why_not_nf4(hidden_size: int, intermediate_size: int) -> str | None:
    """Why experts of these widths cannot be in NF4, naming the width and the fix; None if they can."""
    for name, width in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
        if width % BLOCK:
            return f"{name} must be a multiple of {BLOCK}, the block of NF4, got {width}; pad it, or leave NF4 out"
    return None
