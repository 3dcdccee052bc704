"""What the FP8 kernels add to `hopper.pipeline`: mainloops for operands with scales, and quantising epilogues.

BM, BN tile · BK k-block, 128 bytes · S stages

Scales per row and per column of the product (up_proj, down_proj_dgrad, up_proj_dgrad), or one for all of it
(down_proj_wgrad, up_proj_wgrad): `mma_mainloop`, which leaves the tensor cores to sum over the whole contraction, in
down_proj_wgrad and up_proj_wgrad over a chunk of it; the epilogue scales the sum once. Tensor cores accumulate FP8
products with some 14 bits: at a contraction of 7168 that adds an error of .2%, where rounding the operands has 3.7%.

Block scales (down_proj): `scaled_mainloop`, ``acc += (row scale x weight scale) * (A B of one k-block)``. The product
of each k-block is scaled and added to an fp32 accumulator by CUDA cores: by one consumer while the tensor cores work
for the other. A tile is two halves of 128 columns, each within one block of the weight's scales: the product of a half
takes 64 registers of a thread, beside 128 of the accumulator.

The pipeline moves bytes: for it, two FP8 values of a row are one element of the layer's 16-bit dtype, so that BK is
that of the 16-bit kernels, whose producer, scheduler and stages serve here. `operand` views a stage as e4m3 again.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilemoe.kernels.experts.formats.fp8 import BLOCK as _BLOCK
from tilemoe.kernels.experts.formats.fp8 import LARGEST as _LARGEST
from tilemoe.kernels.experts.formats.fp8 import SMALLEST_SCALE as _SMALLEST_SCALE
from tilemoe.kernels.experts.hopper.gemm_gather_act import load_tokens
from tilemoe.kernels.experts.hopper.gluon_compat import reinterpret
from tilemoe.kernels.experts.hopper.pipeline import (
    EPILOGUE_N,
    RAGGED_EXTENT,
    WARPGROUP_M,
    consumer_release_previous,
    consumer_wait,
    epilogue_slices,
    fence_and_store,
    halves,
    store_slice,
)

BLOCK = gl.constexpr(_BLOCK)  # columns of half a tile, and FP8 values of a k-block
LARGEST = gl.constexpr(_LARGEST)
SMALLEST_SCALE = gl.constexpr(_SMALLEST_SCALE)


@gluon.jit
def operand(buffer, ROWS: gl.constexpr):
    """A stage's buffer (ROWS, BK) of a 16-bit dtype, viewed as (ROWS, BLOCK) e4m3."""
    return reinterpret(buffer, gl.float8e4nv, [ROWS, BLOCK], gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def zero_half():
    """(WARPGROUP_M, BLOCK) fp32: the accumulator of half a tile's columns."""
    return gl.zeros([WARPGROUP_M, BLOCK], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32]))


@gluon.jit
def scale_pointers(scale, expert, left_column, right_column, width, stride_e, stride_out):
    """Pointers to the first scales along the contraction at two columns; scale (E, width / BLOCK, in / BLOCK).

    A right column past ``width`` takes the last one's: what it scales is not stored.
    """
    of_expert = scale + expert.to(gl.int64) * stride_e
    right_block = gl.minimum(right_column // BLOCK, width // BLOCK - 1)
    return of_expert + left_column // BLOCK * stride_out, of_expert + right_block * stride_out


@gluon.jit
def scaled_mainloop(ring, row_scale, weight_scales, stride_in, step, steps, CONSUMER: gl.constexpr):
    """Returns (this consumer's accumulator as four slices (WARPGROUP_M, EPILOGUE_N) fp32, left to right; next step).

    row_scale (S, BM): a scale for each row of a stage. weight_scales: see `scale_pointers`; their stride from one
    k-block to the next is ``stride_in``.
    """
    a_smem, b_smem, _full, empty = ring
    left_pointer, right_pointer = weight_scales
    left, right, product = zero_half(), zero_half(), zero_half()
    of_rows: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    for k in range(steps):
        # Loaded ahead: needed only when the wgmma is done, which hides the latency.
        left_weight, right_weight = gl.load(left_pointer + k * stride_in), gl.load(right_pointer + k * stride_in)
        stage = consumer_wait(ring, step)
        a = operand(a_smem.index(stage), a_smem.shape[1]).slice(CONSUMER * WARPGROUP_M, WARPGROUP_M)
        b = operand(b_smem.index(stage), 2 * BLOCK)
        product = warpgroup_mma(a, b.slice(0, BLOCK).permute([1, 0]), product, use_acc=False, is_async=True)
        scale = row_scale.index(stage).slice(CONSUMER * WARPGROUP_M, WARPGROUP_M).load(of_rows)
        product = warpgroup_mma_wait(0, deps=(product,))
        left += product * (scale * left_weight)[:, None]
        product = warpgroup_mma(a, b.slice(BLOCK, BLOCK).permute([1, 0]), product, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        right += product * (scale * right_weight)[:, None]
        step += 1
    return halves(left, WARPGROUP_M, BLOCK) + halves(right, WARPGROUP_M, BLOCK), step


@gluon.jit
def zero_tile():
    """(WARPGROUP_M, 2 * BLOCK) fp32: the accumulator of a whole tile's columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK, 32])
    return gl.zeros([WARPGROUP_M, 2 * BLOCK], gl.float32, layout)


@gluon.jit
def row_scale_pointers(scale, token_of_row, row, end):
    """Pointers (WARPGROUP_M) to the scales of the rows from ``row`` on; scale (., 1) of what `load_tokens` gathers."""
    rows = gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, zero_tile().type.layout))
    return scale + load_tokens(token_of_row, row, end, rows)


@gluon.jit
def issue_mma(ring, step, acc, ACCUMULATE: gl.constexpr, CONSUMER: gl.constexpr):
    """As `pipeline.issue_mma`, of FP8 operands."""
    a_smem, b_smem, _full, _empty = ring
    stage = consumer_wait(ring, step)
    a = operand(a_smem.index(stage), a_smem.shape[1]).slice(CONSUMER * WARPGROUP_M, WARPGROUP_M)
    b = operand(b_smem.index(stage), 2 * BLOCK).permute([1, 0])
    return warpgroup_mma(a, b, acc, use_acc=ACCUMULATE, is_async=True)


@gluon.jit
def mma_mainloop(ring, row_scale, step, steps, pending_release, CONSUMER: gl.constexpr):
    """Returns (unscaled accumulator (WARPGROUP_M, 2 * BLOCK) fp32, the rows' scales (WARPGROUP_M), next step).

    As `pipeline.mma_mainloop`. row_scale: see `row_scale_pointers`.
    """
    acc = issue_mma(ring, step, zero_tile(), False, CONSUMER)
    scale = gl.load(row_scale)  # behind the first wgmma, which hides the load of the tokens; the others hide this one
    if pending_release:
        tma.store_wait(0)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # never blocks: makes acc a value that the loop can carry
    consumer_release_previous(ring, step, pending_release)
    for _ in range(1, steps):
        step += 1
        acc = issue_mma(ring, step, acc, True, CONSUMER)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        consumer_release_previous(ring, step)
    step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release_previous(ring, step)
    return acc, scale, step


# Epilogue


@gluon.jit
def scale_slices(acc, row_scale, column_scale, buffer):
    """acc times its rows' scales (WARPGROUP_M) and its columns' (2 * BLOCK), as four slices from left to right.

    The columns' scales pass through ``buffer`` (2 * BLOCK) of shared memory.
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
def add_bias(value, bias, expert, stride, column, width):
    """A slice plus the expert's bias from ``column`` on, which counts as zero past ``width``."""
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
def store_slices(slices, out, end, row, col, PARTED: gl.constexpr, staging, CONSUMER: gl.constexpr):
    """Start the TMA stores of a tile's slices through two buffers. PARTED: two slices for each of out's two parts."""
    last = RAGGED_EXTENT - end + row
    for i in gl.static_range(4):
        tma.store_wait(1)
        if PARTED:
            place = [RAGGED_EXTENT, end, last, i // 2, col + i % 2 * EPILOGUE_N]
        else:
            place = [RAGGED_EXTENT, end, last, col + i * EPILOGUE_N]
        store_slice(out, place, slices[i], staging.index(2 * CONSUMER + i % 2))


@gluon.jit
def largest_of(parts):
    """The largest magnitude of each row, over a tuple of slices."""
    largest = gl.max(gl.abs(parts[0]), axis=1)
    for i in gl.static_range(1, len(parts)):
        largest = gl.maximum(largest, gl.convert_layout(gl.max(gl.abs(parts[i]), axis=1), largest.type.layout))
    return largest


@gluon.jit
def store_quantized(parts, data, scale, end, row, col, width, staged):
    """Quantise BLOCK columns of each row, given as slices of equal width; start their TMA store, and store the scales.

    staged: a buffer that is free once at most one TMA store is in flight. data: descriptor of (R_max, width / 2) of 16
    bits; scale (R_max, width / BLOCK). A block past ``width`` is not stored.
    """
    largest = largest_of(parts)
    of_row = gl.where(largest == 0, 1.0, gl.maximum(largest / LARGEST, SMALLEST_SCALE))
    inverse = 1.0 / of_row
    WIDTH: gl.constexpr = BLOCK // len(parts)
    tma.store_wait(1)
    values = operand(staged, WARPGROUP_M)
    for i in gl.static_range(len(parts)):
        factor = gl.convert_layout(inverse, gl.SliceLayout(1, parts[i].type.layout))
        values.slice(i * WIDTH, WIDTH, 1).store((parts[i] * factor[:, None]).to(gl.float8e4nv))
    fence_and_store(data, [RAGGED_EXTENT, end, RAGGED_EXTENT - end + row, col // 2], staged)
    rows = row + gl.arange(0, WARPGROUP_M, of_row.type.layout)
    gl.store(scale + rows.to(gl.int64) * (width // BLOCK) + col // BLOCK, of_row, mask=(rows < end) & (col < width))
