"""MXFP4, the 4-bit format of the OCP Microscaling specification 1.0, in the byte layout of gpt-oss's checkpoints.

E experts · p, q a weight's last two dimensions, as stored

``value = code * 2^(exponent - 127)``: each 32 neighbours along q of a weight (E, p, q) share an exponent, a byte in
e8m0; a code is e2m1. A byte holds two neighbours, the first in its low bits. A checkpoint has the codes in
``..._blocks`` (E, p, q / 32, 16) and the exponents in ``..._scales`` (E, p, q / 32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.packed import PackedWeight, codes_of

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127
_LARGEST_EXPONENT = 2  # exponent of the largest code, 6 = 1.5 * 2^2
_SIGN = 8


@dataclass(frozen=True)
class Mxfp4Weight(PackedWeight):
    """A frozen weight (E, p, q) in MXFP4: codes (E, p, q / 2) and exponents (E, p, q / 32) uint8, or a transposed view
    of both."""

    name = "mxfp4"
    block = BLOCK
    values = VALUES
    high_first = False

    exponents: Tensor

    @classmethod
    def from_checkpoint(cls, blocks: Tensor, scales: Tensor) -> Mxfp4Weight:
        """A weight of views of gpt-oss's tensors: w1 from ``gate_up_proj_blocks`` (E, 2n, d / 32, 16) and ``_scales``,
        w2 from ``down_proj_blocks`` (E, d, n / 32, 16) and ``_scales``."""
        return cls(blocks.flatten(-2), scales)

    @property
    def scales(self) -> Tensor:
        return self.exponents

    def factors(self) -> Tensor:
        """2^(exponent - 127). Exponent 0 gives a subnormal; 255, the specification's NaN, gives infinity."""
        exponents = self.exponents.int()
        return torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)

    def _view(self, codes: Tensor, scales: Tensor) -> Mxfp4Weight:
        return Mxfp4Weight(codes, scales)


@torch.no_grad()
def quantize_mxfp4(weight: Tensor) -> Mxfp4Weight:
    """``weight`` (E, p, q), q a multiple of 32, any float dtype but fp64, in MXFP4; one expert at a time.

    By the specification's section 6.3 the exponent is that of the block's largest magnitude, minus 2. Codes are rounded
    to nearest, ties to even; magnitudes above 6 become 6.
    """
    experts, p, q = weight.shape
    assert q % BLOCK == 0, "whole blocks in each row"
    codes = torch.empty(experts, p, q // 2, dtype=torch.uint8, device=weight.device)
    exponents = torch.empty(experts, p, q // BLOCK, dtype=torch.uint8, device=weight.device)
    magnitudes = torch.tensor(VALUES[:_SIGN], device=weight.device)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    # bucketize rounds a tie down. Where the upper neighbour is even, the middle is lowered a little, so a tie goes up.
    middles[1::2] = middles[1::2].nextafter(magnitudes.new_zeros(()))
    for matrix, of_codes, of_exponents in zip(weight, codes, exponents, strict=True):
        blocks = matrix.float().contiguous().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        exponent = (largest.frexp().exponent - 1 - _LARGEST_EXPONENT).clamp(-_BIAS, _BIAS)
        exponent.masked_fill_(~largest.isfinite(), _BIAS + 1)  # NaN: decoded, no value of the block is finite
        scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
        nibbles = torch.bucketize(scaled.abs(), middles, out_int32=True) | torch.where(scaled < 0, _SIGN, 0)
        of_codes.copy_(codes_of(nibbles.flatten(-2).to(torch.uint8), high_first=False))
        of_exponents.copy_(exponent + _BIAS)
    return Mxfp4Weight(codes, exponents)
