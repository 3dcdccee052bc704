"""B1: the gradient of the down projection, of the activation and of the scores in one kernel.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · BN columns of a tile

The tile of da' leaves a consumer in four slices of 64 columns. h comes by TMA, gate and up of a slice in one load: the
first two slices while the tile is multiplied, the others as soon as the gradients that take their place have left.
The scores are read before the products: afterwards, two loads that depend on each other would be waited for.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilemoe.kernels.hopper.gemm_rows import gather_rows
from tilemoe.kernels.hopper.names import load_tile, store_tile
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
)
from tilemoe.kernels.triton.activations import gated_grad

PAIRS = gl.constexpr(2)  # buffers for gate and up of a slice that a consumer has


@gluon.jit
def load_gate_up(h, row, col, arrived, pair):
    """Start loading a slice of gate and up; ``arrived`` opens when they are there."""
    mbarrier.expect(arrived, h.block_type.nbytes)
    load_tile(h, [0, row, col], arrived, pair)


@gluon.jit
def finish_slice(
    da, score, h, dh, a_scaled, end, row, col, limit, alpha, arrived, pair, a_buffer,
    INDEX: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Slice INDEX of da' (GROUP_M, SLICE), its first column ``col``: (GROUP_M) of <da', a>."""
    both = pair.reshape([2 * GROUP_M, SLICE])
    gate_buffer, up_buffer = both.slice(0, GROUP_M), both.slice(GROUP_M, GROUP_M)
    mbarrier.wait(arrived, INDEX // PAIRS)
    gate = gate_buffer.load(da.type.layout).to(gl.float32)
    up = up_buffer.load(da.type.layout).to(gl.float32)
    a, dgate, dup = gated_grad(gate, up, da * score[:, None], limit, alpha, ACTIVATION, False)
    if INDEX > 0:
        tma.store_wait(1)  # the slice before stored a_scaled first
    up_buffer.store(dup.to(dh.dtype))
    # Columns past n add nothing: there the weight, and so da', is zero. Between these two stores, this spills least.
    ds = gl.sum(da * a, axis=1)
    gate_buffer.store(dgate.to(dh.dtype))
    # Last: between the fence and the first TMA store, the compiler lets the threads meet only if that one's buffer was
    # written since they last met.
    a_buffer.store((a * score[:, None]).to(dh.dtype))
    last = RAGGED_ROWS - end + row
    fence_async_shared()
    store_tile(a_scaled, [RAGGED_ROWS, end, last, col], a_buffer.reshape(a_scaled.block_shape))
    store_tile(dh, [RAGGED_ROWS, end, 0, last, col], pair.reshape(dh.block_shape))
    if INDEX < PAIRS:
        tma.store_wait(0)
        load_gate_up(h, row, col + PAIRS * SLICE, arrived, pair)
    return ds


@gluon.jit
def finish_act_grad(
    h, dh, a_scaled, s, pair_of_row, partial, capacity, tiles, num_tiles, d, n, limit, alpha, ring, pairs, a_buffers,
    arrived, GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Consumer of B1."""
    column_tiles = gl.cdiv(n, BN)
    total = gl.load(num_tiles) * column_tiles
    steps = gl.cdiv(d, BK)
    step = 0
    first_arrived, second_arrived = arrived.index(PAIRS * GROUP), arrived.index(PAIRS * GROUP + 1)
    first, second = pairs.index(PAIRS * GROUP), pairs.index(PAIRS * GROUP + 1)
    a_buffer = a_buffers.index(GROUP)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    _expert, row, end, col = row_tile(gl.program_id(0), total, column_tiles, tiles, BN)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _next_expert, next_row, next_end, next_col = row_tile(
            index + gl.num_programs(0), total, column_tiles, tiles, BN
        )
        row += GROUP * GROUP_M
        if row < end:
            rows = row + gl.arange(0, GROUP_M, gl.SliceLayout(1, layout))
            score = gl.load(s + gl.load(pair_of_row + gl.minimum(rows, end - 1))).to(gl.float32)
            tma.store_wait(0)
            load_gate_up(h, row, col, first_arrived, first)
            load_gate_up(h, row, col + SLICE, second_arrived, second)
            acc, step = multiply(ring, step, steps, GROUP, BN, True, RIGHT_BY_N)
            left_half, right_half = halves(acc, GROUP_M, BN)
            da0, da1 = halves(left_half, GROUP_M, BN // 2)
            da2, da3 = halves(right_half, GROUP_M, BN // 2)
            of_slice: gl.constexpr = gl.SliceLayout(1, da0.type.layout)
            score = gl.convert_layout(score, of_slice)
            ds = finish_slice(
                da0, score, h, dh, a_scaled, end, row, col, limit, alpha, first_arrived, first, a_buffer, 0, ACTIVATION
            )
            ds += finish_slice(
                da1, score, h, dh, a_scaled, end, row, col + SLICE, limit, alpha, second_arrived, second, a_buffer, 1,
                ACTIVATION,
            )  # fmt: skip
            ds += finish_slice(
                da2, score, h, dh, a_scaled, end, row, col + 2 * SLICE, limit, alpha, first_arrived, first, a_buffer, 2,
                ACTIVATION,
            )  # fmt: skip
            ds += finish_slice(
                da3, score, h, dh, a_scaled, end, row, col + 3 * SLICE, limit, alpha, second_arrived, second, a_buffer,
                3, ACTIVATION,
            )  # fmt: skip
            rows = row + gl.arange(0, GROUP_M, of_slice)
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
    """``da' = do w2``, do (T, d) gathered, weight (E, d, n); h and dh (2, R_max, n), a_scaled (R_max, n).

    partial (column tiles, R_max) fp32: <da', a> over the columns of a tile.
    """
    dtype: gl.constexpr = do.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, BK], swizzled)
    right = gl.allocate_shared_memory(dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    pairs = gl.allocate_shared_memory(dtype, [PAIRS * GROUPS] + h.block_shape, h.layout)  # noqa: RUF005
    a_buffers = gl.allocate_shared_memory(dtype, [GROUPS, GROUP_M, SLICE], swizzled)
    arrived = new_barriers(PAIRS * GROUPS, 1)
    ring = (left, right, new_barriers(STAGES, 2), new_barriers(STAGES, GROUPS))
    tiles = (expert_of_tile, row_of_tile, row_start_of_expert)
    gl.warp_specialize(
        [
            (finish_act_grad, (h, dh, a_scaled, s, pair_of_row, partial, capacity, tiles, num_tiles, d, n, limit, alpha,
                               ring, pairs, a_buffers, arrived, 0, BN, RIGHT_BY_N, ACTIVATION)),
            (finish_act_grad, (h, dh, a_scaled, s, pair_of_row, partial, capacity, tiles, num_tiles, d, n, limit, alpha,
                               ring, pairs, a_buffers, arrived, 1, BN, RIGHT_BY_N, ACTIVATION)),
            (gather_rows, (do, stride_do, token_of_row, weight, tiles, num_tiles, d, n, ring, BN, RIGHT_BY_N, EVEN_K)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
