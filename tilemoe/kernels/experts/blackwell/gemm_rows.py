"""down_proj and up_proj_dgrad: ``out_r = rows_r weight_e (+ bias_e)``.

E experts · R_max static row capacity · BN columns of a tile
width_in, width_out: the GEMM's K and N, of one expert's weight
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilemoe.kernels.experts.blackwell.gluon_compat import tmem_slices
from tilemoe.kernels.experts.blackwell.pipeline import (
    EPILOGUE_N,
    load_slice,
    new_accumulators,
    new_ring,
    new_staging,
    release_accumulator,
    row_mma,
    row_producer,
    store_staged,
    wait_accumulator,
)
from tilemoe.kernels.experts.hopper.pipeline import RAGGED_EXTENT, tile_coords


@gluon.jit
def rows_epilogue(
    out, bias, stride_bias, width_out, tiles, row_tiles, column_tiles, accumulators, staging,
    BN: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """The epilogue warps: add the bias, if any, and store."""
    tile = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, BN, BAND)
        slices = tmem_slices(wait_accumulator(accumulators, tile), EPILOGUE_N)
        for i in range(BN // EPILOGUE_N):
            column = col + i * EPILOGUE_N
            value = load_slice(slices, i, bias, expert, stride_bias, column, width_out)
            store_staged(out, [RAGGED_EXTENT, end, RAGGED_EXTENT - end + row, column], value, staging, i)
        release_accumulator(accumulators, tile)
        tile += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def gemm_rows_kernel(
    rows,
    weight,
    bias,
    out,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    width_in,
    width_out,
    stride_bias,
    B_K_MAJOR: gl.constexpr,
    BAND: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """rows (R_max, width_in), weight (E, 1, width_in, width_out), bias (E, width_out), out (R_max, width_out)."""
    column_tiles = gl.cdiv(width_out, BN)
    ring = new_ring(weight, weight.dtype, STAGES, "rows")
    accumulators, staging = new_accumulators(BN), new_staging(weight.dtype)
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    row_tiles = gl.load(num_tiles)
    fence_async_shared()  # a thread has initialised the barriers, at which TMA and tcgen05 arrive
    gl.warp_specialize(
        [
            (rows_epilogue, (out, bias, stride_bias, width_out, tiles, row_tiles, column_tiles, accumulators, staging,
                             BN, BAND)),
            (row_producer, (rows, width_in, None, weight, tiles, row_tiles, width_in, width_out, ring, BN, B_K_MAJOR,
                            BAND, "rows")),
            (row_mma, (row_tiles, column_tiles, width_in, ring, accumulators, BN, B_K_MAJOR)),
        ],
        [1, 1],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
