"""Weight-stationary down_proj and up_proj_dgrad for short contractions: ``out_r = rows_r weight_e (+ bias_e)``, like
`gemm_pingpong`.

E experts · R_max static row capacity · BN tile columns · BK k-block · S stages of A · B_STAGES k-blocks of B
width_in, width_out: the GEMM's K and N, of one expert's weight

With so few k-blocks, wgmma cannot hide a tile's loads: down_proj with n = 256 needs twice the bandwidth of L2. So a CTA
keeps BN columns of an expert's weight, over the whole contraction, in shared memory and streams only A. A work item
is these columns for up to CHUNK_M rows, in blocks of 64 rows. Items are walked with columns innermost: neighbouring
CTAs have the same rows and different columns, so that A is read from DRAM once.

There is one producer warp; two consumer warp groups alternate blocks. ``b_ring`` is ``ring`` with barriers for B: each
k-block of B has a ``b_full`` and a ``b_empty``, whose phases flip with each item of the CTA. An item's last blocks
release B one k-block at a time, and the next item's k-blocks are loaded in their place meanwhile.

16-bit operands (SCALES "none"): `stationary_producer` and `stationary_consumer`, a ping-pong schedule.
FP8 operands, as in `gemm_cooperative`: `scaled_producer` and `scaled_consumer`. No barrier orders the consumers: while
one applies scales, the tensor cores work for the other. So the k-blocks of two blocks must divide the stages
(`configs.GEMMS`); else a consumer would wait for a stage more than one phase ahead, and mbarriers know only a phase's
parity. Consumers that apply block scales have no registers to decode work items, so the producer does it for them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilemoe.kernels.experts.hopper import configs
from tilemoe.kernels.experts.hopper.gemm_gather_act import load_weight
from tilemoe.kernels.experts.hopper.gluon_compat import tma_load
from tilemoe.kernels.experts.hopper.pipeline import (
    BK,
    CONSUMERS,
    PAIR_LAYOUT,
    WARPGROUP_M,
    b_operand,
    consumer_release_previous,
    consumer_wait,
    epilogue_slices,
    load_columns,
    new_barriers,
    new_column_smem,
    new_staging,
    new_tile_info,
    operand,
    producer_acquire,
    publish_tile,
    receive_tile,
    release_b,
    store_slices,
    tile_coords,
    zero_accumulator,
)
from tilemoe.kernels.experts.hopper.scales import (
    BLOCK,
    add_bias_to_slices,
    new_row_smem,
    row_scale_pointers,
    scale_pointers,
    scale_slices,
    scaled_mainloop,
)

CHUNK_M = gl.constexpr(configs.STATIONARY_M)
STEPS = gl.constexpr(4)  # most k-blocks of an FP8 contraction
WARP_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def new_rings(weight, dtype: gl.constexpr, STAGES: gl.constexpr, B_STAGES: gl.constexpr):
    """(ring, b_ring). Two arrivals release a k-block of B: one by each of an item's last two blocks of rows, or both by
    its only block."""
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPGROUP_M, BK], gl.NVMMASharedLayout(128, 16, 2))
    b_smem = gl.allocate_shared_memory(dtype, [B_STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    ring = (a_smem, b_smem, new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    return ring, (a_smem, b_smem, new_barriers(B_STAGES, 1), new_barriers(B_STAGES, 2))


@gluon.jit
def item_coords(index, row_tiles, column_tiles, tiles, row_start_of_expert, BN: gl.constexpr):
    """(expert, first row, end of the expert's rows, first column, number of blocks) of a work item; see `tile_coords`.

    If an expert has several chunks of rows, its blocks are divided evenly among them.
    """
    expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, BN, 0)
    start = gl.load(row_start_of_expert + expert)
    blocks = gl.cdiv(end - start, WARPGROUP_M)
    chunks = gl.maximum(gl.cdiv(end - start, CHUNK_M), 1)
    chunk = (row - start) // CHUNK_M
    first = chunk * blocks // chunks
    return expert, start + first * WARPGROUP_M, end, col, (chunk + 1) * blocks // chunks - first


@gluon.jit
def load_rows(rows, row, k, ring, step):
    """Wait until a stage is released, then start the TMA load of one k-block of a block's A."""
    a_smem, _b_smem, full, _empty = ring
    stage = producer_acquire(ring, step)
    mbarrier.expect(full.index(stage), rows.block_type.nbytes)
    tma_load(rows, [row, k], full.index(stage), a_smem.index(stage))


@gluon.jit
def load_b(weight, expert, k_block, col, b_ring, item, B_K_MAJOR: gl.constexpr):
    """Wait until the item before has released the buffer, then start the TMA load of one k-block of an item's B."""
    _a_smem, _b_smem, b_full, b_empty = b_ring
    mbarrier.wait(b_empty.index(k_block), (item & 1) ^ 1)
    mbarrier.expect(b_full.index(k_block), weight.block_type.nbytes)
    load_weight(weight, expert, k_block * BK, col, b_ring, k_block, B_K_MAJOR)


@gluon.jit
def stationary_producer(
    rows, weight, tiles, num_tiles, row_start_of_expert, width_in, width_out, ring, b_ring,
    BN: gl.constexpr, B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Producer, one warp: for each item it loads B and the first block's A, by k-block, then the other blocks' A."""
    column_tiles = gl.cdiv(width_out, BN)
    row_tiles = gl.load(num_tiles)
    total = row_tiles * column_tiles
    step, item = 0, 0
    expert, row, _end, col, count = item_coords(
        gl.program_id(0), row_tiles, column_tiles, tiles, row_start_of_expert, BN
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        next_expert, next_row, _next_end, next_col, next_count = item_coords(
            index + gl.num_programs(0), row_tiles, column_tiles, tiles, row_start_of_expert, BN
        )
        for k in range(0, width_in, BK):
            load_b(weight, expert, k // BK, col, b_ring, item, B_K_MAJOR)
            load_rows(rows, row, k, ring, step)
            step += 1
        block = 1
        while block < count:  # not `for`: Triton 3.6 assumes a value that only bounds an inner loop is loop-invariant
            for k in range(0, width_in, BK):
                load_rows(rows, row + block * WARPGROUP_M, k, ring, step)
                step += 1
            block += 1
        item += 1  # noqa: SIM113  # Gluon has no enumerate
        expert, row, col, count = next_expert, next_row, next_col, next_count


@gluon.jit
def issue_mma_stationary(
    ring, b_ring, step, k_block, phase, acc,
    ACCUMULATE: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """`pipeline.issue_mma` for a streamed k-block of A and a resident one of B. phase: that of ``b_full``."""
    a_smem, b_smem, b_full, _b_empty = b_ring
    stage = consumer_wait(ring, step)
    mbarrier.wait(b_full.index(k_block), phase)
    a, b = operand(a_smem.index(stage), WARPGROUP_M, SCALES), b_operand(b_smem, k_block, BN, B_K_MAJOR, SCALES)
    return warpgroup_mma(a, b, acc, use_acc=ACCUMULATE, is_async=True)


@gluon.jit
def mma_mainloop_stationary(
    ring, b_ring, step, steps, phase, arrivals, order_of_other,
    BN: gl.constexpr, B_K_MAJOR: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """The accumulator (64, BN) fp32 of a block over ``steps`` >= 1 stages. arrivals: see `release_b`.

    It hands the tensor cores to the other consumer like `gemm_pingpong.mma_mainloop_blocks`, unless order_of_other is
    None.
    """
    acc = zero_accumulator(BN, SCALES)
    acc = issue_mma_stationary(ring, b_ring, step, 0, phase, acc, False, BN, B_K_MAJOR, SCALES)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # as in `pipeline.mma_mainloop`
    for k_block in range(1, steps):
        step += 1
        acc = issue_mma_stationary(ring, b_ring, step, k_block, phase, acc, True, BN, B_K_MAJOR, SCALES)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        consumer_release_previous(ring, step)
        release_b(b_ring, k_block - 1, arrivals)
    step += 1
    if order_of_other is not None:
        mbarrier.arrive(order_of_other, count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release_previous(ring, step)
    release_b(b_ring, steps - 1, arrivals)
    return acc


@gluon.jit
def arrivals_of(block, count):
    """How often a block arrives at ``b_empty``: an item's last two once each, a single block twice, others never."""
    return gl.where(count == 1, 2, gl.where(block >= count - 2, 1, 0))


@gluon.jit
def stationary_consumer(
    out, bias, stride_bias, tiles, num_tiles, row_start_of_expert, width_in, width_out, ring, b_ring, staging,
    bias_smem, mma_order, CONSUMER: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Consumer: it computes every other block of the CTA's items. mma_order: as in `gemm_pingpong`."""
    column_tiles = gl.cdiv(width_out, BN)
    row_tiles = gl.load(num_tiles)
    total = row_tiles * column_tiles
    steps = gl.cdiv(width_in, BK)
    phase = 1 - CONSUMER  # the first consumer's first wait passes at once
    before, item = 0, 0  # blocks and items that the CTA has finished
    expert, first, end, col, count = item_coords(
        gl.program_id(0), row_tiles, column_tiles, tiles, row_start_of_expert, BN
    )
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        next_expert, next_first, next_end, next_col, next_count = item_coords(
            index + gl.num_programs(0), row_tiles, column_tiles, tiles, row_start_of_expert, BN
        )
        bias_of_item = None
        if bias is not None:
            bias_of_item = bias_smem.index(CONSUMER)
            columns = col + gl.arange(0, BN, PAIR_LAYOUT)
            bias_of_item.store(load_columns(bias, expert, stride_bias, columns, width_out).to(gl.float32))
        for block in range((before + CONSUMER) & 1, count, CONSUMERS):
            mbarrier.wait(mma_order.index(CONSUMER), phase)
            phase ^= 1
            acc = mma_mainloop_stationary(
                ring, b_ring, (before + block) * steps, steps, item & 1, arrivals_of(block, count),
                mma_order.index(1 - CONSUMER), BN, B_K_MAJOR, "none",
            )  # fmt: skip
            row = first + block * WARPGROUP_M
            slices = epilogue_slices(acc, BN)
            store_slices(slices, out, bias_of_item, end, row, col, staging, CONSUMER, "none", B_K_MAJOR)
        before += count
        item += 1  # noqa: SIM113
        expert, first, end, col, count = next_expert, next_first, next_end, next_col, next_count
    tma.store_wait(0)


@gluon.jit
def load_row_scales(rows_scale, row, end, steps):
    """Issue the loads of a block's row scales: four tensors (WARPGROUP_M), one for each k-block.

    Rows past the end and k-blocks past the last repeat the last one.
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
    """Producer, one warp: `stationary_producer` that also fills row_scale (S, WARPGROUP_M) of each stage, unless None.

    tile_info of a block: (a number for expert, arrivals and phase of B, or -1 after the last block; row, end, column).
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
def scaled_consumer(
    out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin, width_in, width_out,
    ring, b_ring, scale_smem, tile_info, staging, CONSUMER: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Consumer: it computes every other block of the CTA's items. scale_smem, SCALES: see
    `gemm_cooperative.rows_consumer`."""
    steps = width_in // BK
    step = CONSUMER * steps
    block, row, end, col = receive_tile(ring, tile_info, step)
    while block >= 0:
        expert, arrivals, phase = block // 8, block // 2 % 4, block & 1
        if SCALES == "rows":
            columns = col + gl.arange(0, 2 * BLOCK, PAIR_LAYOUT)
            of_columns = load_columns(weight_scale, expert, stride_se, columns, width_out)
            of_rows = gl.load(row_scale_pointers(rows_scale, None, row, end))
            acc = mma_mainloop_stationary(ring, b_ring, step, steps, phase, arrivals, None, 2 * BLOCK, True, SCALES)
            slices = scale_slices(acc, of_rows, of_columns, scale_smem.index(CONSUMER))
        else:
            scales = scale_pointers(weight_scale, expert, col, col + BLOCK, width_out, stride_se, stride_sout)
            slices, _step = scaled_mainloop(
                ring, b_ring, scale_smem, scales, stride_sin, step, steps, phase, arrivals, CONSUMER
            )
        if bias is not None:
            slices = add_bias_to_slices(slices, bias, expert, stride_bias, col, col + BLOCK, width_out)
        store_slices(slices, out, None, end, row, col, staging, CONSUMER, "none", True)
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
    B_K_MAJOR: gl.constexpr,
    B_STAGES: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """down_proj and up_proj_dgrad with width_in <= B_STAGES * BK. Arguments are those of
    `gemm_pingpong.gemm_rows_kernel`, or for FP8 operands `gemm_cooperative.gemm_cooperative_kernel`, but tiles have
    CHUNK_M rows, and rows is a TMA descriptor."""
    ring, b_ring = new_rings(weight, rows.dtype, STAGES, B_STAGES)
    staging = new_staging(rows.dtype)
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    if SCALES == "none":
        bias_smem, mma_order = new_column_smem(BN), new_barriers(CONSUMERS, 1)
        gl.warp_specialize(
            [
                (stationary_consumer, (out, bias, stride_bias, tiles, num_tiles, row_start_of_expert, width_in,
                                       width_out, ring, b_ring, staging, bias_smem, mma_order, 0, BN, B_K_MAJOR)),
                (stationary_consumer, (out, bias, stride_bias, tiles, num_tiles, row_start_of_expert, width_in,
                                       width_out, ring, b_ring, staging, bias_smem, mma_order, 1, BN, B_K_MAJOR)),
                (stationary_producer, (rows, weight, tiles, num_tiles, row_start_of_expert, width_in, width_out, ring,
                                       b_ring, BN, B_K_MAJOR)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(B_STAGES == STEPS and STAGES >= 2 * STEPS, "see above")
        gl.static_assert(BN == 2 * BLOCK and B_K_MAJOR, "two blocks of scales")
        if SCALES == "rows":
            scale_smem = new_column_smem(BN)
            row_scale: gl.constexpr = None
        else:  # each stage has its rows' scales beside A
            scale_smem = new_row_smem(STAGES, WARPGROUP_M)
            row_scale = scale_smem
        tile_info = new_tile_info(STAGES)
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
