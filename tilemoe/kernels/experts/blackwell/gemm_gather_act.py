"""up_proj fused with the activation: ``h = x w1^T + b1, a = act(h)``, with x gathered by token.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
BN columns of a tile

Layouts of the weight, of a tile's columns and of h are those of `hopper.gemm_gather_act`; the roles are those of
`pipeline`. The epilogue computes a in slices of 64 columns, each from one or two of the accumulator's slices of h.
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
from tilemoe.kernels.experts.hopper.gemm_gather_act import pairs_value, ungated_value
from tilemoe.kernels.experts.hopper.pipeline import RAGGED_EXTENT, fence_and_store, tile_coords
from tilemoe.kernels.experts.triton.activations import gated_value

HALF = gl.constexpr(EPILOGUE_N.value // 2)


@gluon.jit
def store_pairs(descriptor, place, first, second, limit, alpha, staging, count, ACTIVATION: gl.constexpr):
    """`store_staged` for a slice of a, computed from two slices of interleaved gate and up."""
    tma.store_wait(1)
    buffer = staging.index(count % 2)
    for i in gl.static_range(2):
        value = pairs_value(first if i == 0 else second, limit, alpha, ACTIVATION)
        buffer.slice(i * HALF, HALF, 1).store(value.to(descriptor.dtype))
    fence_and_store(descriptor, place, buffer)


@gluon.jit
def load_h(
    slices, i, PART: gl.constexpr, bias, expert, stride_bias, col, n,
    BN: gl.constexpr, B_K_MAJOR: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """The first (PART 0) or second slice of h, with the bias, from which a tile's ``i``-th slice of a is computed."""
    if GATE_UP == "none":
        index, column = i, col + i * EPILOGUE_N
    elif GATE_UP == "interleaved":
        index, column = 2 * i + PART, col + (2 * i + PART) * EPILOGUE_N
    else:
        index = PART * (BN // EPILOGUE_N // 2) + i if B_K_MAJOR else 2 * i + PART
        column = PART * n + col + i * EPILOGUE_N
    return load_slice(slices, index, bias, expert, stride_bias, column, n if GATE_UP == "none" else 2 * n)


@gluon.jit
def act_slice(
    slices, i, a, h, bias, stride_bias, expert, row, end, col, n, limit, alpha, staging,
    BN: gl.constexpr, B_K_MAJOR: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, KEEP_H: gl.constexpr,
):  # fmt: skip
    """The epilogue of a tile's ``i``-th slice of a: add the bias, store h (if KEEP_H) and act(h)."""
    first = load_h(slices, i, 0, bias, expert, stride_bias, col, n, BN, B_K_MAJOR, GATE_UP)
    if GATE_UP != "none":
        second = load_h(slices, i, 1, bias, expert, stride_bias, col, n, BN, B_K_MAJOR, GATE_UP)
    last = RAGGED_EXTENT - end + row
    column = col + (2 * i if GATE_UP == "interleaved" else i) * EPILOGUE_N
    H_STORES: gl.constexpr = 0 if not KEEP_H else 1 if GATE_UP == "none" else 2
    count = (H_STORES + 1) * i
    if KEEP_H:
        if GATE_UP == "concatenated":
            store_staged(h, [RAGGED_EXTENT, end, last, 0, column], first, staging, count)
            store_staged(h, [RAGGED_EXTENT, end, last, 1, column], second, staging, count + 1)
        else:
            store_staged(h, [RAGGED_EXTENT, end, last, column], first, staging, count)
        if GATE_UP == "interleaved":
            store_staged(h, [RAGGED_EXTENT, end, last, column + EPILOGUE_N], second, staging, count + 1)
    if GATE_UP == "interleaved":
        place = [RAGGED_EXTENT, end, last, column // 2]
        store_pairs(a, place, first, second, limit, alpha, staging, count + H_STORES, ACTIVATION)
    else:
        if GATE_UP == "none":
            value = ungated_value(first, ACTIVATION)
        else:
            value = gated_value(first, second, limit, alpha, ACTIVATION, False)
        store_staged(a, [RAGGED_EXTENT, end, last, column], value, staging, count + H_STORES)


@gluon.jit
def act_epilogue(
    a, h, bias, stride_bias, n, limit, alpha, tiles, row_tiles, column_tiles, accumulators, staging,
    BN: gl.constexpr, COLUMNS: gl.constexpr, B_K_MAJOR: gl.constexpr, BAND: gl.constexpr, GATE_UP: gl.constexpr,
    ACTIVATION: gl.constexpr, KEEP_H: gl.constexpr,
):  # fmt: skip
    """The epilogue warps of up_proj."""
    SLICES: gl.constexpr = BN // EPILOGUE_N if GATE_UP == "none" else BN // EPILOGUE_N // 2  # slices of a
    tile = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, COLUMNS, BAND)
        slices = tmem_slices(wait_accumulator(accumulators, tile), EPILOGUE_N)
        for i in range(SLICES):
            act_slice(
                slices, i, a, h, bias, stride_bias, expert, row, end, col, n, limit, alpha, staging,
                BN, B_K_MAJOR, GATE_UP, ACTIVATION, KEEP_H,
            )  # fmt: skip
        release_accumulator(accumulators, tile)
        tile += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def up_proj_act_kernel(
    x,
    weight,
    bias,
    a,
    h,
    token_of_row,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    d,
    n,
    stride_x,
    stride_bias,
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    BAND: gl.constexpr,
    KEEP_H: gl.constexpr,
    ACCESS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """up_proj: ``h = x w1^T + b1``, ``a = act(h)``; x (T, d) gathered, bias (E, w), a (R_max, n); KEEP_H: h is written.

    For GATE_UP and the shapes that depend on it, see `hopper.gemm_gather_act.up_proj_act_kernel`.
    """
    COLUMNS: gl.constexpr = BN // 2 if GATE_UP == "concatenated" else BN
    width_out = 2 * n if GATE_UP == "interleaved" else n
    column_tiles = gl.cdiv(width_out, COLUMNS)
    ring = new_ring(weight, weight.dtype, STAGES, ACCESS)
    accumulators, staging = new_accumulators(BN), new_staging(weight.dtype)
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    row_tiles = gl.load(num_tiles)
    fence_async_shared()  # a thread has initialised the barriers, at which TMA and tcgen05 arrive
    gl.warp_specialize(
        [
            (act_epilogue, (a, h, bias, stride_bias, n, limit, alpha, tiles, row_tiles, column_tiles, accumulators,
                            staging, BN, COLUMNS, B_K_MAJOR, BAND, GATE_UP, ACTIVATION, KEEP_H)),
            (row_producer, (x, stride_x, token_of_row, weight, tiles, row_tiles, d, width_out, ring, COLUMNS,
                            B_K_MAJOR, BAND, ACCESS)),
            (row_mma, (row_tiles, column_tiles, d, ring, accumulators, BN, B_K_MAJOR)),
        ],
        [4, 1],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
