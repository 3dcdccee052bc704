"""What all Hopper kernels share: a ring of shared-memory stages between a producer and two consumers, and their tiles.

BN columns of a tile, which has 128 rows, in `ping_pong` 192 · BK the step of the contraction · S stages of the ring

A persistent program is three partitions of warps. The producer fills a stage with a left operand of 128 x BK and a
right one of BK x BN; each consumer multiplies its 64 of the 128 rows, then finishes its part of the tile (activation,
stores) while the other still multiplies: an epilogue costs matrix-unit time only when both are in it at once. A
consumer whose 64 rows lie past the expert's end multiplies nothing, so that a ragged end costs half a tile. In
`ping_pong` a consumer has whole tiles, and the other one the tiles between them.

A ring is the tuple (left, right, ready, empty): operand buffers (S, ...) and barriers (S, 1).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilemoe.kernels.hopper.names import reinterpret, store_tile

GROUPS = gl.constexpr(2)  # consumers
GROUP_M = gl.constexpr(64)  # rows of each: what one matrix instruction of a warpgroup takes
TILE_M = gl.constexpr(128)
BK = gl.constexpr(64)  # 128 bytes of a 16-bit type: the widest swizzle
SLICE = gl.constexpr(64)  # columns that an epilogue stores at a time
# See tilemoe.kernels.triton.operands: where a ragged descriptor's rows pretend to end.
RAGGED_ROWS = gl.constexpr(1 << 30)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """(COUNT, 1) barriers, each of which opens after ARRIVALS."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def row_tile(index, total, column_tiles, tiles, BN: gl.constexpr):
    """(expert, first row, end of the expert's rows, first column) of a tile; past ``total`` something to read, not use.

    tiles: (expert_of_tile, row_of_tile, row_start_of_expert). Called one tile ahead, so that nobody waits for it.
    """
    expert_of_tile, row_of_tile, row_start_of_expert = tiles
    exists = index < total
    tile = index // column_tiles
    expert = gl.load(expert_of_tile + tile, mask=exists, other=0)
    row = gl.load(row_of_tile + tile, mask=exists, other=0)
    end = gl.load(row_start_of_expert + expert + 1)
    return expert, row, end, (index % column_tiles) * BN


@gluon.jit
def entries(table, row, end, rows):
    """Pointers to the entries of ``row`` + ``rows`` in a table of all rows; past the expert's end its last one again.

    What is read twice is not stored, or meets zeros.
    """
    return table + gl.maximum(gl.minimum(row + rows, end - 1), 0)


@gluon.jit
def acquire(ring, step):
    """The stage of ``step``, once all who read it have left it."""
    _left, _right, ready, empty = ring
    stage = step % ready.shape[0]
    mbarrier.wait(empty.index(stage), ((step // ready.shape[0]) & 1) ^ 1)
    return stage


@gluon.jit
def await_full(ring, step):
    """The stage of ``step``, once it is full."""
    _left, _right, ready, _empty = ring
    stage = step % ready.shape[0]
    mbarrier.wait(ready.index(stage), (step // ready.shape[0]) & 1)
    return stage


@gluon.jit
def leave_last(ring, step, pred=True):
    """Leave the stage of the step before ``step``."""
    _left, _right, _ready, empty = ring
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=pred)


@gluon.jit
def publish_copies(ring, step):
    """End ``step``'s cp.async copies, and announce those of a few steps ago, which have arrived by now.

    The fence makes them visible to the matrix units. In the consumers, where the producer need not wait for copies, it
    was no faster (docs/notes/power.md).
    """
    _left, _right, ready, _empty = ring
    STAGES: gl.constexpr = ready.shape[0]
    LAG: gl.constexpr = STAGES - 2  # a consumer leaves a stage one step late: more would deadlock
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    fence_async_shared()
    mbarrier.arrive(ready.index((step + STAGES - LAG) % STAGES), count=1, pred=step >= LAG)


@gluon.jit
def publish_last_copies(ring, step):
    """Announce what `publish_copies` still holds back after the last of ``step`` steps."""
    _left, _right, ready, _empty = ring
    STAGES: gl.constexpr = ready.shape[0]
    LAG: gl.constexpr = STAGES - 2
    async_copy.wait_group(0)
    fence_async_shared()
    for i in gl.static_range(LAG):
        mbarrier.arrive(ready.index((step + STAGES - LAG + i) % STAGES), count=1, pred=step >= LAG - i)


@gluon.jit
def zeros(BN: gl.constexpr):
    """(GROUP_M, BN) fp32, an accumulator of one warpgroup."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    return gl.zeros([GROUP_M, BN], gl.float32, layout)


@gluon.jit
def right_operand(right, stage, BN: gl.constexpr, RIGHT_BY_N: gl.constexpr):
    """(BK, BN) of a stage. RIGHT_BY_N: its buffer holds (BN, BK), else (BK, BN)."""
    if RIGHT_BY_N:
        columns = right.index(stage).reshape([BN, BK]).permute([1, 0])
    else:
        columns = right.index(stage).reshape([BK, BN])
    return columns


@gluon.jit
def multiply(
    ring,
    step,
    steps,
    owes,
    GROUP: gl.constexpr,
    BN: gl.constexpr,
    LEFT_BY_K: gl.constexpr,
    RIGHT_BY_N: gl.constexpr,
):
    """(GROUP_M, BN) fp32 of this consumer's rows over ``steps`` stages, and the next step's number.

    owes: whether it has still to leave the stage before the first, from which it has started stores: it does so
    beside the first product, so there must be one. LEFT_BY_K: the left buffers are (S, 128, BK), else (S, 2, BK, 64).
    RIGHT_BY_N: see `right_operand`.
    """
    left, right, _ready, _empty = ring
    acc = zeros(BN)
    for k in range(steps):
        stage = await_full(ring, step)
        if LEFT_BY_K:
            rows = left.index(stage).slice(GROUP * GROUP_M, GROUP_M)
        else:
            rows = left.index(GROUPS * stage + GROUP).permute([1, 0])
        columns = right_operand(right, stage, BN, RIGHT_BY_N)
        acc = warpgroup_mma(rows, columns, acc, is_async=True)
        if owes & (k == 0):
            tma.store_wait(0)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        leave_last(ring, step, (k > 0) | owes)
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    leave_last(ring, step, steps > 0)
    return acc, step


@gluon.jit
def pass_by(ring, step, steps, owes):
    """Leave ``steps`` stages to the other consumer; returns the next step's number. ``owes``: see `multiply`."""
    _left, _right, _ready, empty = ring
    if owes:
        tma.store_wait(0)
        leave_last(ring, step)
    for _ in range(steps):
        stage = await_full(ring, step)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def blocks_of(buffer, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """The memory of ``buffer`` as COUNT blocks of (ROWS, SLICE)."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(buffer, buffer.dtype, [COUNT, ROWS, SLICE], swizzled)


@gluon.jit
def halves(value, M: gl.constexpr, N: gl.constexpr):
    """The left and the right half of (M, N): in the matrix units' layout no data moves between threads."""
    return value.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()


@gluon.jit
def store_slice(descriptor, place, value, buffer):
    """Start storing ``value`` (GROUP_M, SLICE) to ``place`` by TMA, through ``buffer``, which nothing reads now."""
    buffer.store(value.to(descriptor.dtype))
    start_store(descriptor, place, buffer)


@gluon.jit
def start_store(descriptor, place, buffer):
    """Start storing ``buffer`` to ``place`` by TMA."""
    fence_async_shared()
    source = buffer.reshape(descriptor.block_shape)
    store_tile(descriptor, place, source)
