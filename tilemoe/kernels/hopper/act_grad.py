"""B1: the gradient of the down projection, of the activation and of the scores in one kernel.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · BN columns of a tile

The tile of da' leaves a consumer in four slices of 64 columns, each through a stage of the ring. A slice's h is there,
gate and up, loaded behind the tile's last operands; its gradient takes its place, and a_scaled takes the left
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
    pairs_of,
    pass_by,
    slices_of,
)
from tilemoe.kernels.triton.activations import gated_grad, inner


@gluon.jit
def halves_grad(buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """a of a slice da' (GROUP_M, SLICE).

    buffer (2 * GROUP_M, SLICE): gate's rows and then up's, which their gradients replace.
    """
    gate_buffer, up_buffer = buffer.slice(0, GROUP_M), buffer.slice(GROUP_M, GROUP_M)
    if ACTIVATION == "swiglu_oai":
        # Half the columns after the other half: a clamped gate's masks leave too few registers for all at once.
        HALF: gl.constexpr = SLICE // 2
        left, right = halves(da, GROUP_M, SLICE)
        left_gate, left_up = gate_buffer.slice(0, HALF, 1), up_buffer.slice(0, HALF, 1)
        right_gate, right_up = gate_buffer.slice(HALF, HALF, 1), up_buffer.slice(HALF, HALF, 1)
        left_a = gate_up_grad(left_gate, left_up, left, score, limit, alpha, ACTIVATION)
        right_a = gate_up_grad(right_gate, right_up, right, score, limit, alpha, ACTIVATION)
        a = joined(left_a, right_a, da)
    else:
        a = gate_up_grad(gate_buffer, up_buffer, da, score, limit, alpha, ACTIVATION)
    return a


@gluon.jit
def gate_up_grad(gate_buffer, up_buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """a of the columns da' of a slice, whose gate and up lie in two buffers, and then their gradients."""
    gate = gate_buffer.load(da.type.layout).to(gl.float32)
    up = up_buffer.load(da.type.layout).to(gl.float32)
    scale = gl.convert_layout(score, gl.SliceLayout(1, da.type.layout))
    a, dgate, dup = gated_grad(gate, up, da * scale[:, None], limit, alpha, ACTIVATION, False)
    up_buffer.store(dup.to(up_buffer.dtype))
    gate_buffer.store(dgate.to(gate_buffer.dtype))
    return a


@gluon.jit
def joined(left, right, like):
    """(GROUP_M, SLICE) of its two halves, in the layout of ``like``, of which they are halves: no data moves."""
    return gl.convert_layout(gl.join(left, right).permute([0, 2, 1]).reshape([GROUP_M, SLICE]), like.type.layout)


@gluon.jit
def pairs_grad(left_buffer, right_buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """As `halves_grad`; the buffers (GROUP_M, SLICE) have pairs of gate and up, of the slice's left and right half."""
    left, right = halves(da, GROUP_M, SLICE)
    left_a = half_pairs_grad(left_buffer, left, score, limit, alpha, ACTIVATION)
    right_a = half_pairs_grad(right_buffer, right, score, limit, alpha, ACTIVATION)
    return joined(left_a, right_a, da)


@gluon.jit
def half_pairs_grad(buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """a of da' (GROUP_M, SLICE / 2); in ``buffer`` their gradients replace the pairs of gate and up."""
    both: gl.constexpr = gl.join(da, da).reshape([GROUP_M, SLICE]).type.layout
    gate, up = pairs_of(buffer.load(both), SLICE)
    gate = gl.convert_layout(gate.to(gl.float32), da.type.layout)
    up = gl.convert_layout(up.to(gl.float32), da.type.layout)
    scale = gl.convert_layout(score, gl.SliceLayout(1, da.type.layout))
    a, dgate, dup = gated_grad(gate, up, da * scale[:, None], limit, alpha, ACTIVATION, False)
    buffer.store(gl.join(dgate.to(buffer.dtype), dup.to(buffer.dtype)).reshape([GROUP_M, SLICE]))
    return a


@gluon.jit
def finish_slice(
    da, score, dh, a_scaled, end, row, col, limit, alpha, ring, step, index,
    GROUP: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """(GROUP_M) of <da', a>, for slice ``index`` of da' (GROUP_M, SLICE), whose h lies in stage ``step``.

    Starts storing dh and a_scaled. col: the slice's first column of a.
    """
    left, right, _ready, _empty = ring
    stage = await_full(ring, step)
    BLOCKS: gl.constexpr = 2 if GATE_UP == "interleaved" else 1
    ROWS: gl.constexpr = 2 * GROUP_M if GATE_UP == "concatenated" else GROUP_M
    buffers = blocks_of(right.index(stage), GROUPS * BLOCKS, ROWS)
    buffer, last_buffer = buffers.index(GROUP * BLOCKS), buffers.index(GROUP * BLOCKS + BLOCKS - 1)
    a_buffer = blocks_of(left.index(stage), GROUPS, GROUP_M).index(GROUP)
    if GATE_UP == "concatenated":
        a = halves_grad(buffer, da, score, limit, alpha, ACTIVATION)
    elif GATE_UP == "interleaved":
        a = pairs_grad(buffer, last_buffer, da, score, limit, alpha, ACTIVATION)
    else:
        a, slope = inner(buffer.load(da.type.layout).to(gl.float32), ACTIVATION, False)
        buffer.store((da * score[:, None] * slope).to(dh.dtype))
    # Not before stores: the compiler moves a wait ahead of mere arithmetic, which would then begin late.
    tma.store_wait(0)
    leave_last(ring, step, index > 0)
    # Columns past n add nothing: there the weight, and so da', is zero. At this place the sum spills least.
    ds = gl.sum(da * a, axis=1)
    # Last: between the fence and the first TMA store, the compiler lets the threads meet only if that one's buffer was
    # written since they last met.
    a_buffer.store((a * score[:, None]).to(dh.dtype))
    last = RAGGED_ROWS - end + row
    fence_async_shared()
    store_tile(a_scaled, [RAGGED_ROWS, end, last, col], a_buffer.reshape(a_scaled.block_shape))
    if GATE_UP == "concatenated":
        store_tile(dh, [RAGGED_ROWS, end, 0, last, col], buffer.reshape(dh.block_shape))
    else:
        store_tile(dh, [RAGGED_ROWS, end, last, BLOCKS * col], buffer.reshape(dh.block_shape))
    if GATE_UP == "interleaved":
        store_tile(dh, [RAGGED_ROWS, end, last, BLOCKS * col + SLICE], last_buffer.reshape(dh.block_shape))
    return ds


@gluon.jit
def finish_act_grad(
    dh, a_scaled, s, partial, capacity, d, limit, alpha, ring, notes, pairs,
    GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
    ROLLED: gl.constexpr,
):  # fmt: skip
    """Consumer of B1."""
    steps = gl.cdiv(d, BK)
    step, owes = 0, False
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    expert, row, end, col = next_tile(ring, notes, step)
    while expert >= 0:
        first = row + GROUP * GROUP_M
        if first < end:
            pair = pairs.index(step % pairs.shape[0]).slice(GROUP * GROUP_M, GROUP_M).load(layout)
            score = gl.load(s + pair).to(gl.float32)
            acc, step = multiply(ring, step, steps, owes, GROUP, BN, True, RIGHT_BY_N)
            slices = slices_of(acc, BN)
            of_slice: gl.constexpr = gl.SliceLayout(1, slices[0].type.layout)
            scale = gl.convert_layout(score, of_slice)
            ds = gl.zeros([GROUP_M], gl.float32, of_slice)
            if ROLLED:
                da, next_da, third_da, last_da = slices
                for i in range(BN // SLICE):
                    ds += finish_slice(
                        da, scale, dh, a_scaled, end, first, col + i * SLICE, limit, alpha, ring, step + i, i,
                        GROUP, GATE_UP, ACTIVATION,
                    )  # fmt: skip
                    da, next_da, third_da = next_da, third_da, last_da
            else:
                for i in gl.static_range(BN // SLICE):
                    ds += finish_slice(
                        slices[i], scale, dh, a_scaled, end, first, col + i * SLICE, limit, alpha, ring, step + i, i,
                        GROUP, GATE_UP, ACTIVATION,
                    )  # fmt: skip
            step += BN // SLICE
            owes = True
            column_tile = (col // BN).to(gl.int64)
            stored = first + gl.arange(0, GROUP_M, of_slice)
            gl.store(partial + column_tile * capacity + stored, ds, mask=stored < end)
        else:
            step = pass_by(ring, step, steps + BN // SLICE, owes)
            owes = False
        expert, row, end, col = next_tile(ring, notes, step)
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
    row_start_of_expert,
    capacity,
    d,
    n,
    stride_do,
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    ROLLED: gl.constexpr,
    RIGHT_BY_N: gl.constexpr,
    EVEN_K: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """``da' = do w2``, do (T, d) gathered, weight (E, d, n); h, dh, a_scaled (R_max, n).

    h and dh: (2, R_max, n) of concatenated gate and up, else (R_max, w); GATE_UP is "none" where there is no gate.
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
                               RIGHT_BY_N, GATE_UP, ACTIVATION, ROLLED)),
            (finish_act_grad, (dh, a_scaled, s, partial, capacity, d, limit, alpha, ring, notes, pairs, 1, BN,
                               RIGHT_BY_N, GATE_UP, ACTIVATION, ROLLED)),
            (gather_rows, (do, stride_do, token_of_row, weight, tiles, num_tiles, row_start_of_expert, d, n, ring,
                           notes, mailbox, (h, pair_of_row, pairs), BN, RIGHT_BY_N, EVEN_K, GATE_UP)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
