"""NF4's bytes, values, views and slices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilemoe.kernels.experts.formats.nf4 import CODES, Nf4Weight, quantize_nf4
from tilemoe.testing import assert_equal

# quantize_4bit(weight(), quant_type="nf4") of bitsandbytes 0.50.2 on a CPU.
BYTES = (
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b"
    "05d17e29f3c05d1877777777777777777777777777777777777777777777777777777777777777774c06d18e2a04c16e29f3b05d17e29f3c"
    "05d18e2af4c16e18e3b05d17e29f3b05"
)
SCALES = (1.0, 15.000000953674316, 0.0, 0.05000000074505806)


def weight() -> Tensor:
    """(2, 2, 64), one block of zeros."""
    scale = torch.tensor([0.02, 0.3, 0.0, 1e-3]).view(2, 2, 1)
    return ((torch.arange(256) * 37 % 101) - 50).float().view(2, 2, 64) * scale


def stacked(found: Nf4Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([found.expert(index, dtype) for index in range(found.shape[0])])


def test_bytes_and_scales_are_those_of_bitsandbytes() -> None:
    found = quantize_nf4(weight())
    assert found.codes.flatten().numpy().tobytes().hex() == BYTES
    assert_equal(found.absmax.flatten(), torch.tensor(SCALES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_value_is_its_code_times_its_scale_rounded_once(dtype: torch.dtype) -> None:
    codes = torch.tensor([CODES[int(digit, 16)] for digit in BYTES])
    exact = codes.view(4, 64) * torch.tensor(SCALES).view(4, 1)
    assert_equal(stacked(quantize_nf4(weight()), dtype), exact.view(2, 2, 64).to(dtype))


def test_between_two_codes_the_nearer_and_in_the_middle_the_lower() -> None:
    table = torch.tensor(CODES)
    middle = (table[:-1] + table[1:]) / 2
    just_above = middle.nextafter(torch.ones(15))
    values = torch.cat((table, middle, just_above, torch.ones(18))).view(1, 1, 64)
    found = stacked(quantize_nf4(values)).flatten()
    assert_equal(found[:46], torch.cat((table, table[:-1], table[1:])))


def test_views_and_slices_are_those_of_the_decoded_weight() -> None:
    found = quantize_nf4(torch.randn(3, 64, 192, generator=torch.Generator().manual_seed(0)))
    dense, transposed = stacked(found), found.transpose(1, 2)
    assert transposed.shape == (3, 192, 64)
    assert_equal(stacked(transposed), dense.transpose(1, 2))
    assert_equal(stacked(transposed.transpose(1, 2)), dense)
    for rows, columns in ((slice(5, 9), slice(None)), (slice(None), slice(64, 192)), (slice(1, 3), slice(128, None))):
        assert_equal(stacked(found[:, rows, columns]), dense[:, rows, columns])
        assert_equal(stacked(transposed[:, columns, rows]), dense.transpose(1, 2)[:, columns, rows])
    assert_equal(stacked(found[1:, :7]), dense[1:, :7])
