"""Ping-pong down_proj and up_proj_dgrad: ``out_r = rows_r weight_e (+ bias_e)``.

E experts · R_max static row capacity · BN tile columns · BK k-block · S stages
width_in, width_out: the GEMM's K and N, of one expert's weight

One producer warp loads both operands by TMA. Two consumer warp groups alternate tiles, so that the epilogue of one
overlaps the mainloop of the other, which has the tensor cores and all stages to itself. ``mma_order`` is two mbarriers,
like CUTLASS's OrderedSequenceBarrier: a consumer starts its mainloop once the other has seen its last stage full.
Earlier it would wait for a stage more than one phase ahead, and mbarriers know only a phase's parity.

A tile is up to three blocks of 64 rows with an accumulator each, fewer at an expert's end. An expert's last four blocks
are two tiles of two: of tiles of three and one, the small one would load the most for its products. Static scheduler,
column tiles innermost; wide outputs are walked in bands of columns (`tile_place`), to read weights from L2. Weight
descriptors are those of `gemm_gather_act`.
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
    EPILOGUE_N,
    RAGGED_EXTENT,
    THREAD_LAYOUT,
    WARPGROUP_M,
    b_operand,
    consumer_release_previous,
    consumer_wait,
    halves,
    load_columns,
    new_barriers,
    new_column_smem,
    new_tile_info,
    producer_acquire,
    publish_tile,
    receive_tile,
    store_slice,
    tile_coords,
    tile_place,
    zero_accumulator,
)

BLOCKS = gl.constexpr(configs.PINGPONG_BLOCKS)
BUFFERS = gl.constexpr(4)  # staging buffers of a consumer, one for each epilogue slice of two blocks


@gluon.jit
def block_tile_coords(index, row_tiles, column_tiles, tiles, BN: gl.constexpr, BAND: gl.constexpr):
    """(expert, first row, end of the expert's rows, first column, number of blocks) of a tile; see `tile_coords`."""
    expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, BN, BAND)
    tile, _column_tile = tile_place(index, row_tiles, column_tiles, BAND)
    has_before = (tile > 0) & (index < row_tiles * column_tiles)
    expert_before = gl.load(tiles[0] + gl.maximum(tile - 1, 0), mask=has_before, other=-1)
    remaining = gl.cdiv(end - row, WARPGROUP_M)
    takes_one = (remaining == 1) & (expert_before == expert)  # of four last blocks: take one from the tile before
    count = gl.where(takes_one | (remaining == BLOCKS + 1), 2, gl.minimum(remaining, BLOCKS))
    return expert, gl.where(takes_one, row - WARPGROUP_M, row), end, col, count


@gluon.jit
def load_blocks(rows, weight, expert, row, col, width_in, ring, step, COUNT: gl.constexpr, B_K_MAJOR: gl.constexpr):
    """Producer: fill the stages of a tile of COUNT blocks. Returns the next step."""
    a_smem, _b_smem, full, _empty = ring
    for k in range(0, width_in, BK):
        stage = producer_acquire(ring, step)
        mbarrier.expect(full.index(stage), COUNT * rows.block_type.nbytes + weight.block_type.nbytes)
        for block in gl.static_range(COUNT):
            tma_load(rows, [row + block * WARPGROUP_M, k], full.index(stage), a_smem.index(BLOCKS * stage + block))
        load_weight(weight, expert, k, col, ring, stage, B_K_MAJOR)
        step += 1
    return step


@gluon.jit
def pingpong_producer(
    rows, weight, tiles, num_tiles, width_in, width_out, ring, tile_info,
    BN: gl.constexpr, B_K_MAJOR: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Producer, one warp: A is ``rows`` (R_max, width_in), one TMA load for each block of 64 rows.

    tile_info: (first row, end of the expert's rows, first column, 4 * expert + number of blocks).
    """
    column_tiles = gl.cdiv(width_out, BN)
    row_tiles = gl.load(num_tiles)
    total = row_tiles * column_tiles
    step = 0
    expert, row, end, col, count = block_tile_coords(gl.program_id(0), row_tiles, column_tiles, tiles, BN, BAND)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        next_expert, next_row, next_end, next_col, next_count = block_tile_coords(
            index + gl.num_programs(0), row_tiles, column_tiles, tiles, BN, BAND
        )
        publish_tile(tile_info, producer_acquire(ring, step), row, end, col, 4 * expert + count)
        if count == 3:
            step = load_blocks(rows, weight, expert, row, col, width_in, ring, step, 3, B_K_MAJOR)
        elif count == 2:
            step = load_blocks(rows, weight, expert, row, col, width_in, ring, step, 2, B_K_MAJOR)
        else:
            step = load_blocks(rows, weight, expert, row, col, width_in, ring, step, 1, B_K_MAJOR)
        expert, row, end, col, count = next_expert, next_row, next_end, next_col, next_count


@gluon.jit
def mma_mainloop_blocks(
    ring, step, steps, order_of_other, COUNT: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr
):
    """Returns three accumulators (64, BN) fp32, the first COUNT computed over ``steps`` >= 1 stages, and the next step.

    It lets the other consumer start its mainloop once the last stage is full, while its own last wgmmas still run.
    """
    acc0, acc1 = zero_accumulator(BN, "none"), zero_accumulator(BN, "none")
    acc2 = zero_accumulator(BN, "none")
    acc0, acc1, acc2 = issue_mma_blocks(ring, step, acc0, acc1, acc2, False, COUNT, BN, B_K_MAJOR)
    acc0, acc1, acc2 = wait_mma_blocks(acc0, acc1, acc2, COUNT, COUNT)  # as in `pipeline.mma_mainloop`
    for _ in range(1, steps):
        step += 1
        acc0, acc1, acc2 = issue_mma_blocks(ring, step, acc0, acc1, acc2, True, COUNT, BN, B_K_MAJOR)
        acc0, acc1, acc2 = wait_mma_blocks(acc0, acc1, acc2, COUNT, COUNT)
        consumer_release_previous(ring, step)
    step += 1
    mbarrier.arrive(order_of_other, count=1)
    acc0, acc1, acc2 = wait_mma_blocks(acc0, acc1, acc2, COUNT, 0)
    consumer_release_previous(ring, step)
    return acc0, acc1, acc2, step


@gluon.jit
def issue_mma_blocks(
    ring, step, acc0, acc1, acc2, ACCUMULATE: gl.constexpr, COUNT: gl.constexpr, BN: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """`pipeline.issue_mma` for the first COUNT blocks of a tile."""
    a_smem, b_smem, _full, _empty = ring
    stage = consumer_wait(ring, step)
    b = b_operand(b_smem, stage, BN, B_K_MAJOR, "none")
    acc0 = warpgroup_mma(a_smem.index(BLOCKS * stage), b, acc0, use_acc=ACCUMULATE, is_async=True)
    if COUNT > 1:
        acc1 = warpgroup_mma(a_smem.index(BLOCKS * stage + 1), b, acc1, use_acc=ACCUMULATE, is_async=True)
    if COUNT > 2:
        acc2 = warpgroup_mma(a_smem.index(BLOCKS * stage + 2), b, acc2, use_acc=ACCUMULATE, is_async=True)
    return acc0, acc1, acc2


@gluon.jit
def wait_mma_blocks(acc0, acc1, acc2, COUNT: gl.constexpr, PENDING: gl.constexpr):
    """Wait until at most PENDING wgmmas into the first COUNT accumulators are in flight."""
    if COUNT == 3:
        acc0, acc1, acc2 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1, acc2))
    elif COUNT == 2:
        acc0, acc1 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(PENDING, deps=(acc0,))
    return acc0, acc1, acc2


@gluon.jit
def store_block(acc, out, bias, row, end, col, staging, block, BN: gl.constexpr, CONSUMER: gl.constexpr):
    """Start the TMA stores of this consumer's ``block``-th block; blocks alternate between pairs of buffers."""
    first, second = halves(acc, WARPGROUP_M, BN)
    last = RAGGED_EXTENT - end + row
    for j in gl.static_range(2):
        value = first if j == 0 else second
        if bias is not None:
            value += bias.slice(j * EPILOGUE_N, EPILOGUE_N).load(gl.SliceLayout(0, value.type.layout))[None, :]
        # Wait for the oldest of BUFFERS stores, whose staging buffer is needed now.
        tma.store_wait(BUFFERS - 1)
        buffer = staging.index(BUFFERS * CONSUMER + 2 * (block & 1) + j)
        store_slice(out, [RAGGED_EXTENT, end, last, col + j * EPILOGUE_N], value, buffer)


@gluon.jit
def pingpong_consumer(
    out, bias, stride_bias, num_tiles, width_in, width_out, ring, tile_info, staging, bias_smem, mma_order,
    CONSUMER: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Consumer: it computes every other tile of the CTA. mma_order: (CONSUMERS, 1) mbarriers, see above."""
    total = gl.load(num_tiles) * gl.cdiv(width_out, BN)
    steps = gl.cdiv(width_in, BK)
    step = CONSUMER * steps
    phase = 1 - CONSUMER  # the first consumer's first wait passes at once
    block = 0
    for _ in range(gl.program_id(0) + CONSUMER * gl.num_programs(0), total, CONSUMERS * gl.num_programs(0)):
        mbarrier.wait(mma_order.index(CONSUMER), phase)
        phase ^= 1
        row, end, col, expert_and_count = receive_tile(ring, tile_info, step)
        expert, count = expert_and_count // 4, expert_and_count % 4
        bias_of_tile = None
        if bias is not None:
            of_tile = load_columns(bias, expert, stride_bias, col + gl.arange(0, BN, THREAD_LAYOUT), width_out)
        if count == 3:
            acc0, acc1, acc2, step = mma_mainloop_blocks(
                ring, step, steps, mma_order.index(1 - CONSUMER), 3, BN, B_K_MAJOR
            )
        elif count == 2:
            acc0, acc1, acc2, step = mma_mainloop_blocks(
                ring, step, steps, mma_order.index(1 - CONSUMER), 2, BN, B_K_MAJOR
            )
        else:
            acc0, acc1, acc2, step = mma_mainloop_blocks(
                ring, step, steps, mma_order.index(1 - CONSUMER), 1, BN, B_K_MAJOR
            )
        step += steps  # skips the stages of the other consumer's tile
        if bias is not None:
            bias_of_tile = bias_smem.index(CONSUMER)
            bias_of_tile.store(of_tile.to(gl.float32))
        store_block(acc0, out, bias_of_tile, row, end, col, staging, block, BN, CONSUMER)
        if count > 1:
            store_block(acc1, out, bias_of_tile, row + WARPGROUP_M, end, col, staging, block + 1, BN, CONSUMER)
        if count > 2:
            store_block(acc2, out, bias_of_tile, row + 2 * WARPGROUP_M, end, col, staging, block + 2, BN, CONSUMER)
        block += count
    tma.store_wait(0)


@gluon.jit
def gemm_rows_kernel(
    rows,
    weight,
    bias,
    out,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    width_in,
    width_out,
    stride_bias,
    B_K_MAJOR: gl.constexpr,
    BAND: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """down_proj and up_proj_dgrad: rows (R_max, width_in), weight (E, width_in, width_out), bias (E, width_out), out
    (R_max, width_out).

    BAND: see `tile_place`.
    """
    a_smem = gl.allocate_shared_memory(rows.dtype, [BLOCKS * STAGES, WARPGROUP_M, BK], rows.layout)
    b_smem = gl.allocate_shared_memory(rows.dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(
        rows.dtype, [BUFFERS * CONSUMERS, WARPGROUP_M, EPILOGUE_N], gl.NVMMASharedLayout(128, 16, 2)
    )
    bias_smem = new_column_smem(BN)
    mma_order = new_barriers(CONSUMERS, 1)
    ring = (a_smem, b_smem, new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    tile_info = new_tile_info(STAGES)
    gl.warp_specialize(
        [
            (pingpong_consumer, (out, bias, stride_bias, num_tiles, width_in, width_out, ring, tile_info, staging,
                                 bias_smem, mma_order, 0, BN, B_K_MAJOR)),
            (pingpong_consumer, (out, bias, stride_bias, num_tiles, width_in, width_out, ring, tile_info, staging,
                                 bias_smem, mma_order, 1, BN, B_K_MAJOR)),
            (pingpong_producer, (rows, weight, tiles, num_tiles, width_in, width_out, ring, tile_info, BN, B_K_MAJOR,
                                 BAND)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
