"""The Hopper kernels compiled without a GPU: matrix units, TMA, copies, registers traded and none spilled.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton_checks import turn
from triton_compile import (
    Operands,
    assert_items_carry_their_blocks,
    assert_threads_meet_after_tile_info,
    assert_threads_meet_before_tma_stores,
    bytes_of_copies,
    compile_launch,
    count_loads_of_two_bytes,
    count_spill_loads,
    make_operands,
    row_gemm_launch,
)

from tilemoe.kernels.experts.hopper import host
from tilemoe.kernels.experts.hopper.configs import (
    CONSUMERS,
    MAX_CONTRACTION,
    MAX_CONTRACTION_OF_NARROW,
    MAX_WIDTH_OF_DH,
    NARROW,
    STATIONARY,
    TILES,
    WARPGROUP_M,
    is_faster,
    tile_of,
    why_unsupported,
)
from tilemoe.kernels.experts.hopper.gemm_pingpong import BLOCKS
from tilemoe.kernels.experts.hopper.gemm_stationary import gemm_stationary_kernel
from tilemoe.kernels.experts.triton.configs import KERNELS, Kernel, tile_rows
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

H200 = Device(90, 227 * 1024, 132)
OF_ROWS: tuple[Kernel, ...] = ("down_proj", "up_proj_dgrad")
GATHERED = {"up_proj_act", "down_proj_dgrad_dact", "down_proj_wgrad", "up_proj_wgrad"}
# Spill loads, once per tile of 128 x 256; 0 where none is named. Triton 3.9 spills some, and in the gathers, too.
SPILLS_OF_39 = dict.fromkeys(GATHERED, 16) | {"down_proj_dgrad_dact": 28}
SPILLS = {} if triton.__version__.startswith("3.6.") else SPILLS_OF_39


def all_launches(dtype: torch.dtype) -> dict[str, Launch]:
    of = make_operands(dtype=dtype)
    weights = {"down_proj_wgrad": (of.a, of.w2), "up_proj_wgrad": (of.h, of.w1.transpose(1, 2))}
    transposed = {"down_proj_wgrad": (of.a, turn(of.w2)), "up_proj_wgrad": (of.h, turn(of.w1).transpose(1, 2))}
    inference, *_ = host.up_proj_act_launch(of.x, of.w1, None, of.plan, of.tiles, of.spec, False, H200)
    wide = make_operands(widths=(1536, 512), dtype=dtype)
    return {
        **{name: row_gemm_launch(host, name, of, H200, tall=True) for name in KERNELS if name not in weights},
        "down_proj, long contraction": row_gemm_launch(host, "down_proj", wide, H200, tall=True),
        "up_proj_act, inference": inference,
        **{name: host.wgrad_launch(name, of.x, *given, of.plan, H200) for name, given in weights.items()},
        **{
            f"{name}, column-major": host.wgrad_launch(name, of.x, *given, of.plan, H200)
            for name, given in transposed.items()
        },
        **{
            f"{name}, added{order}": host.wgrad_launch(name, of.x, rows, out.float(), of.plan, H200, adds=True)
            for order, of_order in (("", weights), (", column-major", transposed))
            for name, (rows, out) in of_order.items()
        },
        **{f"up_proj_wgrad, sums{form}": launch for form, launch in sums_launches(of, turn(of.w1)).items()},
    }


def sums_launches(of: Operands, turned: Tensor) -> dict[str, Launch]:
    """up_proj_wgrad that gives db1, too, of either order, stored or added."""
    sums, launches = torch.zeros(2, of.h.shape[1]), dict[str, Launch]()
    for order, w1 in (("", of.w1), (", column-major", turned)):
        out = w1.transpose(1, 2)
        for form, to in (("", out), (", added", out.float())):
            adds = to is not out
            launches[form + order] = host.wgrad_launch("up_proj_wgrad", of.x, of.h, to, of.plan, H200, adds, sums)
    return launches


def named(names: Iterable[str]) -> list[Any]:
    """Each; of the weight gradients' forms all but the one that has them all are thorough."""
    of_all = "up_proj_wgrad, sums, added, column-major"
    are_plain = {name: "wgrad" not in name or name in ("up_proj_wgrad", of_all) for name in names}
    return [pytest.param(name, marks=() if plain else pytest.mark.thorough) for name, plain in are_plain.items()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize("name", named(all_launches(torch.bfloat16)))
def test_kernel(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    launch = all_launches(dtype)[name]
    compiled = compile_launch(launch, 90)
    ptx = str(compiled.asm["ptx"])
    kernel = name.partition(",")[0]
    assert f"wgmma.mma_async.sync.aligned.m64n{launch.constants['BN']}k16" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert ("cp.reduce.async.bulk.tensor.3d.global" in ptx) == ("added" in name)
    assert ("cp.async.cg.shared.global" in ptx) == (kernel in GATHERED), "gathers by 16 bytes, and nothing else does"
    if "wgrad" in name:
        assert bytes_of_copies(ptx) == {16}
        assert set(re.findall(r"\bst\.global\S*", ptx)) == ({"st.global.v2.b32"} if "sums" in name else set())
    assert compiled.metadata.shared <= H200.shared_bytes
    assert count_spill_loads(compiled, tmp_path) <= SPILLS.get(kernel, 0)
    assert_threads_meet_before_tma_stores(ptx)
    if launch.kernel is not gemm_stationary_kernel:  # whose consumers decode their tiles themselves
        assert_threads_meet_after_tile_info(ptx)


@pytest.mark.parametrize("kernel", OF_ROWS)
@pytest.mark.parametrize("d", [1000, pytest.param(64, marks=pytest.mark.thorough)])
def test_row_gemms_of_either_stride_order(kernel: Kernel, d: int, tmp_path: Path) -> None:
    """The first weight is contiguous in the other dimension than the second."""
    of = make_operands(widths=(d, 456))
    assert tile_of(kernel, 456).block_m == 192
    for weight in (of.w2.transpose(1, 2).contiguous(), of.w2.transpose(1, 2)):
        launch, _ = host.rows_launch(kernel, of.a, weight, None, of.plan, of.tall_tiles, H200)
        assert count_spill_loads(compile_launch(launch, 90), tmp_path) == 0


def stationary_launch(kernel: Kernel, n: int, bias: bool, transposed: bool) -> Launch:
    """Of a contraction of n; transposed: of the other stride order."""
    of = make_operands(widths=(1000, n), bias=bias)
    weight = of.w2.transpose(1, 2)
    weight = weight.contiguous() if transposed else weight
    launch, _ = host.rows_launch(kernel, of.a, weight, of.b2, of.plan, of.tall_tiles, H200)
    assert launch.kernel is gemm_stationary_kernel
    return launch


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("n", [200, *(pytest.param(n, marks=pytest.mark.thorough) for n in (64, 256))])
def test_stationary_weight(n: int, bias: bool, transposed: bool, tmp_path: Path) -> None:
    """All loads are TMA's, the weight's, of (expert, part, k, column) in either order, and the rows'."""
    compiled = compile_launch(stationary_launch("down_proj", n, bias, transposed), 90)
    ptx = str(compiled.asm["ptx"])
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
    for dimensions in (2, 4):
        assert re.search(rf"cp\.async\.bulk\.tensor\.{dimensions}d\.shared::\w+\.global", ptx), dimensions
    assert "cp.async.c" not in ptx
    assert count_loads_of_two_bytes(ptx) <= (4 if bias else 0), "two columns of the bias for each thread of a consumer"
    assert compiled.metadata.shared <= H200.shared_bytes
    assert count_spill_loads(compiled, tmp_path) == 0
    assert_threads_meet_before_tma_stores(ptx)


def test_loops_over_work_items_carry_the_number_of_blocks() -> None:
    compiled = compile_launch(stationary_launch("down_proj", 256, False, False), 90)
    assert_items_carry_their_blocks(compiled, warp_groups=3)


def test_tiles_are_as_tall_as_the_kernels_have_blocks() -> None:
    for kernel in KERNELS:
        blocks = BLOCKS if kernel in OF_ROWS else CONSUMERS
        assert TILES[kernel].block_m == WARPGROUP_M * blocks, kernel
    for kernel in ("up_proj_act", "down_proj_dgrad_dact"):
        assert TILES[kernel].block_m == tile_rows(2, H200), "it shares the portable kernels' list"


def test_registers_of_three_warpgroups_fit() -> None:
    for tile in (*TILES.values(), STATIONARY):
        assert 256 * tile.consumer_registers + 128 * tile.producer_registers <= 65536, tile
        assert tile.consumer_registers % 8 == 0, tile
        assert tile.producer_registers % 8 == 0, tile


def test_only_short_contractions_of_contiguous_rows_keep_a_weight() -> None:
    for kernel in KERNELS:
        assert tile_of(kernel, 256) is (STATIONARY if kernel in OF_ROWS else TILES[kernel]), kernel
        assert tile_of(kernel, 257) is TILES[kernel], kernel
    assert STATIONARY.block_m % WARPGROUP_M == 0


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
