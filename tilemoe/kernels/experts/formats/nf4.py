"""NF4, the 4-bit format of QLoRA (arXiv 2305.14314), in bitsandbytes' byte layout, for weights that stay frozen.

E experts · p, q a weight's last two dimensions, as stored · m = p q / 64 scales of an expert

``value = code * absmax``: each 64 neighbours along q of a weight (E, p, q) share absmax, their largest magnitude, in
fp32. The code is the nearest of 16 values, the lower one on a tie. A byte holds two neighbours, the first in its high
bits. bitsandbytes' ``quantize_4bit(weight, quant_type="nf4")`` gives the same bytes in the same order.

Double quantisation (``compress_statistics=True`` for each expert's matrix) stores absmax in a byte, too. The expert's
mean is subtracted; in blocks of 256, in the order of storage, a scale is then the nearest of 256 values
(`nested_values`) times the block's largest magnitude. On a CPU bitsandbytes, and so this file, finds the nearest in a
table of 65,536 entries, which near a middle may give the other neighbour. Elsewhere it is exactly the nearest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.kernels.experts.formats.packed import PackedWeight, codes_of

BLOCK = 64
NESTED_BLOCK = 256  # scales of blocks that share a scale of their own
# Quantiles of the normal distribution, with bitsandbytes' digits.
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_SMALLEST_SCALE = 1e-38  # smallest divisor, against division by zero
_CPU_STEPS = 32767.5  # steps per unit in the table that is used on a CPU


@dataclass(frozen=True)
class Nf4Weight(PackedWeight):
    """A frozen weight (E, p, q) in NF4: codes (E, p, q / 2) uint8 and absmax (E, p, q / 64) fp32, or a transposed view
    of both.

    With double quantisation absmax is uint8, and nested (E, 1 + ceil(m / 256)) fp32 has each expert's mean, then the
    scales of its absmax. Such a weight can be sliced along experts only.
    """

    name = "nf4"
    block = BLOCK
    values = CODES
    high_first = True

    absmax: Tensor
    nested: Tensor | None = None

    @property
    def scales(self) -> Tensor:
        return self.absmax

    def factors(self) -> Tensor:
        if self.nested is None:
            return self.absmax.float()
        stored = self.absmax if self.blocked == 2 else self.absmax.transpose(1, 2)
        table = torch.tensor(nested_values(), dtype=torch.float32, device=stored.device)
        values = _nested_blocks(table[stored.int()].flatten(1))
        of_blocks = values * self.nested[:, 1:].unsqueeze(-1)
        found = of_blocks.flatten(1)[:, : stored[0].numel()].add_(self.nested[:, :1]).view(stored.shape)
        return found if self.blocked == 2 else found.transpose(1, 2)

    def _view(self, codes: Tensor, scales: Tensor) -> Nf4Weight:
        return Nf4Weight(codes, scales, self.nested)

    def __getitem__(self, parts: tuple[slice, ...]) -> Nf4Weight:
        """A view; parts has a slice for each leading dimension."""
        if self.nested is None:
            return super().__getitem__(parts)
        assert len(parts) == 1, "blocks of scales run over whole experts: with_whole_scales() comes first"
        return Nf4Weight(self.codes[parts], self.absmax[parts], self.nested[parts])

    def with_whole_scales(self) -> Nf4Weight:
        return self if self.nested is None else Nf4Weight(self.codes, self.factors())


@torch.no_grad()
def quantize_nf4(weight: Tensor) -> Nf4Weight:
    """``weight`` (E, p, q), q a multiple of 64, any float dtype but fp64, in NF4; quantised one expert at a time."""
    experts, p, q = weight.shape
    assert q % BLOCK == 0, "whole blocks in each row"
    codes = torch.empty(experts, p, q // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(experts, p, q // BLOCK, dtype=torch.float32, device=weight.device)
    middles = _middles(CODES, weight.device)
    for matrix, of_codes, of_absmax in zip(weight, codes, absmax, strict=True):
        blocks = matrix.float().contiguous().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        scaled = blocks * (1.0 / largest.clamp(min=_SMALLEST_SCALE)).unsqueeze(-1)
        nibbles = torch.bucketize(scaled.clamp(-1, 1), middles, out_int32=True).flatten(-2).to(torch.uint8)
        of_codes.copy_(codes_of(nibbles, high_first=True))
        of_absmax.copy_(largest)
    return Nf4Weight(codes, absmax)


@torch.no_grad()
def quantize_nf4_double(weight: Tensor) -> Nf4Weight:
    """``weight`` (E, p, q) quantised as in `quantize_nf4`, with its scales quantised, too."""
    found = quantize_nf4(weight)
    scales = found.absmax.flatten(1)
    mean = torch.stack([each.mean() for each in scales]).unsqueeze(1)  # sums in the order of a single matrix
    blocks = _nested_blocks(scales - mean)
    largest = blocks.abs().amax(-1)
    scaled = blocks * (1.0 / largest.clamp(min=_SMALLEST_SCALE)).unsqueeze(-1)
    if scaled.device.type == "cpu":
        scaled = ((scaled + 1) * _CPU_STEPS + 0.5).floor() / _CPU_STEPS - 1
    codes = torch.bucketize(scaled, _middles(nested_values(), scaled.device), out_int32=True).to(torch.uint8)
    absmax = codes.flatten(1)[:, : scales.shape[1]].reshape(found.absmax.shape)
    return Nf4Weight(found.codes, absmax, torch.cat((mean, largest), 1))


@cache
def nested_values() -> tuple[float, ...]:
    """The 256 values of a quantised scale, ascending: bitsandbytes' dynamic map (arXiv 2110.02861), in fp32.

    Each sign has seven decades with 1, 2, 4, ... 64 values, the middles of as many equal parts; 0 and 1 are added.
    """
    positive: list[float] = []
    tenth = _fp32(0.1)
    for decade in range(7):  # without tensors: in a model that is exported before its first call they have no values
        parts = 2**decade
        step, scale = _fp32(1 - tenth) / parts, _fp32(10.0 ** (decade - 6))
        # Each bound is computed from the nearer end, as torch.linspace does, and rounded once.
        lower, upper = range((parts + 1) // 2), range((parts + 1) // 2, parts + 1)
        bounds = [*(_fp32(tenth + step * at) for at in lower), *(_fp32(1 - step * (parts - at)) for at in upper)]
        positive += [_fp32(_fp32(low + high) / 2 * scale) for low, high in pairwise(bounds)]
    return (*[-value for value in reversed(positive)], 0.0, *positive, 1.0)


def _fp32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def _middles(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The middles between neighbouring values, in fp32."""
    table = torch.tensor(values, dtype=torch.float32, device=device)
    return (table[:-1] + table[1:]) / 2


def _nested_blocks(scales: Tensor) -> Tensor:
    """Scales (E, m) as (E, ceil(m / 256), 256), padded with zeros."""
    return F.pad(scales, (0, -scales.shape[1] % NESTED_BLOCK)).unflatten(1, (-1, NESTED_BLOCK))
