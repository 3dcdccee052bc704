"""Quantisation to FP8: against the oracle, which rounds by arithmetic, and at the edges of what e4m3 and fp32 hold."""

from __future__ import annotations

import math

import pytest
import torch

from tilemoe.kernels.experts.quantize import LARGEST, ROWS, WEIGHTS, quantize, why_not_quantized
from tilemoe.reference import fp8


@pytest.mark.parametrize("block", [ROWS, WEIGHTS])
@pytest.mark.parametrize("magnitude", [1.0, 1e30, 1e-30, 1e-40], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 128), (130, 300)], ids=str)
def test_values_are_the_oracles(block: tuple[int, int], magnitude: float, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = magnitude * torch.randn(shape) * torch.exp(3 * torch.randn(shape))
    found = quantize(values, block).dense(torch.float32)
    torch.testing.assert_close(found, fp8.rounded(values, block[0]), rtol=0, atol=0)


def test_all_values_of_e4m3_stay() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[~every.isnan()]  # 254 of them, two blocks of which each holds 448
    rows = torch.stack([torch.cat([half, torch.tensor([LARGEST])]) for half in every.split(127)])
    found = quantize(rows, ROWS)
    assert (found.scale == 1).all()
    assert torch.equal(found.data.float(), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_half_a_step_of_three_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(64, 512).to(dtype)
    error = (quantize(values, ROWS).dense(torch.float32) - values.float()).abs()
    largest = values.float().abs().unflatten(1, (4, 128)).amax(2).repeat_interleave(128, 1)
    subnormal = largest / LARGEST * 2.0**-10  # half of e4m3's smallest, 2^-9
    assert (error <= torch.maximum(values.float().abs() / 16, subnormal) * (1 + 1e-6)).all()


def test_zeros_have_scale_one() -> None:
    found = quantize(torch.zeros(2, 256), ROWS)
    assert (found.scale == 1).all()
    assert (found.data.float() == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible_in_its_block(bad: float) -> None:
    values = torch.ones(2, 256)
    values[0, 130] = bad
    found = quantize(values, ROWS).dense(torch.float32)
    assert found[0, 130].isnan()
    assert (found[0, :128] == 1).all()
    assert (found[1] == 1).all()


def test_largest_of_a_block_is_kept() -> None:
    """Nothing is out of range: after the division, rounding may not go beyond 448 either."""
    torch.manual_seed(0)
    values = torch.rand(4096, 128) + torch.finfo(torch.float32).max * torch.rand(4096, 1)
    found = quantize(values, ROWS)
    assert found.data.float().abs().amax(1).eq(LARGEST).all()
    assert found.dense(torch.float32).isfinite().all()


def test_a_weight_and_its_transpose_share_their_scales() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 256, 384)
    one, other = quantize(weight, WEIGHTS), quantize(weight.transpose(1, 2), WEIGHTS)
    assert one.scale is not None
    assert other.scale is not None
    assert torch.equal(one.scale.transpose(1, 2), other.scale)
    assert torch.equal(one.data.float().transpose(1, 2), other.data.float())


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
    found = why_not_quantized(dtype, *widths)
    assert found is why if why is None else found is not None and why in found
