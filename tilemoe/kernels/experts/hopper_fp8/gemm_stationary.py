"""down_proj and up_proj_dgrad with a short contraction and FP8 operands, weight-stationary: ``out_r = rows_r
weight_e^T (+ bias_e)``.

E experts · R_max static row capacity · BN tile columns · S stages of A · B_STAGES k-blocks of B

Work items, their order, and B resident in shared memory: as in `hopper.gemm_stationary`. Operands: as in `gemm`. One
producer warp; the two consumer warp groups alternate blocks of 64 rows, but without a barrier that orders them: while
one applies scales, the tensor cores work for the other. Hence the k-blocks of two blocks must divide the stages
(`host.rows_tile`), or a consumer would wait for a stage more than one phase ahead, and mbarriers know only a phase's
parity. Consumers that apply block scales have no registers left to decode work items: the producer does it for them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilemoe.kernels.experts.hopper.gemm_stationary import (
    BUFFERS,
    arrivals_of,
    item_coords,
    load_b,
    load_rows,
    new_rings,
    release_b,
    store_columns,
)
from tilemoe.kernels.experts.hopper.pipeline import (
    BK,
    CONSUMERS,
    EPILOGUE_N,
    PAIR_LAYOUT,
    WARPGROUP_M,
    consumer_release_previous,
    consumer_wait,
    halves,
    load_columns,
    new_column_smem,
    new_tile_info,
    producer_acquire,
    publish_tile,
    receive_tile,
)
from tilemoe.kernels.experts.hopper_fp8.mainloop import (
    BLOCK,
    add_bias_to_slices,
    operand,
    row_scale_pointers,
    scale_pointers,
    scale_slices,
    zero_half,
    zero_tile,
)

STEPS = gl.constexpr(4)  # most k-blocks of the contraction
WARP_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def load_row_scales(rows_scale, row, end, steps):
    """Issue the loads of a block's row scales: four tensors (WARPGROUP_M), one for each k-block.

    Rows and k-blocks past the last repeat the last one.
    """
    rows = gl.maximum(gl.minimum(row + gl.arange(0, WARPGROUP_M, WARP_LAYOUT), end - 1), 0)
    pointers = rows_scale + rows.to(gl.int64) * steps
    last = steps - 1
    first, second = gl.load(pointers), gl.load(pointers + gl.minimum(1, last))
    return first, second, gl.load(pointers + gl.minimum(2, last)), gl.load(pointers + last)


@gluon.jit
def scaled_producer(
    rows, rows_scale, weight, tiles, num_tiles, row_start_of_expert, width_in, width_out, ring, b_ring, row_scale,
    tile_info, BN: gl.constexpr,
):  # fmt: skip
    """Producer, one warp: as `stationary_producer`, and fills row_scale (S, WARPGROUP_M) of each stage, unless None.

    tile_info of a block: (expert, arrivals and phase of B packed in one number, or -1 after the last block; row, end,
    column).
    """
    column_tiles = gl.cdiv(width_out, BN)
    row_tiles = gl.load(num_tiles)
    total = row_tiles * column_tiles
    steps = width_in // BK
    step, item = 0, 0
    expert, row, end, col, count = item_coords(
        gl.program_id(0), row_tiles, column_tiles, tiles, row_start_of_expert, BN
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        next_expert, next_row, next_end, next_col, next_count = item_coords(
            index + gl.num_programs(0), row_tiles, column_tiles, tiles, row_start_of_expert, BN
        )
        for block in range(count):
            if row_scale is not None:
                scales = load_row_scales(rows_scale, row, end, steps)
            stage = producer_acquire(ring, step)
            publish_tile(tile_info, stage, 8 * expert + 2 * arrivals_of(block, count) + (item & 1), row, end, col)
            for k_block in gl.static_range(STEPS):
                if k_block < steps:
                    if row_scale is not None:
                        row_scale.index(producer_acquire(ring, step)).store(scales[k_block])
                    if block == 0:
                        load_b(weight, expert, k_block, col, b_ring, item, True)
                    load_rows(rows, row, k_block * BK, ring, step)
                    step += 1
            row += WARPGROUP_M
        item += 1  # noqa: SIM113
        expert, row, end, col, count = next_expert, next_row, next_end, next_col, next_count
    for _ in gl.static_range(CONSUMERS):
        stage = producer_acquire(ring, step)
        publish_tile(tile_info, stage, -1, 0, 0, 0)
        mbarrier.arrive(ring[2].index(stage), count=1)
        step += steps


@gluon.jit
def scaled_mainloop_stationary(ring, b_ring, row_scale, weight_scales, stride_in, step, steps, phase, arrivals):
    """The accumulator of a block's rows, as four slices (WARPGROUP_M, EPILOGUE_N) fp32 from left to right.

    row_scale: (S, WARPGROUP_M) in shared memory. weight_scales, stride_in: as for `mainloop.scaled_mainloop`. phase: of
    ``b_full``. arrivals: as for `release_b`.
    """
    a_smem, b_smem, b_full, _b_empty = b_ring
    _a_smem, _b_smem, _full, empty = ring
    left_pointer, right_pointer = weight_scales
    left, right, product = zero_half(), zero_half(), zero_half()
    of_rows: gl.constexpr = gl.SliceLayout(1, left.type.layout)
    for k_block in range(steps):
        # Loaded ahead: needed only when the wgmma is done, which hides the latency.
        left_weight, right_weight = (
            gl.load(left_pointer + k_block * stride_in),
            gl.load(right_pointer + k_block * stride_in),
        )
        stage = consumer_wait(ring, step)
        mbarrier.wait(b_full.index(k_block), phase)
        a, b = operand(a_smem.index(stage), WARPGROUP_M), operand(b_smem.index(k_block), 2 * BLOCK)
        product = warpgroup_mma(a, b.slice(0, BLOCK).permute([1, 0]), product, use_acc=False, is_async=True)
        scale = row_scale.index(stage).load(of_rows)
        product = warpgroup_mma_wait(0, deps=(product,))
        left += product * (scale * left_weight)[:, None]
        left = warpgroup_mma_wait(0, deps=(left,))  # never blocks: orders this sum before the next wgmma is issued
        product = warpgroup_mma(a, b.slice(BLOCK, BLOCK).permute([1, 0]), product, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(empty.index(stage), count=1)
        release_b(b_ring, k_block, arrivals)
        right += product * (scale * right_weight)[:, None]
        step += 1
    return halves(left, WARPGROUP_M, BLOCK) + halves(right, WARPGROUP_M, BLOCK)


@gluon.jit
def issue_mma_stationary(ring, b_ring, step, k_block, phase, acc, ACCUMULATE: gl.constexpr):
    """As `mainloop.issue_mma`, of a streamed k-block of A and a resident one of B."""
    a_smem, b_smem, b_full, _b_empty = b_ring
    stage = consumer_wait(ring, step)
    mbarrier.wait(b_full.index(k_block), phase)
    a, b = operand(a_smem.index(stage), WARPGROUP_M), operand(b_smem.index(k_block), 2 * BLOCK)
    return warpgroup_mma(a, b.permute([1, 0]), acc, use_acc=ACCUMULATE, is_async=True)


@gluon.jit
def mma_mainloop_stationary(ring, b_ring, row_scale, step, steps, phase, arrivals):
    """(unscaled accumulator (WARPGROUP_M, 2 * BLOCK) fp32 of a block's rows, their scales (WARPGROUP_M)).

    row_scale: see `mainloop.row_scale_pointers`. phase, arrivals: as for `scaled_mainloop_stationary`.
    """
    scale = gl.load(row_scale)
    acc = issue_mma_stationary(ring, b_ring, step, 0, phase, zero_tile(), False)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # as in `mainloop.mma_mainloop`
    for k_block in range(1, steps):
        step += 1
        acc = issue_mma_stationary(ring, b_ring, step, k_block, phase, acc, True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        consumer_release_previous(ring, step)
        release_b(b_ring, k_block - 1, arrivals)
    step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release_previous(ring, step)
    release_b(b_ring, steps - 1, arrivals)
    return acc, scale


@gluon.jit
def scaled_consumer(
    out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin, width_in, width_out,
    ring, b_ring, scale_smem, tile_info, staging, CONSUMER: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Consumer: every other block of the CTA's work items. scale_smem, SCALES: see `gemm.rows_consumer`."""
    steps = width_in // BK
    step = CONSUMER * steps
    block, row, end, col = receive_tile(ring, tile_info, step)
    while block >= 0:
        expert, arrivals, phase = block // 8, block // 2 % 4, block & 1
        if SCALES == "rows":
            columns = col + gl.arange(0, 2 * BLOCK, PAIR_LAYOUT)
            of_columns = load_columns(weight_scale, expert, stride_se, columns, width_out)
            of_rows = row_scale_pointers(rows_scale, None, row, end)
            acc, of_rows = mma_mainloop_stationary(ring, b_ring, of_rows, step, steps, phase, arrivals)
            slices = scale_slices(acc, of_rows, of_columns, scale_smem.index(CONSUMER))
        else:
            scales = scale_pointers(weight_scale, expert, col, col + BLOCK, width_out, stride_se, stride_sout)
            slices = scaled_mainloop_stationary(
                ring, b_ring, scale_smem, scales, stride_sin, step, steps, phase, arrivals
            )
        if bias is not None:
            slices = add_bias_to_slices(slices, bias, expert, stride_bias, col, col + BLOCK, width_out)
        store_columns(slices, out, None, row, end, col, staging, CONSUMER)
        step += CONSUMERS * steps
        block, row, end, col = receive_tile(ring, tile_info, step)
    tma.store_wait(0)


@gluon.jit
def gemm_stationary_kernel(
    rows,
    rows_scale,
    weight,
    weight_scale,
    bias,
    out,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    row_start_of_expert,
    width_in,
    width_out,
    stride_se,
    stride_sout,
    stride_sin,
    stride_bias,
    SCALES: gl.constexpr,
    B_STAGES: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """down_proj and up_proj_dgrad with width_in <= B_STAGES * BK: as `gemm.gemm_rows_kernel`, but rows is a TMA
    descriptor."""
    gl.static_assert(B_STAGES == STEPS and STAGES >= 2 * STEPS, "see above")
    gl.static_assert(BN == 2 * BLOCK, "two blocks of scales")
    ring, b_ring = new_rings(weight, rows.dtype, STAGES, B_STAGES)
    if SCALES == "rows":
        scale_smem = new_column_smem(BN)
        row_scale: gl.constexpr = None
    else:  # the row scales of each stage of A
        scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, WARPGROUP_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        row_scale = scale_smem
    staging = gl.allocate_shared_memory(
        rows.dtype, [BUFFERS * CONSUMERS, WARPGROUP_M, EPILOGUE_N], gl.NVMMASharedLayout(128, 16, 2)
    )
    tile_info = new_tile_info(STAGES)
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (scaled_consumer, (out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin,
                               width_in, width_out, ring, b_ring, scale_smem, tile_info, staging, 0, SCALES)),
            (scaled_consumer, (out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin,
                               width_in, width_out, ring, b_ring, scale_smem, tile_info, staging, 1, SCALES)),
            (scaled_producer, (rows, rows_scale, weight, tiles, num_tiles, row_start_of_expert, width_in, width_out,
                               ring, b_ring, row_scale, tile_info, BN)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
