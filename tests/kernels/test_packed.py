"""Bytes and values of weights in 4 bits against bitsandbytes and transformers; their views and slices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tilemoe.kernels.experts.formats.mxfp4 import BLOCK, Mxfp4Weight, quantize_mxfp4
from tilemoe.kernels.experts.formats.nf4 import CODES, nested_values, quantize_nf4, quantize_nf4_double
from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.testing import assert_equal


def stacked(found: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([found.expert(index, dtype) for index in range(found.shape[0])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_value_is_its_code_times_its_scale_rounded_once(dtype: torch.dtype) -> None:
    found = quantize_nf4(torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)))
    halves = torch.stack((found.codes >> 4, found.codes & 15), -1).flatten(-2)
    assert_equal(stacked(found, dtype), (torch.tensor(CODES)[halves.int()] * found.absmax).to(dtype))


def test_between_two_codes_the_nearer_and_in_the_middle_the_lower() -> None:
    table = torch.tensor(CODES)
    middle = (table[:-1] + table[1:]) / 2
    just_above = middle.nextafter(torch.ones(15))
    values = torch.cat((table, middle, just_above, torch.ones(18))).view(1, 1, 64)
    found = stacked(quantize_nf4(values)).flatten()
    assert_equal(found[:46], torch.cat((table, table[:-1], table[1:])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 96, 192), (1, 1000, 2880), (3, 5, 64)])
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Codes, scales and values, the scales quantised too or not; one block is of zeros."""
    from bitsandbytes import functional  # its import takes a second

    assert_equal(torch.tensor(nested_values()), functional.create_dynamic_map())
    generator = torch.Generator().manual_seed(0)
    dense = (torch.randn(shape, generator=generator) * torch.rand(*shape[:2], 1, generator=generator)).to(dtype)
    dense[0, 0, :64] = 0
    found, plain = quantize_nf4_double(dense), quantize_nf4(dense)
    for expert, matrix in enumerate(dense):
        codes, state = functional.quantize_4bit(matrix, quant_type="nf4")
        assert_equal(plain.codes[expert].flatten(), codes.flatten())
        assert_equal(plain.absmax[expert].flatten(), state.absmax)
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_broken_weight_does_not_become_finite(storage: str, value: float) -> None:
    weight = torch.ones(2, 64, 64)
    weight[1, 3, 5] = value
    found = stacked(STORAGES[storage].quantize(weight)).isfinite()
    assert found[0].all()
    assert not found[1, 3, 5]


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
