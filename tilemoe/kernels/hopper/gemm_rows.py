"""F1, and the producer of F1 and B1: rows gathered by token (cp.async), times each expert's weight.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · parts = 2 where gate and up are two
halves of one tile, else 1 · BN columns of a tile

Weights are descriptors of (E, parts, out, in) or (E, in, parts, out), whichever is contiguous: RIGHT_BY_N says the
former. Outputs are ragged descriptors, so that a store at an expert's end writes its own rows only.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilemoe.kernels.hopper.names import copy_rows, load_tile
from tilemoe.kernels.hopper.pipeline import (
    BK,
    EACH,
    GROUP_M,
    GROUPS,
    RAGGED_ROWS,
    SLICE,
    TILE_M,
    acquire,
    announce,
    ask_for_tile,
    blocks_of,
    entries,
    halves,
    multiply,
    new_barriers,
    new_mailbox,
    new_notes,
    next_tile,
    pass_by,
    publish_copies,
    publish_last_copies,
    publish_nothing,
    row_tile,
    store_slice,
    take_tile,
)
from tilemoe.kernels.triton.activations import gated_value

# 64 x 64 of a 16-bit type over 128 threads, 16 bytes each at a time.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def load_weight(weight, expert, k, col, ring, stage, RIGHT_BY_N: gl.constexpr):
    """Start the TMA load of one step's weight; its bytes count towards ``ready``."""
    _left, right, ready, _empty = ring
    if RIGHT_BY_N:
        load_tile(weight, [expert, 0, col, k], ready.index(stage), right.index(stage))
    else:
        load_tile(weight, [expert, k, 0, col], ready.index(stage), right.index(stage))


@gluon.jit
def gathered_steps(
    ring, step, upper, lower, weight, expert, col, k_from, k_to, width_in,
    RIGHT_BY_N: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """Fill stages with columns ``k_from`` to ``k_to`` of the rows at the pointers ``upper`` and ``lower`` (64, BK).

    The next step's number, and the pointers moved on: to carry them spares the sum of row and column in each step.
    """
    left, _right, ready, _empty = ring
    columns = gl.arange(0, BK, gl.SliceLayout(0, COPY))
    for k in range(k_from, k_to, BK):
        stage = acquire(ring, step)
        mbarrier.expect(ready.index(stage), weight.block_type.nbytes)
        load_weight(weight, expert, k, col, ring, stage, RIGHT_BY_N)
        buffer = left.index(stage)
        if EVEN_K:
            copy_rows(buffer.slice(0, GROUP_M), upper)
            copy_rows(buffer.slice(GROUP_M, GROUP_M), lower)
        else:
            inside = (k + columns < width_in)[None, :]
            copy_rows(buffer.slice(0, GROUP_M), upper, mask=inside)
            copy_rows(buffer.slice(GROUP_M, GROUP_M), lower, mask=inside)
        publish_copies(ring, step)
        step += 1
        upper, lower = upper + BK, lower + BK
    return step, upper, lower


@gluon.jit
def load_gate_up(ring, step, h, row, col, BN: gl.constexpr):
    """Fill stages with a tile's gate and up, a slice each: one consumer's after the other's where the weight was.

    h: descriptor of (2, R_max, n), blocks of (2, GROUP_M, SLICE).
    """
    _left, right, ready, _empty = ring
    for i in gl.static_range(BN // SLICE):
        stage = acquire(ring, step)
        mbarrier.expect(ready.index(stage), GROUPS * h.block_type.nbytes)
        pairs = blocks_of(right.index(stage), GROUPS, 2 * GROUP_M)
        for group in gl.static_range(GROUPS):
            place = [0, row + group * GROUP_M, col + i * SLICE]
            load_tile(h, place, ready.index(stage), pairs.index(group).reshape(h.block_shape))
        publish_copies(ring, step)
        step += 1
    return step


@gluon.jit
def gather_rows(
    source, stride_source, token_of_row, weight, tiles, num_tiles, width_in, width_out, ring, notes, mailbox, extra,
    BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """Producer: rows of ``source`` (T, width_in) by token, and the weight's tiles.

    Announces (1, first row, its expert's end, first column) of each tile, and zeros when there is no other.

    extra: None, or B1's (h, pair_of_row, pairs): then h follows, and the rows' pairs go to pairs (S, TILE_M).
    """
    # The compiler is told that they are multiples of 8, whence 16-byte copies.
    width_in, stride_source = width_in // 8 * 8, stride_source // 8 * 8
    column_tiles = gl.cdiv(width_out, BN)
    total = gl.load(num_tiles) * column_tiles
    rows = gl.arange(0, GROUP_M, gl.SliceLayout(1, COPY))
    columns = gl.arange(0, BK, gl.SliceLayout(0, COPY))
    # Columns that are filled before the next tile's tokens are asked for; the others, or h, hide what that takes.
    before = width_in // BK // 2 * BK if extra is None else width_in
    step = 0
    index = gl.program_id(0)
    next_index = index + gl.num_programs(0)
    expert, row, end, col = row_tile(index, total, column_tiles, tiles, BN)
    upper_token = gl.load(entries(token_of_row, row, end, rows))
    lower_token = gl.load(entries(token_of_row, row + GROUP_M, end, rows))
    while index < total:
        next_expert, next_row, next_end, next_col = row_tile(next_index, total, column_tiles, tiles, BN)
        upper = source + (upper_token.to(gl.int64) * stride_source)[:, None] + columns[None, :]
        lower = source + (lower_token.to(gl.int64) * stride_source)[:, None] + columns[None, :]
        answer = ask_for_tile(num_tiles, next_index < total)
        stage = acquire(ring, step)
        announce(notes, stage, 1, row, end, col)
        if extra is not None:
            h, pair_of_row, pairs = extra
            copy_rows(pairs.index(stage), entries(pair_of_row, row, end, gl.arange(0, TILE_M, EACH)))
        step, upper, lower = gathered_steps(
            ring, step, upper, lower, weight, expert, col, 0, before, width_in, RIGHT_BY_N, EVEN_K
        )
        # Late enough to know the next tile's rows, early enough to have arrived.
        upper_token = gl.load(entries(token_of_row, next_row, next_end, rows))
        lower_token = gl.load(entries(token_of_row, next_row + GROUP_M, next_end, rows))
        index, next_index = next_index, take_tile(answer, mailbox, num_tiles, total, next_index < total)
        if extra is None:
            step, upper, lower = gathered_steps(
                ring, step, upper, lower, weight, expert, col, before, width_in, width_in, RIGHT_BY_N, EVEN_K
            )
        else:
            step = load_gate_up(ring, step, h, row, col, BN)
        expert, row, end, col = next_expert, next_row, next_end, next_col
    announce(notes, acquire(ring, step), 0, 0, 0, 0)
    publish_nothing(ring, step)
    publish_last_copies(ring, step + 1)


@gluon.jit
def finish_act(
    a, h, d, limit, alpha, ring, notes, staging,
    GROUP: gl.constexpr, BN: gl.constexpr, ACTIVATION: gl.constexpr, KEEP_H: gl.constexpr,
):  # fmt: skip
    """Consumer of F1: stores gate and up, BN/2 columns each of the tile, as h, and the activation."""
    WIDTH: gl.constexpr = BN // 2
    steps = gl.cdiv(d, BK)
    step = 0
    exists, row, end, col = next_tile(ring, notes, step)
    while exists > 0:
        row += GROUP * GROUP_M
        if row < end:
            acc, step = multiply(ring, step, steps, False, GROUP, BN, True, True)
            last = RAGGED_ROWS - end + row
            gate, up = halves(acc, GROUP_M, BN)
            if KEEP_H:
                for part in gl.static_range(2):
                    first, second = halves(gate if part == 0 else up, GROUP_M, WIDTH)
                    for j in gl.static_range(2):
                        tma.store_wait(1)
                        place = [RAGGED_ROWS, end, last, part, col + j * SLICE]
                        store_slice(h, place, first if j == 0 else second, staging.index(2 * GROUP + j))
            first, second = halves(gated_value(gate, up, limit, alpha, ACTIVATION, False), GROUP_M, WIDTH)
            for j in gl.static_range(2):
                tma.store_wait(1)
                place = [RAGGED_ROWS, end, last, col + j * SLICE]
                store_slice(a, place, first if j == 0 else second, staging.index(2 * GROUP + j))
        else:
            step = pass_by(ring, step, steps, False)
        exists, row, end, col = next_tile(ring, notes, step)
    tma.store_wait(0)


@gluon.jit
def up_proj_act_kernel(
    x,
    weight,
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
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    KEEP_H: gl.constexpr,
    EVEN_K: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """F1: ``h = x w1^T``, ``a = act(h)``; x (T, d) gathered, weight (E, 2, n, d), h (R_max, 2, n), a (R_max, n).

    A tile holds BN/2 columns of gate and the same ones of up. h is not written unless KEEP_H.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, BK], swizzled)
    right = gl.allocate_shared_memory(dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(dtype, [2 * GROUPS, GROUP_M, SLICE], swizzled)
    ring = (left, right, new_barriers(STAGES, 2), new_barriers(STAGES, GROUPS))
    notes, mailbox = new_notes(STAGES), new_mailbox()
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (finish_act, (a, h, d, limit, alpha, ring, notes, staging, 0, BN, ACTIVATION, KEEP_H)),
            (finish_act, (a, h, d, limit, alpha, ring, notes, staging, 1, BN, ACTIVATION, KEEP_H)),
            (gather_rows, (x, stride_x, token_of_row, weight, tiles, num_tiles, d, n, ring, notes, mailbox, None,
                           BN // 2, True, EVEN_K)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
