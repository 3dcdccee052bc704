"""down_proj and up_proj_dgrad with a short contraction, weight-stationary: ``out_r = rows_r weight_e (+ bias_e)``, as
in `gemm_pingpong`.

E experts · R_max static row capacity · BN tile columns · BK k-block · S stages of A · B_STAGES k-blocks of B
width_in, width_out: the GEMM's K and N, of one expert's weight

With so few k-blocks a tile's loads exceed what its wgmmas hide: down_proj of n = 256 asks L2 for twice what it gives.
So a CTA keeps BN columns of an expert's weight, over the whole contraction, in shared memory and streams only A: a
work item is these columns of up to CHUNK_M rows, in blocks of 64 rows. Items are walked with columns innermost:
neighbouring CTAs have the same rows and other columns, so that A comes from DRAM once.

One producer warp; two consumer warp groups in a ping-pong schedule, which alternate blocks. ``b_ring`` is ``ring`` with
B's own barriers, ``b_full`` and ``b_empty``, one of each for a k-block of B, whose phase flips with each item of the
CTA. An item's last blocks release B k-block by k-block, and the next item's are loaded in their place meanwhile.
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
    PAIR_LAYOUT,
    RAGGED_EXTENT,
    WARPGROUP_M,
    b_operand,
    consumer_release_previous,
    consumer_wait,
    epilogue_slices,
    load_columns,
    new_barriers,
    new_column_smem,
    producer_acquire,
    store_slice,
    tile_coords,
    zero_accumulator,
)

CHUNK_M = gl.constexpr(configs.STATIONARY_M)
BUFFERS = gl.constexpr(2)  # staging buffers of a consumer, an epilogue slice each


@gluon.jit
def new_rings(weight, dtype: gl.constexpr, STAGES: gl.constexpr, B_STAGES: gl.constexpr):
    """(ring, b_ring). Two arrivals release a k-block of B: of an item's last two blocks, or both of its only one."""
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, WARPGROUP_M, BK], gl.NVMMASharedLayout(128, 16, 2))
    b_smem = gl.allocate_shared_memory(dtype, [B_STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    ring = (a_smem, b_smem, new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    return ring, (a_smem, b_smem, new_barriers(B_STAGES, 1), new_barriers(B_STAGES, 2))


@gluon.jit
def item_coords(index, row_tiles, column_tiles, tiles, row_start_of_expert, BN: gl.constexpr):
    """(expert, first row, end of the expert's rows, first column, number of blocks) of a work item; see `tile_coords`.

    Where an expert has several chunks of rows, its blocks are divided evenly among them.
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
    """Start the TMA load of one k-block of a block's A, once its stage is released."""
    a_smem, _b_smem, full, _empty = ring
    stage = producer_acquire(ring, step)
    mbarrier.expect(full.index(stage), rows.block_type.nbytes)
    tma_load(rows, [row, k], full.index(stage), a_smem.index(stage))


@gluon.jit
def load_b(weight, expert, k_block, col, b_ring, item, B_K_MAJOR: gl.constexpr):
    """Start the TMA load of one k-block of an item's B, once the item before has released its buffer."""
    _a_smem, _b_smem, b_full, b_empty = b_ring
    mbarrier.wait(b_empty.index(k_block), (item & 1) ^ 1)
    mbarrier.expect(b_full.index(k_block), weight.block_type.nbytes)
    load_weight(weight, expert, k_block * BK, col, b_ring, k_block, B_K_MAJOR)


@gluon.jit
def stationary_producer(
    rows, weight, tiles, num_tiles, row_start_of_expert, width_in, width_out, ring, b_ring,
    BN: gl.constexpr, B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Producer, one warp: for each item B and the first block's A, k-block by k-block, then the other blocks' A."""
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
        while block < count:  # not `for`: Triton 3.6 takes a value that only bounds an inner loop for loop-invariant
            for k in range(0, width_in, BK):
                load_rows(rows, row + block * WARPGROUP_M, k, ring, step)
                step += 1
            block += 1
        item += 1  # noqa: SIM113  # Gluon has no enumerate
        expert, row, col, count = next_expert, next_row, next_col, next_count


@gluon.jit
def release_b(b_ring, k_block, arrivals):
    """Arrive zero, one or two times at the ``b_empty`` barrier of one k-block."""
    _a_smem, _b_smem, _b_full, b_empty = b_ring
    mbarrier.arrive(b_empty.index(k_block), count=1, pred=arrivals > 0)
    mbarrier.arrive(b_empty.index(k_block), count=1, pred=arrivals > 1)


@gluon.jit
def issue_mma_stationary(
    ring, b_ring, step, item, k_block, acc, ACCUMULATE: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr
):
    """As `pipeline.issue_mma`, of a streamed k-block of A and a resident one of B."""
    a_smem, b_smem, b_full, _b_empty = b_ring
    stage = consumer_wait(ring, step)
    mbarrier.wait(b_full.index(k_block), item & 1)
    b = b_operand(b_smem, k_block, BN, B_K_MAJOR)
    return warpgroup_mma(a_smem.index(stage), b, acc, use_acc=ACCUMULATE, is_async=True)


@gluon.jit
def mma_mainloop_stationary(
    ring, b_ring, step, steps, item, arrivals, order_of_other, BN: gl.constexpr, B_K_MAJOR: gl.constexpr
):
    """The accumulator (64, BN) fp32 of a block over ``steps`` >= 1 stages. arrivals: see `release_b`.

    Hands the tensor cores to the other consumer as `gemm_pingpong.mma_mainloop_blocks` does.
    """
    acc = issue_mma_stationary(ring, b_ring, step, item, 0, zero_accumulator(BN), False, BN, B_K_MAJOR)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # as in `pipeline.mma_mainloop`
    for k_block in range(1, steps):
        step += 1
        acc = issue_mma_stationary(ring, b_ring, step, item, k_block, acc, True, BN, B_K_MAJOR)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        consumer_release_previous(ring, step)
        release_b(b_ring, k_block - 1, arrivals)
    step += 1
    mbarrier.arrive(order_of_other, count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release_previous(ring, step)
    release_b(b_ring, steps - 1, arrivals)
    return acc


@gluon.jit
def arrivals_of(block, count):
    """How often a block arrives at ``b_empty``: an item's last two once each, an only block twice, others never."""
    return gl.where(count == 1, 2, gl.where(block >= count - 2, 1, 0))


@gluon.jit
def store_columns(slices, out, bias, row, end, col, staging, CONSUMER: gl.constexpr):
    """Start the TMA stores of a block's slices, alternating staging buffers. bias: (BN) of the item, or None."""
    last = RAGGED_EXTENT - end + row
    for i in gl.static_range(len(slices)):
        value = slices[i]
        if bias is not None:
            value += bias.slice(i * EPILOGUE_N, EPILOGUE_N).load(gl.SliceLayout(0, value.type.layout))[None, :]
        tma.store_wait(BUFFERS - 1)
        buffer = staging.index(BUFFERS * CONSUMER + i % BUFFERS)
        store_slice(out, [RAGGED_EXTENT, end, last, col + i * EPILOGUE_N], value, buffer)


@gluon.jit
def stationary_consumer(
    out, bias, stride_bias, tiles, num_tiles, row_start_of_expert, width_in, width_out, ring, b_ring, staging,
    bias_smem, mma_order, CONSUMER: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Consumer: every other block of the CTA's items. mma_order: as in `gemm_pingpong`."""
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
                ring, b_ring, (before + block) * steps, steps, item, arrivals_of(block, count),
                mma_order.index(1 - CONSUMER), BN, B_K_MAJOR,
            )  # fmt: skip
            row = first + block * WARPGROUP_M
            store_columns(epilogue_slices(acc, BN), out, bias_of_item, row, end, col, staging, CONSUMER)
        before += count
        item += 1  # noqa: SIM113
        expert, first, end, col, count = next_expert, next_first, next_end, next_col, next_count
    tma.store_wait(0)


@gluon.jit
def gemm_stationary_kernel(
    rows,
    weight,
    bias,
    out,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    row_start_of_expert,
    width_in,
    width_out,
    stride_bias,
    B_K_MAJOR: gl.constexpr,
    B_STAGES: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """down_proj and up_proj_dgrad with width_in <= B_STAGES * BK: as `gemm_pingpong.gemm_rows_kernel`, but with tiles
    of CHUNK_M rows."""
    ring, b_ring = new_rings(weight, rows.dtype, STAGES, B_STAGES)
    staging = gl.allocate_shared_memory(
        rows.dtype, [BUFFERS * CONSUMERS, WARPGROUP_M, EPILOGUE_N], gl.NVMMASharedLayout(128, 16, 2)
    )
    bias_smem = new_column_smem(BN)
    mma_order = new_barriers(CONSUMERS, 1)
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (stationary_consumer, (out, bias, stride_bias, tiles, num_tiles, row_start_of_expert, width_in, width_out,
                                   ring, b_ring, staging, bias_smem, mma_order, 0, BN, B_K_MAJOR)),
            (stationary_consumer, (out, bias, stride_bias, tiles, num_tiles, row_start_of_expert, width_in, width_out,
                                   ring, b_ring, staging, bias_smem, mma_order, 1, BN, B_K_MAJOR)),
            (stationary_producer, (rows, weight, tiles, num_tiles, row_start_of_expert, width_in, width_out, ring,
                                   b_ring, BN, B_K_MAJOR)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
