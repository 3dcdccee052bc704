"""Loads and stores of tiles, by tensor descriptor (TMA) or pointer as a compile-time constant says, and `tl.dot`.

BM, BN, BK tile · E experts · R_max static row capacity

A weight is (E, parts, in, out); ``parts`` is 2 where gate and up are two halves of one tile.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.experts.triton.configs import RAGGED_EXTENT

# A ragged descriptor (triton.tools.ragged_tma) has two leading dimensions whose strides cancel: their coordinates move
# the hardware's bounds check to an expert's last row.
_RAGGED_EXTENT = tl.constexpr(RAGGED_EXTENT)


@triton.jit
def load_ragged(rows, end, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BM, BN) at (row, col) of a ragged descriptor of (R_max, width); zeros past the row ``end``."""
    tile = rows.load([_RAGGED_EXTENT, end, _RAGGED_EXTENT - end + row, col])
    return tile.reshape(BLOCK_M, BLOCK_N)


@triton.jit
def load_weight(
    weight,
    expert,
    k,
    col,
    width_in,
    width_out,
    stride_e,
    stride_part,
    stride_in,
    stride_out,
    PARTS: tl.constexpr,
    ACCESS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(BK, PARTS * BN) of one expert's weight, gate's columns before up's.

    Zero past ``width_in``, unspecified past ``width_out``. ACCESS "in" or "out": by descriptor; that dimension is
    contiguous. "in by pointer", "out by pointer": 16-byte loads along it. "by pointer": any strides, by element.
    """
    if ACCESS == "in":
        tile = weight.load([expert, 0, col, k]).reshape(PARTS * BLOCK_N, BLOCK_K).T
    elif ACCESS == "out":
        tile = weight.load([expert, k, 0, col]).reshape(BLOCK_K, PARTS * BLOCK_N)
    else:
        # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte loads.
        if ACCESS == "in by pointer":
            stride_e, stride_part, stride_out = stride_e // 8 * 8, stride_part // 8 * 8, stride_out // 8 * 8
        elif ACCESS == "out by pointer":
            stride_e, stride_part, stride_in = stride_e // 8 * 8, stride_part // 8 * 8, stride_in // 8 * 8
        steps = tl.arange(0, BLOCK_K)
        column = tl.arange(0, PARTS * BLOCK_N)
        inner = col + column % BLOCK_N
        if ACCESS != "out by pointer":  # a clamp would hide from Triton that columns are contiguous: masked below
            inner = tl.minimum(inner, width_out - 1)
        across = inner.to(tl.int64) * stride_out + (column // BLOCK_N).to(tl.int64) * stride_part
        base = weight + expert.to(tl.int64) * stride_e + tl.cast(k, tl.int64) * stride_in
        pointers = base + steps[:, None] * stride_in + across[None, :]
        if ACCESS == "out by pointer":
            tile = tl.load(pointers, mask=(k + steps < width_in)[:, None] & (inner < width_out)[None, :], other=0.0)
        elif EVEN_K:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(k + steps < width_in)[:, None], other=0.0)
    return tile


@triton.jit
def halves(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of (BM, BN). In the tensor cores' layout this moves no data between threads."""
    return acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()


@triton.jit
def column_slices(acc, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr):
    """(BM, BN) as a tuple of 1, 2 or 4 slices of columns, from left to right."""
    tl.static_assert(SLICES == 1 or SLICES == 2 or SLICES == 4, "slices: 1, 2 or 4")
    if SLICES == 1:
        slices = (acc,)
    elif SLICES == 2:
        slices = halves(acc, BLOCK_M, BLOCK_N)
    else:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        slices = halves(left, BLOCK_M, BLOCK_N // 2) + halves(right, BLOCK_M, BLOCK_N // 2)
    return slices


@triton.jit
def line_pointers(base, line, stride, columns, INT64_OFFSETS: tl.constexpr):
    """Pointers (lines, columns) to the rows ``line`` of a matrix of row stride ``stride``.

    INT64_OFFSETS: offsets may reach 2^31. 32-bit offsets make a weight gradient 6% faster.
    """
    first = line.to(tl.int64) * stride if INT64_OFFSETS else line * stride
    return base + (first[:, None] + columns[None, :])


@triton.jit
def load_pointers(pointers, k, width, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The k-block (BM, BK) from column ``k`` on; pointers: to each row's first BK elements. Zero past ``width``."""
    inside = (k + tl.arange(0, BLOCK_K))[None, :] < width
    return tl.load(pointers + k) if EVEN_K else tl.load(pointers + k, mask=inside, other=0.0)


@triton.jit
def multiply_add(left, right, acc, PRECISION: tl.constexpr, SPLIT_ACCUM: tl.constexpr):
    """``acc + left right``, (BM, BN) fp32. SPLIT_ACCUM: the products of this k-block are summed apart, then added."""
    if SPLIT_ACCUM:
        products = tl.dot(left, right, input_precision=PRECISION)
        # An fma, since the compiler would fold a plain add into the dot's accumulator, again one long chain of sums.
        acc = tl.fma(products, tl.full(products.shape, 1.0, tl.float32), acc)
    else:
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_rows(out, value, end, row, col, width, USE_TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store ``value`` (BM, BN) at (row, col) of ``out`` (R_max, width), without the rows from ``end`` on."""
    if USE_TMA:
        tile = value.to(out.dtype).reshape(1, 1, BLOCK_M, BLOCK_N)
        out.store([_RAGGED_EXTENT, end, _RAGGED_EXTENT - end + row, col], tile)
    else:
        rows = row + tl.arange(0, BLOCK_M)
        columns = col + tl.arange(0, BLOCK_N)
        pointers = out + tl.cast(row, tl.int64) * width + tl.arange(0, BLOCK_M)[:, None] * width + columns[None, :]
        mask = (rows < end)[:, None] & (columns < width)[None, :]
        tl.store(pointers, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(rows, end, row, col, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BM, BN) at (row, col) of ``rows`` (R_max, width), by pointer; zero from row ``end`` on and past ``width``."""
    columns = col + tl.arange(0, BLOCK_N)
    corner = rows + tl.cast(row, tl.int64) * width
    mask = (row + tl.arange(0, BLOCK_M) < end)[:, None] & (columns < width)[None, :]
    return tl.load(corner + tl.arange(0, BLOCK_M)[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_gate_up(h, end, row, col, n, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(gate, up), (BM, BN) each, at (row, col) of h (R_max, 2n), by pointer; col counts columns of gate."""
    if INTERLEAVED:
        both = load_rows(h, end, row, 2 * col, 2 * n, BLOCK_M, 2 * BLOCK_N)
        gate, up = both.reshape(BLOCK_M, BLOCK_N, 2).split()
    else:
        columns = col + tl.arange(0, BLOCK_N)
        pointers = h + tl.cast(row, tl.int64) * (2 * n)
        pointers += tl.arange(0, BLOCK_M)[:, None] * (2 * n) + columns[None, :]
        mask = (row + tl.arange(0, BLOCK_M) < end)[:, None] & (columns < n)[None, :]
        gate = tl.load(pointers, mask=mask, other=0.0)
        up = tl.load(pointers + n, mask=mask, other=0.0)
    return gate, up


@triton.jit
def store_gate_up(
    h,
    gate,
    up,
    end,
    row,
    col,
    n,
    INTERLEAVED: tl.constexpr,
    USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store gate and up, (BM, BN) each, at (row, col) of h (R_max, 2n), without the rows from ``end`` on."""
    if INTERLEAVED:
        both = tl.join(gate, up).reshape(BLOCK_M, 2 * BLOCK_N)
        store_rows(h, both, end, row, 2 * col, 2 * n, USE_TMA, BLOCK_M, 2 * BLOCK_N)
    elif USE_TMA:
        # h is a ragged descriptor of (R_max, 2, n).
        last = _RAGGED_EXTENT - end + row
        h.store([_RAGGED_EXTENT, end, last, 0, col], gate.to(h.dtype).reshape(1, 1, BLOCK_M, 1, BLOCK_N))
        h.store([_RAGGED_EXTENT, end, last, 1, col], up.to(h.dtype).reshape(1, 1, BLOCK_M, 1, BLOCK_N))
    else:
        columns = col + tl.arange(0, BLOCK_N)
        pointers = h + tl.cast(row, tl.int64) * (2 * n)
        pointers += tl.arange(0, BLOCK_M)[:, None] * (2 * n) + columns[None, :]
        mask = (row + tl.arange(0, BLOCK_M) < end)[:, None] & (columns < n)[None, :]
        tl.store(pointers, gate.to(h.dtype.element_ty), mask=mask)
        tl.store(pointers + n, up.to(h.dtype.element_ty), mask=mask)


@triton.jit
def load_bias(bias, expert, col, width, stride_e, stride_col, BLOCK_N: tl.constexpr):
    """(BN) fp32 of an expert's bias, zero past ``width``."""
    columns = col + tl.arange(0, BLOCK_N)
    pointers = bias + expert.to(tl.int64) * stride_e + columns * stride_col
    return tl.load(pointers, mask=columns < width, other=0.0).to(tl.float32)
