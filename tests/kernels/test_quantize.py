"""Quantisation to FP8: against the oracle, which rounds by arithmetic, and at the edges of what e4m3 and fp32 hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.fp8 import (
    LARGEST,
    ROWS,
    WEIGHTS,
    pack_rows,
    packed_operand,
    quantize,
    unpack_rows,
    why_not,
)
from tilemoe.reference import fp8

WHOLE_ROW, WHOLE_COLUMN = (1, 300), (130, 1)


@pytest.mark.parametrize("block", [ROWS, WEIGHTS, WHOLE_ROW, WHOLE_COLUMN])
@pytest.mark.parametrize("magnitude", [1.0, 1e30, 1e-30, 1e-40], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 128), (130, 300)], ids=str)
def test_values_are_the_oracles(block: tuple[int, int], magnitude: float, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = magnitude * torch.randn(shape) * torch.exp(3 * torch.randn(shape))
    found = quantize(values, block).dense(torch.float32)
    torch.testing.assert_close(found, fp8.rounded(values, *block), rtol=0, atol=0)


def test_all_values_of_e4m3_stay() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]  # 254 of them, two blocks of which each holds 448
    rows = torch.stack([torch.cat([half, torch.tensor([LARGEST])]) for half in every.split(127)])
    found = quantize(rows, ROWS)
    assert (found.scale == 1).all()
    assert torch.equal(found.data.float(), rows)
    zeros = quantize(torch.zeros(2, 256), ROWS)
    assert (zeros.scale == 1).all()
    assert (zeros.data.float() == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_half_a_step_of_three_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 512).to(dtype)
    error = (quantize(values, ROWS).dense(torch.float32) - values.float()).abs()
    largest = values.float().abs().unflatten(1, (4, 128)).amax(2).repeat_interleave(128, 1)
    subnormal = largest / LARGEST * 2.0**-10  # half of e4m3's smallest, 2^-9
    assert (error <= torch.maximum(values.float().abs() / 16, subnormal) * (1 + 1e-6)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible_in_its_block(bad: float) -> None:
    values = torch.ones(2, 256)
    values[0, 130] = bad
    found = quantize(values, ROWS).dense(torch.float32)
    assert found[0, 130].isnan()
    assert (found[0, :128] == 1).all()
    assert (found[1] == 1).all()
    packed = unpack_rows(pack_rows(values), torch.float32)
    assert packed[0].isnan().all()
    assert (packed[1] == 1).all()


def test_largest_of_a_block_is_kept() -> None:
    """Nothing is out of range: after the division, rounding may not go beyond 448 either."""
    torch.manual_seed(0)
    values = torch.rand(4096, 128) + torch.finfo(torch.float32).max * torch.rand(4096, 1)
    found = quantize(values, ROWS)
    assert found.data.float().abs().amax(1).eq(LARGEST).all()
    assert found.dense(torch.float32).isfinite().all()


def rows_of_every_largest(dtype: torch.dtype, sample: int) -> Tensor:
    """A row of 128 for each finite magnitude of a 16-bit dtype, none of its values larger."""
    bits = torch.arange(1 << 15, dtype=torch.int16)
    bits = bits[bits.view(dtype).isfinite()].int()[:, None]
    generator = torch.Generator().manual_seed(sample)
    share = torch.rand(len(bits), 127, generator=generator)
    of_a_binade = round(1 / torch.finfo(dtype).eps)
    lowest = torch.zeros_like(bits) if sample % 2 else (bits - 18 * of_a_binade).clamp(min=0)  # what e4m3 spans
    rows = torch.cat((bits, (lowest + share * (bits - lowest + 1)).int().minimum(bits)), dim=1)
    return rows.to(torch.int16).view(dtype) * torch.randint(0, 2, rows.shape, generator=generator).mul(2).sub(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sample", range(2))
def test_rounded_rows_are_quantised_to_the_same(dtype: torch.dtype, sample: int) -> None:
    """Of every largest value that a block may have; but below what the module says the neighbour, seldom."""
    rows = rows_of_every_largest(dtype, sample)
    first = quantize(rows, ROWS)
    again = quantize(first.dense(dtype), ROWS)
    assert torch.equal(again.scale, first.scale)
    codes = [each.data.view(torch.uint8).int() for each in (first, again)]
    is_exact = rows[:, 0].abs().double() >= LARGEST * 512 * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert is_exact.double().mean() > 0.5
    assert torch.equal(codes[0][is_exact], codes[1][is_exact])
    assert (codes[0] - codes[1]).abs().max() <= 1
    assert ((codes[0] != codes[1]).any(1)).double().mean() < 0.005


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_packed_rows(count: int, dtype: torch.dtype) -> None:
    """A byte for each value and four for each row; what they hold is the oracle's, and does not change again."""
    torch.manual_seed(0)
    rows = (torch.randn(count, 384) * torch.exp(torch.randn(count, 384))).to(dtype)
    words = pack_rows(rows)
    assert words.dtype == torch.int32
    assert words.nbytes == count * (384 + 4)
    found, expected = packed_operand(words, dtype), quantize(rows, (1, 384))
    assert found.block == expected.block
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    unpacked = unpack_rows(words, dtype)
    assert torch.equal(unpacked, fp8.rounded(rows.float(), 1, 384).to(dtype))
    assert torch.equal(pack_rows(unpacked), words)


@pytest.mark.parametrize(
    ("dtype", "widths", "why"),
    [
        (torch.bfloat16, (256, 128), None),
        (torch.float32, (), None),
        (torch.float64, (256, 128), "fp64"),
        (torch.bfloat16, (200, 128), "d is not"),
        (torch.bfloat16, (256, 64), "n is not"),
    ],
)
def test_what_is_not_quantized(dtype: torch.dtype, widths: tuple[int, ...], why: str | None) -> None:
    found = why_not(dtype, *widths)
    assert found is why if why is None else found is not None and why in found
