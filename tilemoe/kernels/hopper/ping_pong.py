"""F2 and B3: each expert's contiguous rows times its weight, by two consumers in turn, each on tiles of its own.

E experts · R_max row capacity · BN columns of a tile, which has up to three blocks of 64 rows

While one consumer stores its tile, the other has the matrix units to itself. They take turns by `order`, two barriers:
a consumer begins its tile once the other has seen its last stage arrive. Sooner, it would wait for a stage of a round
that is more than one ahead, and the barriers count rounds modulo 2.

A tile at an expert's end has as many blocks as its rows need, and no others are loaded. Its last four blocks are two
tiles of two: three and one would read more for as many products. Weights are descriptors as in `gemm_rows`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilemoe.kernels.hopper.gemm_rows import load_weight
from tilemoe.kernels.hopper.names import load_tile
from tilemoe.kernels.hopper.pipeline import (
    BK,
    EACH,
    GROUP_M,
    GROUPS,
    RAGGED_ROWS,
    SLICE,
    acquire,
    announce,
    await_full,
    halves,
    leave_last,
    load_bias,
    new_barriers,
    new_bias_staging,
    new_notes,
    next_tile,
    right_operand,
    row_tile,
    store_slice,
    zeros,
)

BLOCKS = gl.constexpr(3)  # accumulators of 64 x 128 that a consumer's registers hold
BUFFERS = gl.constexpr(4)  # slices of shared memory that a consumer stores through: two blocks'


@gluon.jit
def block_tile(index, total, column_tiles, tiles, BN: gl.constexpr):
    """(expert, first row, end of the expert's rows, first column, blocks) of a tile; see `row_tile`."""
    expert, row, end, col = row_tile(index, total, column_tiles, tiles, BN)
    before = gl.maximum(index // column_tiles - 1, 0)
    expert_before = gl.load(tiles[0] + before, mask=(index >= column_tiles) & (index < total), other=-1)
    left = gl.cdiv(end - row, GROUP_M)
    takes_one = (left == 1) & (expert_before == expert)  # from the tile before it, which has four left
    count = gl.where(takes_one | (left == BLOCKS + 1), 2, gl.minimum(left, BLOCKS))
    return expert, gl.where(takes_one, row - GROUP_M, row), end, col, count


@gluon.jit
def load_blocks(rows, weight, expert, row, col, width_in, ring, step, COUNT: gl.constexpr, RIGHT_BY_N: gl.constexpr):
    """Fill the stages of a tile of COUNT blocks; the next step."""
    left, _right, ready, _empty = ring
    for k in range(0, width_in, BK):
        stage = acquire(ring, step)
        mbarrier.expect(ready.index(stage), COUNT * rows.block_type.nbytes + weight.block_type.nbytes)
        for block in gl.static_range(COUNT):
            load_tile(rows, [row + block * GROUP_M, k], ready.index(stage), left.index(BLOCKS * stage + block))
        load_weight(weight, expert, k, col, ring, stage, RIGHT_BY_N)
        step += 1
    return step


@gluon.jit
def contiguous_blocks(
    rows, weight, tiles, num_tiles, width_in, width_out, ring, notes, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr
):
    """Producer of one warp: tiles of ``rows`` (R_max, width_in), block by block, and of the weight, all by TMA.

    Announces (first row, end of the expert's rows, first column, 4 * expert + blocks) of each tile.
    """
    column_tiles = gl.cdiv(width_out, BN)
    total = gl.load(num_tiles) * column_tiles
    step = 0
    expert, row, end, col, count = block_tile(gl.program_id(0), total, column_tiles, tiles, BN)
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        next_expert, next_row, next_end, next_col, next_count = block_tile(
            index + gl.num_programs(0), total, column_tiles, tiles, BN
        )
        announce(notes, acquire(ring, step), row, end, col, 4 * expert + count)
        if count == 3:
            step = load_blocks(rows, weight, expert, row, col, width_in, ring, step, 3, RIGHT_BY_N)
        elif count == 2:
            step = load_blocks(rows, weight, expert, row, col, width_in, ring, step, 2, RIGHT_BY_N)
        else:
            step = load_blocks(rows, weight, expert, row, col, width_in, ring, step, 1, RIGHT_BY_N)
        expert, row, end, col, count = next_expert, next_row, next_end, next_col, next_count


@gluon.jit
def multiply_blocks(ring, step, steps, turn_of_other, COUNT: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr):
    """Three blocks (GROUP_M, BN) fp32, the first COUNT multiplied over ``steps`` stages, at least one; the next step.

    Gives the other consumer its turn when the last stage has arrived: these products still run meanwhile.
    """
    acc0, acc1, acc2 = zeros(BN), zeros(BN), zeros(BN)
    acc0, acc1, acc2 = start_products(ring, step, acc0, acc1, acc2, False, COUNT, BN, RIGHT_BY_N)
    acc0, acc1, acc2 = wait_for_products(acc0, acc1, acc2, COUNT, COUNT)  # for nothing, as in `pipeline.multiply`
    for _ in range(1, steps):
        step += 1
        acc0, acc1, acc2 = start_products(ring, step, acc0, acc1, acc2, True, COUNT, BN, RIGHT_BY_N)
        acc0, acc1, acc2 = wait_for_products(acc0, acc1, acc2, COUNT, COUNT)
        leave_last(ring, step)
    step += 1
    mbarrier.arrive(turn_of_other, count=1)
    acc0, acc1, acc2 = wait_for_products(acc0, acc1, acc2, COUNT, 0)
    leave_last(ring, step)
    return acc0, acc1, acc2, step


@gluon.jit
def start_products(
    ring, step, acc0, acc1, acc2, ADD: gl.constexpr, COUNT: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr
):
    """As `pipeline.start_product`, of the first COUNT blocks."""
    left, right, _ready, _empty = ring
    stage = await_full(ring, step)
    columns = right_operand(right, stage, BN, RIGHT_BY_N)
    acc0 = warpgroup_mma(left.index(BLOCKS * stage), columns, acc0, use_acc=ADD, is_async=True)
    if COUNT > 1:
        acc1 = warpgroup_mma(left.index(BLOCKS * stage + 1), columns, acc1, use_acc=ADD, is_async=True)
    if COUNT > 2:
        acc2 = warpgroup_mma(left.index(BLOCKS * stage + 2), columns, acc2, use_acc=ADD, is_async=True)
    return acc0, acc1, acc2


@gluon.jit
def wait_for_products(acc0, acc1, acc2, COUNT: gl.constexpr, PENDING: gl.constexpr):
    """Until at most PENDING products are in flight, of those into the first COUNT accumulators."""
    if COUNT == 3:
        acc0, acc1, acc2 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1, acc2))
    elif COUNT == 2:
        acc0, acc1 = warpgroup_mma_wait(PENDING, deps=(acc0, acc1))
    else:
        acc0 = warpgroup_mma_wait(PENDING, deps=(acc0,))
    return acc0, acc1, acc2


@gluon.jit
def store_block(acc, out, bias, row, end, col, staging, block, BN: gl.constexpr, GROUP: gl.constexpr):
    """Start storing a block; ``block`` counts the consumer's, which take its buffers in turn. bias: (BN), or None."""
    first, second = halves(acc, GROUP_M, BN)
    last = RAGGED_ROWS - end + row
    for j in gl.static_range(2):
        value = first if j == 0 else second
        if bias is not None:
            value += bias.slice(j * SLICE, SLICE).load(gl.SliceLayout(0, value.type.layout))[None, :]
        # As many stores in flight as there are buffers, and one of them is needed now.
        tma.store_wait(BUFFERS - 1)
        buffer = staging.index(BUFFERS * GROUP + 2 * (block & 1) + j)
        store_slice(out, [RAGGED_ROWS, end, last, col + j * SLICE], value, buffer)


@gluon.jit
def finish_rows(
    out, bias, stride_bias, num_tiles, width_in, width_out, ring, notes, staging, bias_staging, order,
    GROUP: gl.constexpr, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr,
):  # fmt: skip
    """Consumer GROUP of F2 and B3: every other tile of the program. order: (GROUPS, 1) barriers, whose turn it is."""
    total = gl.load(num_tiles) * gl.cdiv(width_out, BN)
    steps = gl.cdiv(width_in, BK)
    step = GROUP * steps
    phase = 1 - GROUP  # of the turn that it waits for: the first consumer's first turn comes unasked
    block = 0
    for _ in range(gl.program_id(0) + GROUP * gl.num_programs(0), total, GROUPS * gl.num_programs(0)):
        mbarrier.wait(order.index(GROUP), phase)
        phase ^= 1
        row, end, col, expert_and_count = next_tile(ring, notes, step)
        expert, count = expert_and_count // 4, expert_and_count % 4
        bias_of_tile = None
        if bias is not None:
            of_tile = load_bias(bias, expert, stride_bias, col + gl.arange(0, BN, EACH), width_out)
        if count == 3:
            acc0, acc1, acc2, step = multiply_blocks(ring, step, steps, order.index(1 - GROUP), 3, BN, RIGHT_BY_N)
        elif count == 2:
            acc0, acc1, acc2, step = multiply_blocks(ring, step, steps, order.index(1 - GROUP), 2, BN, RIGHT_BY_N)
        else:
            acc0, acc1, acc2, step = multiply_blocks(ring, step, steps, order.index(1 - GROUP), 1, BN, RIGHT_BY_N)
        step += steps  # the other consumer's
        if bias is not None:
            bias_of_tile = bias_staging.index(GROUP)
            bias_of_tile.store(of_tile.to(gl.float32))
        store_block(acc0, out, bias_of_tile, row, end, col, staging, block, BN, GROUP)
        if count > 1:
            store_block(acc1, out, bias_of_tile, row + GROUP_M, end, col, staging, block + 1, BN, GROUP)
        if count > 2:
            store_block(acc2, out, bias_of_tile, row + 2 * GROUP_M, end, col, staging, block + 2, BN, GROUP)
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
    RIGHT_BY_N: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """``out_r = rows_r weight_e (+ bias_e)``, in tiles of 192 rows.

    rows (R_max, in), weight (E, in, out), bias (E, out), out (R_max, out).
    """
    left = gl.allocate_shared_memory(rows.dtype, [BLOCKS * STAGES, GROUP_M, BK], rows.layout)
    right = gl.allocate_shared_memory(rows.dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(
        rows.dtype, [BUFFERS * GROUPS, GROUP_M, SLICE], gl.NVMMASharedLayout(128, 16, 2)
    )
    bias_staging = new_bias_staging(BN)
    order = new_barriers(GROUPS, 1)
    ring = (left, right, new_barriers(STAGES, 1), new_barriers(STAGES, 1))
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    notes = new_notes(STAGES)
    gl.warp_specialize(
        [
            (finish_rows, (out, bias, stride_bias, num_tiles, width_in, width_out, ring, notes, staging, bias_staging,
                           order, 0, BN, RIGHT_BY_N)),
            (finish_rows, (out, bias, stride_bias, num_tiles, width_in, width_out, ring, notes, staging, bias_staging,
                           order, 1, BN, RIGHT_BY_N)),
            (contiguous_blocks, (rows, weight, tiles, num_tiles, width_in, width_out, ring, notes, BN, RIGHT_BY_N)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
