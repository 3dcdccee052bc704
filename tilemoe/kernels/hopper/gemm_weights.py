"""B2 and B4: each expert's weight gradient, a sum of outer products over its rows, one operand gathered by token.

T tokens · E experts · R_max row capacity · p, q widths of the gathered and of the contiguous operand · BN columns of a
tile, whose 128 rows are the gathered operand's columns
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilemoe.kernels.hopper.gemm_rows import COPY
from tilemoe.kernels.hopper.names import copy_rows, load_tile
from tilemoe.kernels.hopper.pipeline import (
    BK,
    GROUP_M,
    GROUPS,
    RAGGED_ROWS,
    SLICE,
    TILE_M,
    acquire,
    announce,
    entries,
    halves,
    multiply,
    new_barriers,
    new_notes,
    next_tile,
    pass_by,
    publish_copies,
    publish_last_copies,
    publish_nothing,
    start_store,
    store_slice,
    zeros,
)


@gluon.jit
def weight_tile(index, total, p, q, row_start_of_expert, BN: gl.constexpr):
    """(expert, its first row, its end, first row and column of the tile); past ``total`` something to read, not use."""
    index = gl.minimum(index, total - 1)
    row_tiles, column_tiles = gl.cdiv(p, TILE_M), gl.cdiv(q, BN)
    tiles = row_tiles * column_tiles
    expert = index // tiles
    start = gl.load(row_start_of_expert + expert)
    end = gl.load(row_start_of_expert + expert + 1)
    # Along the shorter side first: the programs at work then share more of what they read.
    along_rows = row_tiles < column_tiles
    shorter = gl.minimum(row_tiles, column_tiles)
    fast, slow = index % tiles % shorter, index % tiles // shorter
    row, column = gl.where(along_rows, fast, slow), gl.where(along_rows, slow, fast)
    return expert, start, end, row * TILE_M, column * BN


@gluon.jit
def gather_along_k(
    by_token, stride_token, token_of_row, by_row, row_start_of_expert, num_experts, p, q, ring, notes, BN: gl.constexpr
):
    """Producer: BK tokens' columns of by_token (T, p), and the same rows of by_row (R_max, q), zero past the end.

    Announces (expert, first row and column of the tile, steps), where there are none in a stage of nothing else.
    """
    # The compiler is told that they are multiples of 8, whence 16-byte copies.
    p, stride_token = p // 8 * 8, stride_token // 8 * 8
    left, right, ready, _empty = ring
    total = num_experts * gl.cdiv(p, TILE_M) * gl.cdiv(q, BN)
    rows = gl.arange(0, BK, gl.SliceLayout(1, COPY))
    columns = gl.arange(0, GROUP_M, gl.SliceLayout(0, COPY))
    step = 0
    expert, start, end, first, col = weight_tile(gl.program_id(0), total, p, q, row_start_of_expert, BN)
    token = gl.load(entries(token_of_row, start, end, rows))
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        next_expert, next_start, next_end, next_first, next_col = weight_tile(
            index + gl.num_programs(0), total, p, q, row_start_of_expert, BN
        )
        stage = acquire(ring, step)
        announce(notes, stage, expert, first, col, gl.cdiv(end - start, BK))
        if start >= end:
            publish_nothing(ring, step)
            step += 1
        upper = first + columns
        lower = upper + GROUP_M
        for k in range(start, end, BK):
            pointers = by_token + (token.to(gl.int64) * stride_token)[:, None]
            # The next step's tokens, or the next tile's.
            more = k + BK < end
            row, bound = gl.where(more, k + BK, next_start), gl.where(more, end, next_end)
            token = gl.load(entries(token_of_row, row, bound, rows))
            stage = acquire(ring, step)
            mbarrier.expect(ready.index(stage), by_row.block_type.nbytes)
            place = [RAGGED_ROWS, end, RAGGED_ROWS - end + k, col]
            load_tile(by_row, place, ready.index(stage), right.index(stage))
            copy_rows(left.index(GROUPS * stage), pointers + upper[None, :], mask=(upper < p)[None, :])
            copy_rows(left.index(GROUPS * stage + 1), pointers + lower[None, :], mask=(lower < p)[None, :])
            publish_copies(ring, step)
            step += 1
        # Without rows there was no loop, in which the next tile's tokens would have been loaded.
        no_rows = (start + rows * 0) >= end
        token = gl.load(entries(token_of_row, next_start, next_end, rows), mask=no_rows, other=token)
        expert, start, end, first, col = next_expert, next_start, next_end, next_first, next_col
    publish_last_copies(ring, step)


@gluon.jit
def finish_weights(
    out, num_experts, p, q, ring, notes, staging, GROUP: gl.constexpr, BN: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """Consumer: stores its rows of the tile, turned where the output is (E, q, p)."""
    total = num_experts * gl.cdiv(p, TILE_M) * gl.cdiv(q, BN)
    step = 0
    for _ in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, col, steps = next_tile(ring, notes, step)
        acc = zeros(BN)
        if steps > 0:
            acc, step = multiply(ring, step, steps, False, GROUP, BN, False, False)
        else:
            step = pass_by(ring, step, 1, False)
        row = first + GROUP * GROUP_M
        left_half, right_half = halves(acc, GROUP_M, BN)
        for i in gl.static_range(2):
            left_slice, right_slice = halves(left_half if i == 0 else right_half, GROUP_M, BN // 2)
            for j in gl.static_range(2):
                tma.store_wait(1)
                buffer = staging.index(2 * GROUP + j)
                value = left_slice if j == 0 else right_slice
                slice_col = col + (2 * i + j) * SLICE
                if TRANSPOSED:
                    buffer.permute([1, 0]).store(value.to(out.dtype))
                    start_store(out, [expert, slice_col, row], buffer)
                else:
                    store_slice(out, [expert, row, slice_col], value, buffer)
    tma.store_wait(0)


@gluon.jit
def gemm_weights_kernel(
    by_token,
    by_row,
    out,
    token_of_row,
    row_start_of_expert,
    num_experts,
    p,
    q,
    stride_token,
    TRANSPOSED: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """``out_e = sum over rows r of e of by_token[token_r]^T by_row[r]`` (E, p, q), or (E, q, p) when TRANSPOSED.

    Zeros for an expert without rows.
    """
    dtype: gl.constexpr = by_token.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    left = gl.allocate_shared_memory(dtype, [GROUPS * STAGES, BK, GROUP_M], swizzled)
    right = gl.allocate_shared_memory(dtype, [STAGES] + by_row.block_shape, by_row.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(dtype, [2 * GROUPS, GROUP_M, SLICE], swizzled)
    ring = (left, right, new_barriers(STAGES, 2), new_barriers(STAGES, GROUPS))
    notes = new_notes(STAGES)
    gl.warp_specialize(
        [
            (finish_weights, (out, num_experts, p, q, ring, notes, staging, 0, BN, TRANSPOSED)),
            (finish_weights, (out, num_experts, p, q, ring, notes, staging, 1, BN, TRANSPOSED)),
            (gather_along_k, (by_token, stride_token, token_of_row, by_row, row_start_of_expert, num_experts, p, q,
                              ring, notes, BN)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
