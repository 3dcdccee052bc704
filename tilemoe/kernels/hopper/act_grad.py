"""B1: the gradient of the down projection, of the activation and of the scores in one kernel.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · BN columns of a tile

The tile of da' leaves a consumer in four slices of 64 columns. h comes by TMA: the first two slices while the tile is
multiplied, the others as soon as the gradients that take their buffers' place have left.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilemoe.kernels.hopper.gemm_rows import gather_rows
from tilemoe.kernels.hopper.names import load_tile
from tilemoe.kernels.hopper.pipeline import (
    BK,
    GROUP_M,
    GROUPS,
    RAGGED_ROWS,
    SLICE,
    TILE_M,
    halves,
    multiply,
    new_barriers,
    pass_by,
    row_tile,
    start_store,
    store_slice,
)
from tilemoe.kernels.triton.activations import gated_grad

# Slices of shared memory that a consumer has: gate and up of two slices, then a_scaled.
BUFFERS = gl.constexpr(5)


@gluon.jit
def load_gate_up(h, row, col, arrived, gate_buffer, up_buffer):
    """Start loading a slice of gate and of up; ``arrived`` opens when they are there."""
    mbarrier.expect(arrived, 2 * h.block_type.nbytes)
    gate = gate_buffer.reshape(h.block_shape)
    load_tile(h, [row, 0, col], arrived, gate)
    up = up_buffer.reshape(h.block_shape)
    load_tile(h, [row, 1, col], arrived, up)


@gluon.jit
def finish_slice(
    da, score, h, dh, a_scaled, end, row, col, limit, alpha, arrived, gate_buffer, up_buffer, a_buffer,
    INDEX: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Slice INDEX of da' (GROUP_M, SLICE), its first column ``col``: (GROUP_M) of <da', a>."""
    mbarrier.wait(arrived, INDEX // 2)
    gate = gate_buffer.load(da.type.layout).to(gl.float32)
    up = up_buffer.load(da.type.layout).to(gl.float32)
    a, dgate, dup = gated_grad(gate, up, da * score[:, None], limit, alpha, ACTIVATION, False)
    # Columns past n add nothing: there the weight, and so da', is zero.
    ds = gl.sum(da * a, axis=1)
    last = RAGGED_ROWS - end + row
    if INDEX > 0:
        tma.store_wait(2)  # the slice before stored a_scaled first
    store_slice(a_scaled, [RAGGED_ROWS, end, last, col], a * score[:, None], a_buffer)
    gate_buffer.store(dgate.to(dh.dtype))
    up_buffer.store(dup.to(dh.dtype))
    start_store(dh, [RAGGED_ROWS, end, last, 0, col], gate_buffer)
    start_store(dh, [RAGGED_ROWS, end, last, 1, col], up_buffer)
    if INDEX < 2:
        tma.store_wait(0)
        load_gate_up(h, row, col + 2 * SLICE, arrived, gate_buffer, up_buffer)
    return ds


@gluon.jit
def finish_act_grad(
    h, dh, a_scaled, s, pair_of_row, partial, capacity, tiles, num_tiles, d, n, limit, alpha, ring, staging, arrived,
    GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Consumer of B1."""
    column_tiles = gl.cdiv(n, BN)
    total = gl.load(num_tiles) * column_tiles
    steps = gl.cdiv(d, BK)
    step = 0
    first_arrived, second_arrived = arrived.index(2 * GROUP), arrived.index(2 * GROUP + 1)
    base: gl.constexpr = BUFFERS * GROUP
    first_gate, first_up = staging.index(base), staging.index(base + 1)
    second_gate, second_up = staging.index(base + 2), staging.index(base + 3)
    a_buffer = staging.index(base + 4)
    _expert, row, end, col = row_tile(gl.program_id(0), total, column_tiles, tiles, BN)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _next_expert, next_row, next_end, next_col = row_tile(
            index + gl.num_programs(0), total, column_tiles, tiles, BN
        )
        row += GROUP * GROUP_M
        if row < end:
            tma.store_wait(0)
            load_gate_up(h, row, col, first_arrived, first_gate, first_up)
            load_gate_up(h, row, col + SLICE, second_arrived, second_gate, second_up)
            acc, step = multiply(ring, step, steps, GROUP, BN, True, RIGHT_BY_N)
            left_half, right_half = halves(acc, GROUP_M, BN)
            da0, da1 = halves(left_half, GROUP_M, BN // 2)
            da2, da3 = halves(right_half, GROUP_M, BN // 2)
            rows = row + gl.arange(0, GROUP_M, gl.SliceLayout(1, da0.type.layout))
            score = gl.load(s + gl.load(pair_of_row + gl.minimum(rows, end - 1))).to(gl.float32)
            ds = finish_slice(
                da0, score, h, dh, a_scaled, end, row, col, limit, alpha, first_arrived, first_gate, first_up,
                a_buffer, 0, ACTIVATION,
            )  # fmt: skip
            ds += finish_slice(
                da1, score, h, dh, a_scaled, end, row, col + SLICE, limit, alpha, second_arrived, second_gate,
                second_up, a_buffer, 1, ACTIVATION,
            )  # fmt: skip
            ds += finish_slice(
                da2, score, h, dh, a_scaled, end, row, col + 2 * SLICE, limit, alpha, first_arrived, first_gate,
                first_up, a_buffer, 2, ACTIVATION,
            )  # fmt: skip
            ds += finish_slice(
                da3, score, h, dh, a_scaled, end, row, col + 3 * SLICE, limit, alpha, second_arrived, second_gate,
                second_up, a_buffer, 3, ACTIVATION,
            )  # fmt: skip
            column_tile = (index % column_tiles).to(gl.int64)
            gl.store(partial + column_tile * capacity + rows, ds, mask=rows < end)
        else:
            step = pass_by(ring, step, steps)
        row, end, col = next_row, next_end, next_col
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity"])
def act_grad_kernel(
    do,
    weight,
    h,
    dh,
    a_scaled,
    s,
    partial,
    token_of_row,
    pair_of_row,
    expert_of_tile,
    row_of_tile,
    num_tiles,
    row_start_of_expert,
    capacity,
    d,
    n,
    stride_do,
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    RIGHT_BY_N: gl.constexpr,
    EVEN_K: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """``da' = do w2``, do (T, d) gathered, weight (E, d, n); h and dh (R_max, 2, n), a_scaled (R_max, n).

    partial (column tiles, R_max) fp32: <da', a> over the columns of a tile.
    """
    dtype: gl.constexpr = do.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, BK], swizzled)
    right = gl.allocate_shared_memory(dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(dtype, [BUFFERS * GROUPS, GROUP_M, SLICE], swizzled)
    arrived = new_barriers(2 * GROUPS, 1)
    ring = (left, right, new_barriers(STAGES, 2), new_barriers(STAGES, GROUPS))
    tiles = (expert_of_tile, row_of_tile, row_start_of_expert)
    gl.warp_specialize(
        [
            (finish_act_grad, (h, dh, a_scaled, s, pair_of_row, partial, capacity, tiles, num_tiles, d, n, limit, alpha,
                               ring, staging, arrived, 0, BN, RIGHT_BY_N, ACTIVATION)),
            (finish_act_grad, (h, dh, a_scaled, s, pair_of_row, partial, capacity, tiles, num_tiles, d, n, limit, alpha,
                               ring, staging, arrived, 1, BN, RIGHT_BY_N, ACTIVATION)),
            (gather_rows, (do, stride_do, token_of_row, weight, tiles, num_tiles, d, n, ring, BN, RIGHT_BY_N, EVEN_K)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
