"""F1, F2, B1 and B3 with FP8 operands and fp32 accumulators, for each k-block of 128.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
BM, BN tile · all widths are multiples of 128, and BN divides 128

Equations, epilogues, tile lists and tile order are those of the portable kernels (`triton.gemm_rows`,
`triton.gemm_dgrad_dact`). Operands are contiguous along the contraction, as tensor cores require of 8-bit types: rows
(., in) and weights (E, out, in). F1, B1 and B3 have one scale for each row of A and each output column of B, applied
after the contraction; F2 has one for each 1 x 128 of A and 128 x 128 of B, applied to each k-block's product.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.experts.quantize import BLOCK
from tilemoe.kernels.experts.triton.gemm_dgrad_dact import dact_epilogue, load_h
from tilemoe.kernels.experts.triton.gemm_rows import act_epilogue
from tilemoe.kernels.experts.triton.operands import load_bias, store_rows

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def contract(
    rows, row_scale, line, weight, weight_scale, expert, col, width_in, stride_we, stride_wout,
    stride_se, stride_sout, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(BM, BN) fp32: rows (., in) at ``line`` (BM) times BN output columns from ``col`` of an expert's (E, out, in).

    row_scale (.), weight_scale (E, out).
    """
    step = tl.arange(0, _BLOCK)
    columns = (col + tl.arange(0, BLOCK_N)).to(tl.int64)
    left_pointers = rows + line.to(tl.int64)[:, None] * width_in + step[None, :]
    right_pointers = weight + expert.to(tl.int64) * stride_we + columns[:, None] * stride_wout + step[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(width_in // _BLOCK):
        left = tl.load(left_pointers + block * _BLOCK)
        right = tl.load(right_pointers + block * _BLOCK)
        acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=_BLOCK)  # Hopper's sums are fp32 only where asked for
    of_columns = weight_scale + expert.to(tl.int64) * stride_se
    column_scale = tl.load(of_columns + (col + tl.arange(0, BLOCK_N)) * stride_sout)
    return acc * tl.load(row_scale + line)[:, None] * column_scale[None, :]


@triton.jit
def contract_blocks(
    rows, row_scale, line, weight, weight_scale, expert, col, width_in, stride_we, stride_wout,
    stride_se, stride_sout, stride_sin, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `contract`, with row_scale (., in / 128) and weight_scale (E, out / 128, in / 128)."""
    blocks = width_in // _BLOCK
    step = tl.arange(0, _BLOCK)
    columns = (col + tl.arange(0, BLOCK_N)).to(tl.int64)
    left_pointers = rows + line.to(tl.int64)[:, None] * width_in + step[None, :]
    right_pointers = weight + expert.to(tl.int64) * stride_we + columns[:, None] * stride_wout + step[None, :]
    row_scales = row_scale + line.to(tl.int64) * blocks
    weight_scales = weight_scale + expert.to(tl.int64) * stride_se + (col // _BLOCK) * stride_sout
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(blocks):
        left = tl.load(left_pointers + block * _BLOCK)
        right = tl.load(right_pointers + block * _BLOCK)
        scale = tl.load(row_scales + block) * tl.load(weight_scales + block * stride_sin)
        acc += tl.dot(left, right.T) * scale[:, None]
    return acc


@triton.jit
def rows_kernel(
    rows, row_scale, weight, weight_scale, bias, out,
    expert_of_tile, row_of_tile, end_of_tile, num_tiles,
    width_in, width_out, stride_we, stride_wout, stride_se, stride_sout, stride_sin, stride_be, stride_bout,
    SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """F2 and B3: ``out_r = rows_r weight_e^T (+ bias_e)``; rows (R_max, in), weight (E, out, in), bias (E, out).

    SCALES: "rows", see `contract`, or "blocks", see `contract_blocks`.
    """
    column_tiles = width_out // BLOCK_N
    total = tl.load(num_tiles) * column_tiles
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile = index // column_tiles
        col = (index % column_tiles) * BLOCK_N
        expert, row, end = tl.load(expert_of_tile + tile), tl.load(row_of_tile + tile), tl.load(end_of_tile + tile)
        # Clamped: rows past the expert's end repeat its last one, and are not stored.
        line = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
        if SCALES == "rows":
            acc = contract(
                rows, row_scale, line, weight, weight_scale, expert, col, width_in, stride_we, stride_wout,
                stride_se, stride_sout, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            acc = contract_blocks(
                rows, row_scale, line, weight, weight_scale, expert, col, width_in, stride_we, stride_wout,
                stride_se, stride_sout, stride_sin, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if HAS_BIAS:
            acc += load_bias(bias, expert, col, width_out, stride_be, stride_bout, BLOCK_N)[None, :]
        store_rows(out, acc, end, row, col, width_out, False, BLOCK_M, BLOCK_N)


@triton.jit
def up_proj_act_kernel(
    x, x_scale, weight, weight_scale, bias, a, h,
    token_of_row, expert_of_tile, row_of_tile, end_of_tile, num_tiles,
    d, n, stride_we, stride_wout, stride_se, stride_sout, stride_be, stride_bout, limit, alpha,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr, KEEP_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """F1: ``h = x w1^T + b1`` and ``a = act(h)``; x (T, d) gathered, weight (E, w, d), a (R_max, n), h (R_max, w).

    h is not written unless KEEP_H.
    """
    WIDTH: tl.constexpr = 2 * BLOCK_N if INTERLEAVED else BLOCK_N  # adjacent columns of h that BN columns of a read
    w = 2 * n if GATED else n
    column_tiles = n // BLOCK_N
    total = tl.load(num_tiles) * column_tiles
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile = index // column_tiles
        col = (index % column_tiles) * WIDTH
        expert, row, end = tl.load(expert_of_tile + tile), tl.load(row_of_tile + tile), tl.load(end_of_tile + tile)
        # Clamped: rows past the expert's end repeat its last one, and are not stored.
        token = tl.load(token_of_row + tl.minimum(row + tl.arange(0, BLOCK_M), end - 1))
        gate = contract(
            x, x_scale, token, weight, weight_scale, expert, col, d, stride_we, stride_wout,
            stride_se, stride_sout, BLOCK_M, WIDTH,
        )  # fmt: skip
        if HAS_BIAS:
            gate += load_bias(bias, expert, col, w, stride_be, stride_bout, WIDTH)[None, :]
        up = gate
        if GATED and not INTERLEAVED:
            up = contract(
                x, x_scale, token, weight, weight_scale, expert, n + col, d, stride_we, stride_wout,
                stride_se, stride_sout, BLOCK_M, WIDTH,
            )  # fmt: skip
            if HAS_BIAS:
                up += load_bias(bias, expert, n + col, w, stride_be, stride_bout, WIDTH)[None, :]
        act_epilogue(
            gate, up, a, h, end, row, col, n, limit, alpha,
            ACTIVATION, PRECISE, GATED, INTERLEAVED, KEEP_H, False, BLOCK_M, WIDTH,
        )  # fmt: skip


@triton.jit(do_not_specialize=["capacity"])
def dgrad_dact_kernel(
    do, do_scale, weight, weight_scale, h, s, dh, a_scaled, partial,
    token_of_row, pair_of_row, expert_of_tile, row_of_tile, end_of_tile, num_tiles,
    capacity, d, n, stride_we, stride_wout, stride_se, stride_sout, limit, alpha,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """B1 but for ds: reads do (T, d) gathered, weight (E, n, d) and h (R_max, w); writes dh like h, a_scaled (R_max, n)
    and partial (column tiles, R_max).
    """
    column_tiles = n // BLOCK_N
    total = tl.load(num_tiles) * column_tiles
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile = index // column_tiles
        col = (index % column_tiles) * BLOCK_N
        expert, row, end = tl.load(expert_of_tile + tile), tl.load(row_of_tile + tile), tl.load(end_of_tile + tile)
        rows = row + tl.arange(0, BLOCK_M)
        # Clamped: rows past the expert's end repeat its last one, and are not stored.
        line = tl.minimum(rows, end - 1)
        score = tl.load(s + tl.load(pair_of_row + line)).to(tl.float32)
        da = contract(
            do, do_scale, tl.load(token_of_row + line), weight, weight_scale, expert, col, d, stride_we, stride_wout,
            stride_se, stride_sout, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        gate, up = load_h(h, end, row, col, n, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
        ds = dact_epilogue(
            da, gate, up, score, dh, a_scaled, row, end, col, n, limit, alpha,
            ACTIVATION, PRECISE, GATED, INTERLEAVED, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        tl.store(partial + (index % column_tiles).to(tl.int64) * capacity + rows, ds, mask=rows < end)
