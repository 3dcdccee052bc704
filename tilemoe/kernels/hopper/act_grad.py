"""B1: the gradient of the down projection, of the activation and of the scores in one kernel.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · BN columns of a tile

The tile of da' leaves a consumer in four slices of 64 columns, each through a stage of the ring. Gate and up of a slice
are there, loaded behind the tile's last operands; their gradients take their place, and a_scaled takes the left
operand's. A consumer leaves such a stage a slice later, when the stores have read it, and a tile's last one beside the
next tile's first product. So hardly anybody waits for h or for a store, and there are no other buffers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilemoe.kernels.hopper.gemm_rows import gather_rows
from tilemoe.kernels.hopper.names import store_tile
from tilemoe.kernels.hopper.pipeline import (
    BK,
    GROUP_M,
    GROUPS,
    RAGGED_ROWS,
    SLICE,
    TILE_M,
    await_full,
    blocks_of,
    halves,
    leave_last,
    multiply,
    new_barriers,
    new_mailbox,
    new_notes,
    next_tile,
    pass_by,
)
from tilemoe.kernels.triton.activations import gated_grad


@gluon.jit
def finish_slice(
    da, score, dh, a_scaled, end, row, col, limit, alpha, ring, step,
    GROUP: gl.constexpr, INDEX: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Slice INDEX of da' (GROUP_M, SLICE), its first column ``col``: (GROUP_M) of <da', a>. It uses stage ``step``."""
    left, right, _ready, _empty = ring
    stage = await_full(ring, step)
    pair = blocks_of(right.index(stage), GROUPS, 2 * GROUP_M).index(GROUP)
    gate_buffer, up_buffer = pair.slice(0, GROUP_M), pair.slice(GROUP_M, GROUP_M)
    a_buffer = blocks_of(left.index(stage), GROUPS, GROUP_M).index(GROUP)
    gate = gate_buffer.load(da.type.layout).to(gl.float32)
    up = up_buffer.load(da.type.layout).to(gl.float32)
    a, dgate, dup = gated_grad(gate, up, da * score[:, None], limit, alpha, ACTIVATION, False)
    up_buffer.store(dup.to(dh.dtype))
    gate_buffer.store(dgate.to(dh.dtype))
    if INDEX > 0:
        # Not before stores: the compiler moves a wait ahead of mere arithmetic, which would then begin late.
        tma.store_wait(0)
        leave_last(ring, step)
    # Columns past n add nothing: there the weight, and so da', is zero. At this place the sum spills least.
    ds = gl.sum(da * a, axis=1)
    # Last: between the fence and the first TMA store, the compiler lets the threads meet only if that one's buffer was
    # written since they last met.
    a_buffer.store((a * score[:, None]).to(dh.dtype))
    last = RAGGED_ROWS - end + row
    fence_async_shared()
    store_tile(a_scaled, [RAGGED_ROWS, end, last, col], a_buffer.reshape(a_scaled.block_shape))
    store_tile(dh, [RAGGED_ROWS, end, 0, last, col], pair.reshape(dh.block_shape))
    return ds


@gluon.jit
def finish_act_grad(
    dh, a_scaled, s, partial, capacity, d, limit, alpha, ring, notes, pairs,
    GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Consumer of B1."""
    steps = gl.cdiv(d, BK)
    step, owes = 0, False
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    exists, row, end, col = next_tile(ring, notes, step)
    while exists > 0:
        first = row + GROUP * GROUP_M
        if first < end:
            pair = pairs.index(step % pairs.shape[0]).slice(GROUP * GROUP_M, GROUP_M).load(layout)
            score = gl.load(s + pair).to(gl.float32)
            acc, step = multiply(ring, step, steps, owes, GROUP, BN, True, RIGHT_BY_N)
            left_half, right_half = halves(acc, GROUP_M, BN)
            da0, da1 = halves(left_half, GROUP_M, BN // 2)
            da2, da3 = halves(right_half, GROUP_M, BN // 2)
            of_slice: gl.constexpr = gl.SliceLayout(1, da0.type.layout)
            scale = gl.convert_layout(score, of_slice)
            ds = finish_slice(da0, scale, dh, a_scaled, end, first, col, limit, alpha, ring, step, GROUP, 0, ACTIVATION)
            ds += finish_slice(
                da1, scale, dh, a_scaled, end, first, col + SLICE, limit, alpha, ring, step + 1, GROUP, 1, ACTIVATION
            )
            ds += finish_slice(
                da2, scale, dh, a_scaled, end, first, col + 2 * SLICE, limit, alpha, ring, step + 2, GROUP, 2,
                ACTIVATION,
            )  # fmt: skip
            ds += finish_slice(
                da3, scale, dh, a_scaled, end, first, col + 3 * SLICE, limit, alpha, ring, step + 3, GROUP, 3,
                ACTIVATION,
            )  # fmt: skip
            step += BN // SLICE
            owes = True
            column_tile = (col // BN).to(gl.int64)
            stored = first + gl.arange(0, GROUP_M, of_slice)
            gl.store(partial + column_tile * capacity + stored, ds, mask=stored < end)
        else:
            step = pass_by(ring, step, steps + BN // SLICE, owes)
            owes = False
        exists, row, end, col = next_tile(ring, notes, step)
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
    end_of_tile,
    num_tiles,
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
    ring = (left, right, new_barriers(STAGES, 2), new_barriers(STAGES, GROUPS))
    notes, mailbox = new_notes(STAGES), new_mailbox()
    pairs = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (finish_act_grad, (dh, a_scaled, s, partial, capacity, d, limit, alpha, ring, notes, pairs, 0, BN,
                               RIGHT_BY_N, ACTIVATION)),
            (finish_act_grad, (dh, a_scaled, s, partial, capacity, d, limit, alpha, ring, notes, pairs, 1, BN,
                               RIGHT_BY_N, ACTIVATION)),
            (gather_rows, (do, stride_do, token_of_row, weight, tiles, num_tiles, d, n, ring, notes, mailbox,
                           (h, pair_of_row, pairs), BN, RIGHT_BY_N, EVEN_K)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
