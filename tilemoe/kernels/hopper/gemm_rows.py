"""F1, and the producer of F1 and B1: rows gathered by token (cp.async), times each expert's weight.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated
parts = 2 where gate and up are two halves of one tile, else 1 · BN columns of a tile

Weights are descriptors of (E, parts, out, in) or (E, parts, in, out), whichever is contiguous: RIGHT_BY_N says the
former. Outputs are ragged descriptors, so that a store at an expert's end writes its own rows only. Interleaved gate
and up are columns that a thread holds side by side.
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
    SPREAD,
    TILE_M,
    acquire,
    announce,
    ask_for_tile,
    banded_row_tile,
    blocks_of,
    entries,
    load_bias,
    multiply,
    new_barriers,
    new_bias_staging,
    new_mailbox,
    new_notes,
    next_tile,
    pairs_of,
    pass_by,
    publish_copies,
    publish_last_copies,
    publish_nothing,
    row_tile,
    slices_of,
    spread_to_rows,
    store_slice,
    take_tile,
)
from tilemoe.kernels.triton.activations import gated_value, inner

# 64 x 64 of a 16-bit type over 128 threads, 16 bytes each at a time.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def load_weight(weight, expert, k, col, ring, stage, RIGHT_BY_N: gl.constexpr):
    """Start the TMA load of one step's weight; its bytes count towards ``ready``."""
    _left, right, ready, _empty = ring
    if RIGHT_BY_N:
        load_tile(weight, [expert, 0, col, k], ready.index(stage), right.index(stage))
    else:
        load_tile(weight, [expert, 0, k, col], ready.index(stage), right.index(stage))


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
def load_h(ring, step, h, row, col, BN: gl.constexpr, GATE_UP: gl.constexpr):
    """Fill stages with a tile's h, a slice each: one consumer's after the other's where the weight was.

    h: descriptor of (2, R_max, n), blocks of (2, GROUP_M, SLICE), where gate and up are concatenated, else of
    (R_max, w), blocks of (GROUP_M, SLICE): two of them to a slice where they are interleaved.
    """
    _left, right, ready, _empty = ring
    BLOCKS: gl.constexpr = 2 if GATE_UP == "interleaved" else 1
    for i in gl.static_range(BN // SLICE):
        stage = acquire(ring, step)
        mbarrier.expect(ready.index(stage), GROUPS * BLOCKS * h.block_type.nbytes)
        buffers = blocks_of(right.index(stage), GROUPS * BLOCKS, 2 * GROUP_M if GATE_UP == "concatenated" else GROUP_M)
        for group in gl.static_range(GROUPS):
            for block in gl.static_range(BLOCKS):
                first, inside = row + group * GROUP_M, BLOCKS * (col + i * SLICE) + block * SLICE
                place = [0, first, inside] if GATE_UP == "concatenated" else [first, inside]
                buffer = buffers.index(group * BLOCKS + block)
                load_tile(h, place, ready.index(stage), buffer.reshape(h.block_shape))
        publish_copies(ring, step)
        step += 1
    return step


@gluon.jit
def next_row_tile(index, total, column_tiles, tiles, row_start_of_expert, BN: gl.constexpr):
    """`banded_row_tile` where row_start_of_expert is given, else `row_tile`."""
    if row_start_of_expert is None:
        tile = row_tile(index, total, column_tiles, tiles, BN)
    else:
        tile = banded_row_tile(index, total, column_tiles, tiles, row_start_of_expert, BN)
    return tile


@gluon.jit
def gather_rows(
    source, stride_source, token_of_row, weight, tiles, num_tiles, row_start_of_expert, width_in, width_out,
    ring, notes, mailbox, extra,
    BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, EVEN_K: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """Producer: rows of ``source`` (T, width_in) by token, and the weight's tiles.

    Announces (expert, first row, its expert's end, first column) of each tile, and expert -1 when there is no other.

    row_start_of_expert: None, or tiles come in the order of `banded_row_tile`.
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
    expert, row, end, col = next_row_tile(index, total, column_tiles, tiles, row_start_of_expert, BN)
    upper_token = gl.load(entries(token_of_row, row, end, rows))
    lower_token = gl.load(entries(token_of_row, row + GROUP_M, end, rows))
    while index < total:
        next_expert, next_row, next_end, next_col = next_row_tile(
            next_index, total, column_tiles, tiles, row_start_of_expert, BN
        )
        upper = source + (upper_token.to(gl.int64) * stride_source)[:, None] + columns[None, :]
        lower = source + (lower_token.to(gl.int64) * stride_source)[:, None] + columns[None, :]
        answer = ask_for_tile(num_tiles, next_index < total)
        stage = acquire(ring, step)
        announce(notes, stage, expert, row, end, col)
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
            step = load_h(ring, step, h, row, col, BN, GATE_UP)
        expert, row, end, col = next_expert, next_row, next_end, next_col
    announce(notes, acquire(ring, step), -1, 0, 0, 0)
    publish_nothing(ring, step)
    publish_last_copies(ring, step + 1)


@gluon.jit
def load_tile_bias(bias, expert, stride, col, n, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, GATE_UP: gl.constexpr):
    """(BN) of b1 (E, w) for a tile's columns, in their order, spread over the threads; zero past the last column."""
    column = gl.arange(0, BN, SPREAD)
    if GATE_UP == "concatenated":
        RUN: gl.constexpr = BN // 2 if RIGHT_BY_N else SLICE  # of gate's columns before up's
        inside = col + column // (2 * RUN) * RUN + column % RUN
        column = gl.where(inside < n, inside + column // RUN % 2 * n, 2 * n)
        width = 2 * n
    elif GATE_UP == "interleaved":
        column, width = col + column, 2 * n
    else:
        column, width = col + column, n
    return load_bias(bias, expert, stride, column, width)


@gluon.jit
def gate_up_slices(acc, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, GATE_UP: gl.constexpr):
    """Gate and up of a tile, two tuples of (GROUP_M, SLICE); where there is no gate, both are h's."""
    if GATE_UP == "interleaved":
        gate, up = pairs_of(acc, BN)
        gates, ups = slices_of(gate, BN // 2), slices_of(up, BN // 2)
    else:
        slices = slices_of(acc, BN)
        if GATE_UP == "none":
            gates, ups = slices, slices
        elif RIGHT_BY_N:
            gates, ups = (slices[0], slices[1]), (slices[2], slices[3])
        else:
            gates, ups = (slices[0], slices[2]), (slices[1], slices[3])
    return gates, ups


@gluon.jit
def store_h(
    acc, h, end, row, col, staging,
    GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """Start storing a consumer's rows of a tile of h, a slice at a time, through two buffers."""
    last = RAGGED_ROWS - end + row
    slices = slices_of(acc, BN)
    for i in gl.static_range(BN // SLICE):
        tma.store_wait(1)
        if GATE_UP != "concatenated":
            place = [RAGGED_ROWS, end, last, col + i * SLICE]
        elif RIGHT_BY_N:
            place = [RAGGED_ROWS, end, last, i // 2, col + i % 2 * SLICE]
        else:
            place = [RAGGED_ROWS, end, last, i % 2, col + i // 2 * SLICE]
        store_slice(h, place, slices[i], staging.index(2 * GROUP + i % 2))


@gluon.jit
def store_act(
    acc, a, end, row, col, limit, alpha, staging,
    GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Start storing the activation of a consumer's rows of a tile, ``acc`` (GROUP_M, BN) of h."""
    WIDTH: gl.constexpr = BN if GATE_UP == "none" else BN // 2
    gates, ups = gate_up_slices(acc, BN, RIGHT_BY_N, GATE_UP)
    if GATE_UP == "interleaved":
        col = col // 2
    for i in gl.static_range(WIDTH // SLICE):
        if GATE_UP == "none":
            value, _slope = inner(gates[i], ACTIVATION, False)
        else:
            value = gated_value(gates[i], ups[i], limit, alpha, ACTIVATION, False)
        tma.store_wait(1)
        place = [RAGGED_ROWS, end, RAGGED_ROWS - end + row, col + i * SLICE]
        store_slice(a, place, value, staging.index(2 * GROUP + i % 2))


@gluon.jit
def finish_act(
    a, h, bias, stride_bias, d, n, limit, alpha, ring, notes, staging, bias_staging,
    GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
    KEEP_H: gl.constexpr,
):  # fmt: skip
    """Consumer of F1: adds the bias, stores h and the activation."""
    steps = gl.cdiv(d, BK)
    step = 0
    expert, row, end, col = next_tile(ring, notes, step)
    while expert >= 0:
        row += GROUP * GROUP_M
        if row < end:
            if bias is not None:
                of_tile = load_tile_bias(bias, expert, stride_bias, col, n, BN, RIGHT_BY_N, GATE_UP)
            acc, step = multiply(ring, step, steps, False, GROUP, BN, True, RIGHT_BY_N)
            if bias is not None:
                acc += spread_to_rows(of_tile, bias_staging.index(GROUP), acc)
            if KEEP_H:
                store_h(acc, h, end, row, col, staging, GROUP, BN, RIGHT_BY_N, GATE_UP)
            store_act(acc, a, end, row, col, limit, alpha, staging, GROUP, BN, RIGHT_BY_N, GATE_UP, ACTIVATION)
        else:
            step = pass_by(ring, step, steps, False)
        expert, row, end, col = next_tile(ring, notes, step)
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
    row_start_of_expert,
    d,
    n,
    stride_x,
    stride_bias,
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    RIGHT_BY_N: gl.constexpr,
    KEEP_H: gl.constexpr,
    EVEN_K: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """F1: ``h = x w1^T + b1``, ``a = act(h)``; x (T, d) gathered, bias (E, w), a (R_max, n); KEEP_H: h is written.

    GATE_UP "concatenated": weight (E, 2, n, d), h (R_max, 2, n); a tile holds BN/2 columns of gate and the same of up,
    as two halves if RIGHT_BY_N, else 64 of each in turn. "interleaved" and "none" (no gate): weight (E, 1, w, d), h
    (R_max, w); a tile holds BN columns of h.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    COLUMNS: gl.constexpr = BN // 2 if GATE_UP == "concatenated" else BN
    width_out = 2 * n if GATE_UP == "interleaved" else n
    left = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, BK], swizzled)
    right = gl.allocate_shared_memory(dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(dtype, [2 * GROUPS, GROUP_M, SLICE], swizzled)
    ring = (left, right, new_barriers(STAGES, 2), new_barriers(STAGES, GROUPS))
    bias_staging = new_bias_staging(BN)
    notes, mailbox = new_notes(STAGES), new_mailbox()
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (finish_act, (a, h, bias, stride_bias, d, n, limit, alpha, ring, notes, staging, bias_staging, 0, BN,
                          RIGHT_BY_N, GATE_UP, ACTIVATION, KEEP_H)),
            (finish_act, (a, h, bias, stride_bias, d, n, limit, alpha, ring, notes, staging, bias_staging, 1, BN,
                          RIGHT_BY_N, GATE_UP, ACTIVATION, KEEP_H)),
            (gather_rows, (x, stride_x, token_of_row, weight, tiles, num_tiles, row_start_of_expert, d, width_out, ring,
                           notes, mailbox, None, COLUMNS, RIGHT_BY_N, EVEN_K, GATE_UP)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
