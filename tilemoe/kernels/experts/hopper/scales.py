"""Additions to `pipeline` for FP8 operands: their scales, a mainloop that applies them, an epilogue that quantises.

BM, BN tile · BK k-block, 128 bytes · S stages

SCALES "rows" (up_proj, down_proj_dgrad, up_proj_dgrad): a scale for each row and each column of the product. SCALES
"experts" (down_proj_wgrad, up_proj_wgrad): one scale for the product. The mainloop is `pipeline.mma_mainloop`: tensor
cores sum over the whole contraction, or in a weight gradient over a chunk of it, and the sum is scaled once, before
the epilogue. Tensor cores accumulate FP8 products with some 14 bits: with a contraction of 7168 that adds an error of
.2%, while rounding the operands adds 3.7%.

SCALES "blocks" (down_proj): the mainloop is `scaled_mainloop`, ``acc += (row scale x weight scale) * (A B of one
k-block)``. CUDA cores scale each k-block's product and add it to an fp32 accumulator, for one consumer while the tensor
cores work for the other. A tile is two halves of 128 columns, each within one block of the weight's scales: the product
of a half takes 64 registers per thread, besides 128 for the accumulator.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilemoe.kernels.experts.formats.fp8 import BLOCK as _BLOCK
from tilemoe.kernels.experts.formats.fp8 import LARGEST as _LARGEST
from tilemoe.kernels.experts.formats.fp8 import SMALLEST_SCALE as _SMALLEST_SCALE
from tilemoe.kernels.experts.hopper.pipeline import (
    EPILOGUE_N,
    RAGGED_EXTENT,
    WARPGROUP_M,
    begin_mainloop,
    consumer_wait,
    epilogue_slices,
    fence_and_store,
    halves,
    load_tokens,
    mma_mainloop,
    operand,
    release_b,
    zero_accumulator,
)

BLOCK = gl.constexpr(_BLOCK)  # columns of half a tile, and FP8 values of a k-block
LARGEST = gl.constexpr(_LARGEST)
SMALLEST_SCALE = gl.constexpr(_SMALLEST_SCALE)


@gluon.jit
def row_scale_pointers(scale, token_of_row, row, end):
    """Pointers (WARPGROUP_M) to the scales of the rows from ``row`` on; scale (., 1) is indexed by `load_tokens`."""
    of_rows: gl.constexpr = gl.SliceLayout(1, zero_accumulator(2 * BLOCK, "rows").type.layout)
    return scale + load_tokens(token_of_row, row, end, gl.arange(0, WARPGROUP_M, of_rows))


@gluon.jit
def row_scaled_mainloop(ring, row_scale, column_scale, buffer, step, steps, pending_release, CONSUMER: gl.constexpr):
    """Returns (this consumer's scaled accumulator as four slices (WARPGROUP_M, EPILOGUE_N) fp32, next step).

    row_scale: see `row_scale_pointers`. column_scale, buffer: see `scale_slices`. Other arguments: see `mma_mainloop`.
    """
    acc = begin_mainloop(ring, step, CONSUMER, 2 * BLOCK, True, True, "rows")
    of_rows = gl.load(row_scale)  # the first wgmma hides the load of the tokens before it, the others hide this load
    acc, step = mma_mainloop(ring, acc, step, steps, pending_release, CONSUMER, 2 * BLOCK, True, True, "rows")
    return scale_slices(acc, of_rows, column_scale, buffer), step


@gluon.jit
def scale_slices(acc, row_scale, column_scale, buffer):
    """acc times the scales of its rows (WARPGROUP_M) and columns (2 * BLOCK), as four slices from left to right.

    The columns' scales are distributed through ``buffer`` (2 * BLOCK) in shared memory.
    """
    first, second, third, fourth = epilogue_slices(acc, 2 * BLOCK)
    buffer.store(column_scale)
    rows = gl.convert_layout(row_scale, gl.SliceLayout(1, first.type.layout))[:, None]
    of_columns: gl.constexpr = gl.SliceLayout(0, first.type.layout)
    return (
        first * (rows * buffer.slice(0, EPILOGUE_N).load(of_columns)[None, :]),
        second * (rows * buffer.slice(EPILOGUE_N, EPILOGUE_N).load(of_columns)[None, :]),
        third * (rows * buffer.slice(2 * EPILOGUE_N, EPILOGUE_N).load(of_columns)[None, :]),
        fourth * (rows * buffer.slice(3 * EPILOGUE_N, EPILOGUE_N).load(of_columns)[None, :]),
    )


@gluon.jit
def new_row_smem(STAGES: gl.constexpr, ROWS: gl.constexpr):
    """(STAGES, ROWS) fp32 of shared memory for block scales: one for each row of A in each stage."""
    return gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def scale_pointers(scale, expert, left_column, right_column, width, stride_e, stride_out):
    """Pointers to the first scales along the contraction at two columns; scale (E, width / BLOCK, in / BLOCK).

    A right column past ``width`` uses the last column's scale: its results are not stored.
    """
    of_expert = scale + expert.to(gl.int64) * stride_e
    right_block = gl.minimum(right_column // BLOCK, width // BLOCK - 1)
    return of_expert + left_column // BLOCK * stride_out, of_expert + right_block * stride_out


@gluon.jit
def scaled_mainloop(
    ring, b_ring, row_scale, weight_scales, stride_in, step, steps, phase, arrivals, CONSUMER: gl.constexpr
):
    """Returns (this consumer's accumulator as four slices (WARPGROUP_M, EPILOGUE_N) fp32, left to right; next step).

    b_ring, phase, arrivals: for a stationary weight (`gemm_stationary`), where each stage of A belongs to one consumer.
    None: a stage has A and B, and the consumers share A's rows.
    row_scale (S, rows of A): a scale for each row of a stage. weight_scales: from `scale_pointers`; ``stride_in`` is
    their stride from one k-block to the next.
    """
    a_smem, b_smem, _full, empty = ring
    left_pointer, right_pointer = weight_scales
    left, right = zero_accumulator(BLOCK, "blocks"), zero_accumulator(BLOCK, "blocks")
    product = zero_accumulator(BLOCK, "blocks")
    of_rows: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    for k in range(steps):
        # Loaded ahead: they are needed only after the wgmma, which hides the latency.
        left_weight, right_weight = gl.load(left_pointer + k * stride_in), gl.load(right_pointer + k * stride_in)
        stage = consumer_wait(ring, step)
        a, scales = operand(a_smem.index(stage), a_smem.shape[1], "blocks"), row_scale.index(stage)
        if b_ring is None:
            a = a.slice(CONSUMER * WARPGROUP_M, WARPGROUP_M)
            scales = scales.slice(CONSUMER * WARPGROUP_M, WARPGROUP_M)
            b = operand(b_smem.index(stage), 2 * BLOCK, "blocks")
        else:
            mbarrier.wait(b_ring[2].index(k), phase)
            b = operand(b_smem.index(k), 2 * BLOCK, "blocks")
        product = warpgroup_mma(a, b.slice(0, BLOCK).permute([1, 0]), product, use_acc=False, is_async=True)
        scale = scales.load(of_rows)
        product = warpgroup_mma_wait(0, deps=(product,))
        left += product * (scale * left_weight)[:, None]
        if b_ring is not None:
            left = warpgroup_mma_wait(0, deps=(left,))  # never blocks: orders this sum before the next wgmma is issued
        product = warpgroup_mma(a, b.slice(BLOCK, BLOCK).permute([1, 0]), product, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        if b_ring is not None:
            release_b(b_ring, k, arrivals)
        right += product * (scale * right_weight)[:, None]
        step += 1
    return halves(left, WARPGROUP_M, BLOCK) + halves(right, WARPGROUP_M, BLOCK), step


# Epilogue


@gluon.jit
def add_bias(value, bias, expert, stride, column, width):
    """A slice plus the expert's bias from ``column`` on; the bias is zero past ``width``."""
    columns = column + gl.arange(0, EPILOGUE_N, gl.SliceLayout(0, value.type.layout))
    entries = gl.load(bias + expert.to(gl.int64) * stride + columns, mask=columns < width, other=0.0)
    return value + entries.to(gl.float32)[None, :]


@gluon.jit
def add_bias_to_slices(slices, bias, expert, stride, left_column, right_column, width):
    """`add_bias` to four slices: two from ``left_column`` on, and two from ``right_column``."""
    first = add_bias(slices[0], bias, expert, stride, left_column, width)
    second = add_bias(slices[1], bias, expert, stride, left_column + EPILOGUE_N, width)
    third = add_bias(slices[2], bias, expert, stride, right_column, width)
    fourth = add_bias(slices[3], bias, expert, stride, right_column + EPILOGUE_N, width)
    return first, second, third, fourth


@gluon.jit
def largest_of(parts):
    """The largest magnitude of each row over all slices of a tuple."""
    largest = gl.max(gl.abs(parts[0]), axis=1)
    for i in gl.static_range(1, len(parts)):
        largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(parts[i]), axis=1), largest.type.layout))
    return largest


@gluon.jit
def store_quantized(parts, data, scale, end, row, col, width, staged):
    """Quantise BLOCK columns of each row, given as slices of equal width; start their TMA store, and store the scales.

    staged: a buffer that is free once at most one TMA store is in flight. data: a descriptor of 16-bit elements
    (R_max, width / 2); scale (R_max, width / BLOCK). A block past ``width`` is not stored.
    """
    largest = largest_of(parts)
    of_row = gl.where(largest == 0, 1.0, gl.maximum(largest / LARGEST, SMALLEST_SCALE))
    inverse = 1.0 / of_row
    WIDTH: gl.constexpr = BLOCK // len(parts)
    tma.store_wait(1)
    values = operand(staged, WARPGROUP_M, "rows")
    for i in gl.static_range(len(parts)):
        factor = gl.convert_layout(inverse, gl.SliceLayout(1, parts[i].type.layout))
        values.slice(i * WIDTH, WIDTH, 1).store((parts[i] * factor[:, None]).to(gl.float8e4nv))
    fence_and_store(data, [RAGGED_EXTENT, end, RAGGED_EXTENT - end + row, col // 2], staged)
    rows = row + gl.arange(0, WARPGROUP_M, of_row.type.layout)
    gl.store(scale + rows.to(gl.int64) * (width // BLOCK) + col // BLOCK, of_row, mask=(rows < end) & (col < width))
