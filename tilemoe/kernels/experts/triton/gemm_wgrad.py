"""The weight gradients down_proj_wgrad and up_proj_wgrad: ``out_e = A_e^T B_e``, contracted over the expert's rows,
with A gathered by token.

T tokens · E experts · R_max static row capacity · p, q widths of A (gathered) and B (contiguous)
BM, BN tile of (p, q) · BK k-block: rows of the expert per step

Persistent CTAs walk the experts' gradients one after the other, tiles along p innermost. A, whose width p is the GEMM's
M, is always the gathered operand. So dw1 is computed transposed, and its store transposes it back.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.experts.triton.operands import column_slices, line_pointers, load_ragged, multiply_add


@triton.jit
def gemm_wgrad_kernel(
    by_token,
    by_row,
    out,
    token_of_row,
    row_start_of_expert,
    num_experts,
    p,
    q,
    stride_token,
    TRANSPOSED: tl.constexpr,
    ADDS: tl.constexpr,
    GATHER_BY_TMA: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_M: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out_e = sum over rows r of e of by_token[token_r]^T by_row[r]`` (E, p, q), or (E, q, p) if TRANSPOSED.

    by_token (T, p), by_row (R_max, q). Zeros for an expert without rows. ADDS: the gradient is added to out, which is
    fp32; only one CTA updates a tile of it, once, so that the result is deterministic.
    """
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
    p, q, stride_token = p // 8 * 8, q // 8 * 8, stride_token // 8 * 8
    row_tiles = tl.cdiv(p, BLOCK_M)
    tiles = row_tiles * tl.cdiv(q, BLOCK_N)
    for index in tl.range(tl.program_id(0), num_experts * tiles, tl.num_programs(0)):
        expert = index // tiles
        first = index % row_tiles * BLOCK_M
        col = index % tiles // row_tiles * BLOCK_N
        start = tl.load(row_start_of_expert + expert)
        end = tl.load(row_start_of_expert + expert + 1)
        along = first + tl.arange(0, BLOCK_M)
        columns = col + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(start, end, BLOCK_K):
            rows = k + tl.arange(0, BLOCK_K)
            # Clamped instead of masked: by_row is loaded as 0 past the end, so these rows add nothing.
            token = tl.load(token_of_row + tl.minimum(rows, end - 1))
            if GATHER_BY_TMA:
                left = by_token.gather(token, first)
            else:
                pointers = line_pointers(by_token, token, stride_token, along, INT64_OFFSETS)
                left = tl.load(pointers) if EVEN_M else tl.load(pointers, mask=(along < p)[None, :], other=0.0)
            if USE_TMA:
                right = load_ragged(by_row, end, k, col, BLOCK_K, BLOCK_N)
            else:
                mask = (rows < end)[:, None] & (columns < q)[None, :]
                right = tl.load(by_row + rows.to(tl.int64)[:, None] * q + columns[None, :], mask=mask, other=0.0)
            acc = multiply_add(left.T, right, acc, PRECISION, SPLIT_ACCUM)
        slice_width: tl.constexpr = BLOCK_N // SLICES
        slices = column_slices(acc, BLOCK_M, BLOCK_N, SLICES)
        for i in tl.static_range(SLICES):
            at = (expert, first, col + i * slice_width)
            store_gradient(out, slices[i], at, p, q, TRANSPOSED, ADDS, USE_TMA, BLOCK_M, slice_width)


@triton.jit
def store_gradient(
    out, value, at, p, q,
    TRANSPOSED: tl.constexpr, ADDS: tl.constexpr, USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store or add ``value`` (BM, BN) at (first, col) of the expert's gradient (p, q), or (q, p) if TRANSPOSED.

    at: (expert, first, col).
    """
    expert, first, col = at
    along, columns = first + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    inside = (along < p)[:, None] & (columns < q)[None, :]
    if USE_TMA:
        tile = value.to(out.dtype)
        if TRANSPOSED:
            box, place = tile.T.reshape(1, BLOCK_N, BLOCK_M), [tl.cast(expert, tl.int32), col, first]
        else:
            box, place = tile.reshape(1, BLOCK_M, BLOCK_N), [tl.cast(expert, tl.int32), first, col]
        if ADDS:
            out.atomic_add(place, box)
        else:
            out.store(place, box)
    else:
        corner = out + tl.cast(expert, tl.int64) * p * q
        if TRANSPOSED:
            pointers = corner + columns.to(tl.int64)[None, :] * p + along[:, None]
        else:
            pointers = corner + along.to(tl.int64)[:, None] * q + columns[None, :]
        value = value.to(out.dtype.element_ty)
        if ADDS:
            value += tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, value, mask=inside)
