"""down_proj_dgrad fused with the activation's backward, then the scores' gradient:
``da' = do w2``, ``dh = act'(h) s da'``, ``a_scaled = s act(h)``; ``ds = <da', act(h)>`` (+ ``<do, b2>``).

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · P pairs
parts = 2 gated, 1 ungated · BM, BN, BK tile

Persistent CTAs walk the tile list, column tiles innermost, and gather do. The epilogue loads h and writes dh and
a_scaled, one slice of columns at a time. A row's ``<da', a>`` is a sum over n columns: each tile writes its partial
sum to ``partial`` (column tiles, R_max), and a second kernel adds these in a fixed order, without atomics.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.experts.triton.activations import gated_grad, inner
from tilemoe.kernels.experts.triton.operands import (
    column_slices,
    line_pointers,
    load_gate_up,
    load_pointers,
    load_rows,
    load_weight,
    multiply_add,
    store_gate_up,
    store_rows,
)
from tilemoe.kernels.experts.triton.tiles import tile_place


@triton.jit(do_not_specialize=["capacity"])
def gemm_dgrad_dact_kernel(
    do,
    weight,
    h,
    s,
    dh,
    a_scaled,
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
    stride_we,
    stride_win,
    stride_wout,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    PRECISE: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GATHER_BY_TMA: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    USE_TMA: tl.constexpr,
    WEIGHT_ACCESS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT_ACCUM: tl.constexpr,
    FLATTEN: tl.constexpr,
    BAND: tl.constexpr,
    SLICES: tl.constexpr,
    LOAD_AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """down_proj_dgrad without the last sum of ds. Reads do (T, d), weight (E, 1, d, n), h (R_max, parts * n) and s (P);
    writes dh like h, a_scaled (R_max, n) and partial (column tiles, R_max).
    """
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
    d, n, stride_do = d // 8 * 8, n // 8 * 8, stride_do // 8 * 8
    column_tiles = tl.cdiv(n, BLOCK_N)
    row_tiles = tl.load(num_tiles)
    for index in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLATTEN):
        tile, column_tile = tile_place(index, row_tiles, column_tiles, BAND)
        col = column_tile * BLOCK_N
        expert = tl.load(expert_of_tile + tile)
        row = tl.load(row_of_tile + tile)
        end = tl.load(end_of_tile + tile)
        rows = row + tl.arange(0, BLOCK_M)
        # Clamped: rows past the expert's end repeat its last row and are not stored.
        line = tl.minimum(rows, end - 1)
        token = tl.load(token_of_row + line)
        if not GATHER_BY_TMA:
            do_pointers = line_pointers(do, token, stride_do, tl.arange(0, BLOCK_K), INT64_OFFSETS)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, d, BLOCK_K):
            left = do.gather(token, k) if GATHER_BY_TMA else load_pointers(do_pointers, k, d, EVEN_K, BLOCK_K)
            right = load_weight(
                weight, expert, k, col, d, n, stride_we, 0, stride_win, stride_wout,
                1, WEIGHT_ACCESS, EVEN_K, BLOCK_K, BLOCK_N,
            )  # fmt: skip
            acc = multiply_add(left, right, acc, PRECISION, SPLIT_ACCUM)
        score = tl.load(s + tl.load(pair_of_row + line)).to(tl.float32)
        # One slice at a time: h, a and dh of a whole tile would not fit in the registers.
        width: tl.constexpr = BLOCK_N // SLICES
        slices = column_slices(acc, BLOCK_M, BLOCK_N, SLICES)
        ds = tl.zeros((BLOCK_M,), dtype=tl.float32)
        next_gate, next_up = load_h(h, end, row, col, n, GATED, INTERLEAVED, BLOCK_M, width)
        for i in tl.static_range(SLICES):
            if i > 0 and not LOAD_AHEAD:
                next_gate, next_up = load_h(h, end, row, col + i * width, n, GATED, INTERLEAVED, BLOCK_M, width)
            gate, up = next_gate, next_up
            if i + 1 < SLICES and LOAD_AHEAD:
                next_gate, next_up = load_h(h, end, row, col + (i + 1) * width, n, GATED, INTERLEAVED, BLOCK_M, width)
            ds += dact_epilogue(
                slices[i], gate, up, score, dh, a_scaled, row, end, col + i * width, n, limit, alpha,
                ACTIVATION, PRECISE, GATED, INTERLEAVED, USE_TMA, BLOCK_M, width,
            )  # fmt: skip
        tl.store(partial + column_tile.to(tl.int64) * capacity + rows, ds, mask=rows < end)


@triton.jit
def load_h(
    h, end, row, col, n,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(gate, up), (BM, BN) each, at (row, col) of h; both are h where the activation has no gate."""
    if GATED:
        gate, up = load_gate_up(h, end, row, col, n, INTERLEAVED, BLOCK_M, BLOCK_N)
    else:
        gate = load_rows(h, end, row, col, n, BLOCK_M, BLOCK_N)
        up = gate
    return gate, up


@triton.jit
def dact_epilogue(
    da, gate, up, score, dh, a_scaled, row, end, col, n, limit, alpha,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """down_proj_dgrad's epilogue for a slice of da' (BM, BN): stores dh and a_scaled, returns <da', a> (BM)."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    if GATED:
        a, dgate, dup = gated_grad(gate, up, da * score[:, None], limit, alpha, ACTIVATION, PRECISE)
        store_gate_up(dh, dgate, dup, end, row, col, n, INTERLEAVED, USE_TMA, BLOCK_M, BLOCK_N)
        store_rows(a_scaled, a * score[:, None], end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
    else:
        a, slope = inner(gate, ACTIVATION, PRECISE)
        store_rows(a_scaled, a * score[:, None], end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
        store_rows(dh, da * score[:, None] * slope, end, row, col, n, USE_TMA, BLOCK_M, BLOCK_N)
    # Columns past n add 0: h is 0 there, and so is every activation of 0.
    return tl.sum(da * a, axis=1)


@triton.jit(do_not_specialize=["capacity", "num_partial"])
def score_grad_kernel(
    partial,
    products,
    ds,
    token_of_row,
    pair_of_row,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    capacity,
    num_partial,
    num_experts,
    HAS_PRODUCTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write ds (P): each row's pair gets the sum of the row's partial sums, with b2 plus its ``<do, b2>`` in products
    (T, E). One CTA per row tile.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        end = tl.load(end_of_tile + tile)
        rows = tl.load(row_of_tile + tile) + tl.arange(0, BLOCK_M)
        line = tl.minimum(rows, end - 1)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for part in range(num_partial):
            total += tl.load(partial + tl.cast(part, tl.int64) * capacity + line)
        if HAS_PRODUCTS:
            token = tl.load(token_of_row + line).to(tl.int64)
            total += tl.load(products + token * num_experts + tl.load(expert_of_tile + tile))
        tl.store(ds + tl.load(pair_of_row + line), total.to(ds.dtype.element_ty), mask=rows < end)
