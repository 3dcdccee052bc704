"""Bytes and values of weights in 4 bits against bitsandbytes and transformers; their views and slices."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tilemoe.kernels.experts.formats.mxfp4 import BLOCK, Mxfp4Weight, quantize_mxfp4
from tilemoe.kernels.experts.formats.nf4 import CODES, nested_values, quantize_nf4, quantize_nf4_double
from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.testing import assert_equal

# quantize_4bit(weight(), quant_type="nf4") of bitsandbytes 0.50.2 on a CPU.
BYTES = (
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c16d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b"
    "05d17e29f3c05d1877777777777777777777777777777777777777777777777777777777777777774c06d18e2a04c16e29f3b05d17e29f3c"
    "05d18e2af4c16e18e3b05d17e29f3b05"
)
SCALES = (1.0, 15.000000953674316, 0.0, 0.05000000074505806)
# codes, state = quantize_4bit(weight_of_scales()[0], quant_type="nf4", compress_statistics=True) of the same:
# state.absmax, then (state.offset, *state.state2.absmax), then sha256 of dequantize_4bit(codes, state).
NESTED_BYTES = (
    "0034da0e4fe81cc1f62ad00439de1290ec20c6fa2fd4083de217b1f025caff33d80d47e61bc0f529ce0337dc115deb1fc4f92dd3073be115"
    "aaef23c9fd31d70b40e519bef328cd0136db0f56e91ec3f72cd1053adf14a3ed22c7fc30d50a3ee418b8f226cb0034da0e4fe81cc1f62ad0"
    "0439de1290ec20c6fa2fd4083de217b1f025caff33d80d47e61bc0f529ce0337dc115deb1fc4f92dd3073be115aaef23c9fd31d70b40e519"
    "bef328cd0136db0f56e91ec3f72cd1053adf14a3ed22c7fc30d50a3ee418b8f226cb0034da0e4fe81cc1f62ad00439de1290ec20c6fa2fd4"
    "083de217b1f025caff33d80d47e61bc0f529ce0337dc115deb1fc4f92dd3073be214aaf023c9ff31d70a40e618bff427cd0035dc0e55ea1d"
    "c3f92bd2043ae013a3ef21c7fd30d6083ee417b9"
)
NESTED = (0.39760416746139526, 0.39145833253860474, 0.38364583253860474)
NESTED_VALUES = "9cce85f1912b88d1ccf6925a2d8791a1724355ddfb23e7053faf38a87969b614"


def weight() -> Tensor:
    """(2, 2, 64), one block of zeros."""
    scale = torch.tensor([0.02, 0.3, 0.0, 1e-3]).view(2, 2, 1)
    return ((torch.arange(256) * 37 % 101) - 50).float().view(2, 2, 64) * scale


def weight_of_scales() -> Tensor:
    """(1, 5, 3840), 300 blocks of equal values whose sum is exact in any order."""
    scales = (torch.arange(300) * 37 % 101 + 1) / 128
    return scales.repeat_interleave(64).view(1, 5, 3840)


def stacked(found: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
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


def test_doubly_quantised_are_those_of_bitsandbytes() -> None:
    found = quantize_nf4_double(weight_of_scales())
    assert found.absmax.flatten().numpy().tobytes().hex() == NESTED_BYTES
    assert_equal(found.nested, torch.tensor([NESTED]))
    values = found.expert(0, torch.float32)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == NESTED_VALUES
    assert_equal(stacked(found.with_whole_scales())[0], values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 96, 192), (1, 1000, 2880), (3, 5, 64)])
def test_doubly_quantised_as_by_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from bitsandbytes import functional  # its import takes a second

    assert_equal(torch.tensor(nested_values()), functional.create_dynamic_map())
    generator = torch.Generator().manual_seed(0)
    dense = (torch.randn(shape, generator=generator) * torch.rand(*shape[:2], 1, generator=generator)).to(dtype)
    found = quantize_nf4_double(dense)
    for expert, matrix in enumerate(dense):
        codes, state = functional.quantize_4bit(matrix, quant_type="nf4", compress_statistics=True)
        assert_equal(found.codes[expert].flatten(), codes.flatten())
        assert_equal(found.absmax[expert].flatten(), state.absmax)
        assert_equal(found.nested[expert], torch.cat((state.offset.view(1), state.state2.absmax)))
        assert_equal(found.expert(expert, dtype), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mxfp4_of_every_byte_and_exponent_is_that_of_transformers(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    exponents = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    found = Mxfp4Weight.from_checkpoint(blocks, exponents)
    assert found.codes.data_ptr() == blocks.data_ptr(), "as it lies in the checkpoint"
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=dtype).transpose(1, 2)
    assert_equal(stacked(found, dtype), expected)
    assert_equal(stacked(found, dtype).signbit(), expected.signbit())


def test_mxfp4_rounds_to_nearest_even_and_clips() -> None:
    values = torch.tensor([4.0, 7.9, -7.9, 6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.26, 0.24])
    rounded = torch.tensor([4.0, 6.0, -6.0, 6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 0.5, 0.0])
    for power in (-100, 0, 30):
        block = torch.ldexp(torch.nn.functional.pad(values, (0, BLOCK - len(values))), torch.tensor(power))
        found = quantize_mxfp4(block.view(1, 1, BLOCK))
        assert found.exponents.item() == 127 + power
        assert_equal(found.expert(0, torch.float32)[0, : len(values)], torch.ldexp(rounded, torch.tensor(power)))


def test_quantising_mxfp4_again_changes_no_value() -> None:
    found = quantize_mxfp4(torch.randn(2, 64, 96, generator=torch.Generator().manual_seed(0)))
    assert_equal(stacked(quantize_mxfp4(stacked(found))), stacked(found))


@pytest.mark.parametrize("storage", STORAGES)
def test_views_and_slices_are_those_of_the_decoded_weight(storage: str) -> None:
    weight = torch.randn(3, 64, 192, generator=torch.Generator().manual_seed(0))
    whole = STORAGES[storage].quantize(weight)
    assert_equal(stacked(whole.transpose(1, 2)), stacked(whole).transpose(1, 2))
    assert_equal(stacked(whole[1:,]), stacked(whole)[1:])
    found = whole.with_whole_scales()
    assert_equal(stacked(found), stacked(whole))
    dense, transposed = stacked(found), found.transpose(1, 2)
    assert transposed.shape == (3, 192, 64)
    assert_equal(stacked(transposed), dense.transpose(1, 2))
    assert_equal(stacked(transposed.transpose(1, 2)), dense)
    for rows, columns in ((slice(5, 9), slice(None)), (slice(None), slice(64, 192)), (slice(1, 3), slice(128, None))):
        assert_equal(stacked(found[:, rows, columns]), dense[:, rows, columns])
        assert_equal(stacked(transposed[:, columns, rows]), dense.transpose(1, 2)[:, columns, rows])
    assert_equal(stacked(found[1:, :7]), dense[1:, :7])
