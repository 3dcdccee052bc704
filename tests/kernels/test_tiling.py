"""The choice of tiles: whatever it returns fits the GPU, and T takes no part."""

import random

import pytest

from tilemoe.kernels.experts.triton.configs import KERNELS, choose_tile, shared_bytes, tile_rows
from tilemoe.runtime.device import Device

KB = 1024
GPUS = {
    "T4": Device(75, 64 * KB, 40),
    "A100": Device(80, 163 * KB, 108),
    "RTX 4090": Device(89, 99 * KB, 128),
    "H200": Device(90, 227 * KB, 132),
    "B200": Device(100, 227 * KB, 148),
    "RTX 5090": Device(120, 99 * KB, 170),
    "MI300X": Device(0, 64 * KB, 304),
}


@pytest.mark.parametrize("gpu", GPUS)
def test_every_tile_fits(gpu: str) -> None:
    device, rng = GPUS[gpu], random.Random(0)
    for _ in range(10_000 // len(GPUS) + 1):
        kernel = rng.choice(KERNELS)
        widths = [8 * rng.randint(1, 2 ** rng.randint(0, 11)) for _ in range(2)]
        itemsize, gate_up = rng.choice([2, 4]), rng.choice([None, "concatenated", "interleaved"])
        tile = choose_tile(kernel, *widths, itemsize, device, gate_up)
        where = (kernel, widths, itemsize, gate_up, tile)
        assert shared_bytes(kernel, tile, itemsize, gate_up) <= device.shared_bytes, where
        blocks = (tile.block_m, tile.block_n, tile.block_k)
        assert all(block >= 16 and block & (block - 1) == 0 for block in blocks), where
        assert tile.block_m * tile.block_n <= 128 * tile.num_warps * 32, where  # at most 128 accumulators a thread
        assert tile.block_n % tile.slices == 0, where
        assert tile.block_n // tile.slices >= 16, where
        assert 1 <= tile.num_stages <= 7, where
        assert tile.num_warps in (4, 8), where


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_row_gemms_share_one_list_of_tiles(gpu: str, itemsize: int) -> None:
    rows = tile_rows(itemsize, GPUS[gpu])
    for kernel in ("up_proj_act", "down_proj", "down_proj_dgrad_dact", "up_proj_dgrad"):
        for widths in [(8, 8), (1536, 256), (4096, 14336)]:
            assert choose_tile(kernel, *widths, itemsize, GPUS[gpu]).block_m == rows


def test_tiles_do_not_outgrow_the_widths() -> None:
    tile = choose_tile("down_proj", 40, 24, 2, GPUS["H200"])
    assert (tile.block_n, tile.block_k) == (32, 64)
    tile = choose_tile("up_proj_wgrad", 24, 72, 2, GPUS["H200"])
    assert (tile.block_m, tile.block_n) == (32, 128)


def test_measured_choices_on_an_h200() -> None:
    tile = choose_tile("up_proj_act", 1536, 256, 2, GPUS["H200"], "concatenated")
    assert (tile.block_m, tile.block_n, tile.block_k, tile.num_stages) == (128, 128, 64, 4)
    assert tile.flatten
    assert not tile.tma_stores
    for kernel in ("down_proj", "up_proj_dgrad"):
        tile = choose_tile(kernel, 1536, 512, 2, GPUS["H200"])
        assert (tile.block_m, tile.block_n, tile.num_stages, tile.slices, tile.flatten) == (128, 256, 4, 2, True)
    assert choose_tile("down_proj_wgrad", 1536, 256, 2, GPUS["H200"]).num_stages == 7
    assert choose_tile("up_proj_wgrad", 1536, 512, 2, GPUS["H200"]).num_stages == 6


def test_h_is_read_ahead_where_registers_are_left_for_it() -> None:
    assert choose_tile("down_proj_dgrad_dact", 1536, 256, 2, GPUS["H200"], "concatenated").load_ahead
    assert not choose_tile("down_proj_dgrad_dact", 1536, 256, 2, GPUS["H200"], "interleaved").load_ahead
    assert not choose_tile("down_proj_dgrad_dact", 1536, 256, 2, GPUS["B200"], "concatenated").load_ahead


def test_interpreter_takes_the_smallest_tiles() -> None:
    device = Device(90, 1 << 20, 3, interpreted=True)
    assert tile_rows(2, device) == tile_rows(4, device) == 16
