"""The Hopper kernels compiled without a GPU: matrix units, TMA, copies, registers traded and none spilled.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
from triton_checks import turn
from triton_compile import (
    assert_threads_meet_after_tile_info,
    assert_threads_meet_before_tma_stores,
    compile_launch,
    count_spill_loads,
)

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.hopper import host as launches
from tilemoe.kernels.experts.hopper.configs import (
    CONSUMERS,
    MAX_CONTRACTION,
    MAX_CONTRACTION_OF_NARROW,
    MAX_WIDTH_OF_DH,
    NARROW,
    TILES,
    WARPGROUP_M,
    is_faster,
    why_unsupported,
)
from tilemoe.kernels.experts.hopper.gemm_pingpong import BLOCKS
from tilemoe.kernels.experts.triton.configs import KERNELS, Kernel, tile_rows
from tilemoe.kernels.experts.triton.tiles import tile_lists_launch
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

H200 = Device(90, 227 * 1024, 132)
D, N, E, T, K = 1536, 256, 2, 64, 2
GATHERED = {"up_proj_act", "down_proj_dgrad_dact", "down_proj_wgrad", "up_proj_wgrad"}
# Spill loads, once per tile of 128 x 256; 0 where none is named. Triton 3.9 spills some, and in the gathers, too.
SPILLS_OF_39 = dict.fromkeys(GATHERED, 16) | {"down_proj_dgrad_dact": 28}
SPILLS = {} if triton.__version__.startswith("3.6.") else SPILLS_OF_39


def all_launches(dtype: torch.dtype) -> dict[str, Launch]:
    spec = activation_spec("swiglu", "concatenated", None, None)
    plan = plan_topk(torch.arange(T * K).view(T, K) % E, E)
    _, (tiles, tall_tiles) = tile_lists_launch(plan, 128, 192)
    x, w1, w2 = (torch.zeros(*shape, dtype=dtype) for shape in [(T, D), (E, 2 * N, D), (E, D, N)])
    s = torch.zeros(T * K)
    up, a, h = launches.up_proj_act_launch(x, w1, None, plan, tiles, spec, True, H200)
    grad, dh, a_scaled, _ = launches.dgrad_dact_launch(x, w2, h, s, plan, tiles, spec, H200)
    return {
        "up_proj_act": up,
        "up_proj_act, inference": launches.up_proj_act_launch(x, w1, None, plan, tiles, spec, False, H200)[0],
        "down_proj": launches.rows_launch("down_proj", a, w2.transpose(1, 2), None, plan, tall_tiles, H200)[0],
        "down_proj_dgrad_dact": grad,
        "down_proj_wgrad": launches.wgrad_launch("down_proj_wgrad", x, a_scaled, w2, plan, H200),
        "up_proj_dgrad": launches.rows_launch("up_proj_dgrad", dh, w1, None, plan, tall_tiles, H200)[0],
        "up_proj_wgrad": launches.wgrad_launch("up_proj_wgrad", x, dh, w1.transpose(1, 2), plan, H200),
        "down_proj_wgrad, column-major": launches.wgrad_launch("down_proj_wgrad", x, a_scaled, turn(w2), plan, H200),
        "up_proj_wgrad, column-major": launches.wgrad_launch(
            "up_proj_wgrad", x, dh, turn(w1).transpose(1, 2), plan, H200
        ),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", all_launches(torch.bfloat16))
def test_kernel(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    compiled = compile_launch(all_launches(dtype)[name], 90)
    ptx = str(compiled.asm["ptx"])
    kernel = name.partition(",")[0]
    assert f"wgmma.mma_async.sync.aligned.m64n{TILES[kernel].block_n}k16" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert ("cp.async.cg.shared.global" in ptx) == (kernel in GATHERED), "gathers by 16 bytes, and nothing else does"
    assert compiled.metadata.shared <= H200.shared_bytes
    assert count_spill_loads(compiled, tmp_path) <= SPILLS.get(kernel, 0)
    assert_threads_meet_before_tma_stores(ptx)
    assert_threads_meet_after_tile_info(ptx)


@pytest.mark.parametrize("kernel", ["down_proj", "up_proj_dgrad"])
@pytest.mark.parametrize("d", [64, 1000])
def test_row_gemms_of_either_stride_order(kernel: Kernel, d: int, tmp_path: Path) -> None:
    """The first weight is contiguous in the other dimension than the second."""
    plan = plan_topk(torch.arange(T * K).view(T, K) % E, E)
    _, (tiles,) = tile_lists_launch(plan, TILES[kernel].block_m)
    rows = torch.zeros(T * K, 200, dtype=torch.bfloat16)
    for weight in (torch.zeros(E, 200, d), torch.zeros(E, d, 200).transpose(1, 2)):
        launch, _ = launches.rows_launch(kernel, rows, weight.to(torch.bfloat16), None, plan, tiles, H200)
        assert count_spill_loads(compile_launch(launch, 90), tmp_path) == 0


def test_tiles_are_as_tall_as_the_kernels_have_blocks() -> None:
    for kernel in KERNELS:
        blocks = BLOCKS if kernel in ("down_proj", "up_proj_dgrad") else CONSUMERS
        assert TILES[kernel].block_m == WARPGROUP_M * blocks, kernel
    for kernel in ("up_proj_act", "down_proj_dgrad_dact"):
        assert TILES[kernel].block_m == tile_rows(2, H200), "it shares the portable kernels' list"


def test_registers_of_three_warpgroups_fit() -> None:
    for name in KERNELS:
        tile = TILES[name]
        assert 256 * tile.consumer_registers + 128 * tile.producer_registers <= 65536, name
        assert tile.consumer_registers % 8 == 0, name
        assert tile.producer_registers % 8 == 0, name


@pytest.mark.parametrize(
    ("device", "version", "word"),
    [
        (Device(80, 163 * 1024, 108), "3.6.0", "capability"),
        (Device(100, 227 * 1024, 148), "3.6.0", "capability"),
        (Device(90, 99 * 1024, 132), "3.6.0", "shared memory"),
        (H200, "3.7.1", "Triton 3.6"),
    ],
)
def test_elsewhere_the_reason_is_given(device: Device, version: str, word: str) -> None:
    why = why_unsupported(device, version)
    assert why is not None
    assert word in why


def test_here_they_run() -> None:
    assert why_unsupported(H200, "3.6.0") is None
    assert why_unsupported(H200, "3.9.0") is None


def test_long_contractions_stay_portable() -> None:
    for width, longest in ((NARROW, MAX_CONTRACTION_OF_NARROW), (NARROW + 1, MAX_CONTRACTION)):
        assert is_faster("up_proj_dgrad", longest, width)
        assert not is_faster("up_proj_dgrad", longest + 1, width)
    assert is_faster("up_proj_wgrad", 4096, MAX_WIDTH_OF_DH)
    assert not is_faster("up_proj_wgrad", 4096, MAX_WIDTH_OF_DH + 1)
    for name in ("up_proj_act", "down_proj", "down_proj_dgrad_dact"):
        assert is_faster(name, 7168, 2048)
    assert not is_faster("down_proj", 512, 32), "narrow"
