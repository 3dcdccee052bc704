"""What all Hopper kernels share: a ring of shared-memory stages between a producer and two consumers, and their tiles.

BN columns of a tile, which has 128 rows, in `ping_pong` 192 · BK the step of the contraction · S stages of the ring

A persistent program is three partitions of warps. The producer fills a stage with a left operand of 128 x BK and a
right one of BK x BN; each consumer multiplies its 64 of the 128 rows, then finishes its part of the tile (activation,
stores) while the other still multiplies: an epilogue costs matrix-unit time only when both are in it at once. A
consumer whose 64 rows lie past the expert's end multiplies nothing, so that a ragged end costs half a tile. In
`ping_pong` a consumer has whole tiles, and the other one the tiles between them.

A ring is the tuple (left, right, ready, empty): operand buffers (S, ...) and barriers (S, 1).

Which tile it is the producer says at its first stage (`announce`), where the consumers find it without a load to wait
for. Of P programs each has every P-th tile; in F1 and B1 they take tiles from a counter in memory (`ask_for_tile`).
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
BAND = gl.constexpr(8)  # column tiles of 256 that go with 132 / 8 row tiles of 128: nearly a square
SLICE = gl.constexpr(64)  # columns that an epilogue stores at a time
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # an element for each thread of a partition, or one for all
SPREAD = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # two elements for each thread of a partition
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

    tiles: (expert_of_tile, row_of_tile, end_of_tile). Called one tile ahead, so that nobody waits for it.
    """
    expert_of_tile, row_of_tile, end_of_tile = tiles
    exists = index < total
    tile = index // column_tiles
    expert = gl.load(expert_of_tile + tile, mask=exists, other=0)
    row = gl.load(row_of_tile + tile, mask=exists, other=0)
    end = gl.load(end_of_tile + tile, mask=exists, other=0)
    return expert, row, end, (index % column_tiles) * BN


@gluon.jit
def banded_row_tile(index, total, column_tiles, tiles, row_start_of_expert, BN: gl.constexpr):
    """As `row_tile`, in another order: all of an expert's rows by BAND column tiles, then by the next ones.

    Where the output is wide, the programs at work then share as many columns as rows, and read them from L2. In the
    plain order they would pass by all of an expert's weight for each tile of rows, at DRAM's speed.
    """
    expert, row, end, col = row_tile(index, total, column_tiles, tiles, BN)
    start = gl.load(row_start_of_expert + expert)
    row_tiles = gl.maximum(gl.cdiv(end - start, TILE_M), 1)
    of_expert = (row - start) // TILE_M * column_tiles + col // BN
    band = of_expert // (row_tiles * BAND) * BAND
    width = gl.minimum(BAND, column_tiles - band)
    of_band = of_expert - row_tiles * band
    return expert, start + of_band // width * TILE_M, end, (band + of_band % width) * BN


@gluon.jit
def entries(table, row, end, rows):
    """Pointers to the entries of ``row`` + ``rows`` in a table of all rows; past the expert's end its last one again.

    What is read twice is not stored, or meets zeros.
    """
    return table + gl.maximum(gl.minimum(row + rows, end - 1), 0)


@gluon.jit
def ask_for_tile(num_tiles, wanted):
    """Take a number from the counter behind the count in ``num_tiles``, if ``wanted``: the answer for `take_tile`.

    One thread asks and none waits, until the answer is used: the others' addresses, which no one uses, keep the
    compiler from adding up in the warp first, and from handing out the sum at once.
    """
    thread = gl.arange(0, 128, EACH)
    one = gl.full([128], 1, gl.int32, EACH)
    counter = num_tiles + gl.where(thread == 0, 1, 0)
    return gl.atomic_add(counter, one, mask=(thread == 0) & wanted, sem="relaxed")


@gluon.jit
def new_mailbox():
    """(128) int32, for `take_tile`."""
    return gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def take_tile(answer, mailbox, num_tiles, total, wanted):
    """The number of a tile that nobody has yet; ``total`` or more where none is left or none was ``wanted``.

    mailbox (128) int32: shared memory by which all threads learn it.

    Programs have two tiles each to begin with, so that nobody waits for the counter, and each that had the second asks
    until it gets none. Whoever is the last leaves the counter at zero.
    """
    mailbox.store(answer)
    number = gl.sum(mailbox.slice(0, 1).load(EACH), axis=0)
    is_last = number == total - gl.num_programs(0) - 1
    gl.store(num_tiles + 1, 0, mask=wanted & is_last)
    return gl.where(wanted, number + 2 * gl.num_programs(0), total)


@gluon.jit
def new_notes(STAGES: gl.constexpr):
    """Four numbers for each stage: what `announce` says there."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    second = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    third = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    fourth = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    return first, second, third, fourth


@gluon.jit
def announce(notes, stage, first, second, third, fourth):
    """Say which tile begins with a stage that the producer has acquired. What the numbers are is up to the kernel."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    notes[0].index(stage).store(gl.full([1], first, gl.int32, layout))
    notes[1].index(stage).store(gl.full([1], second, gl.int32, layout))
    notes[2].index(stage).store(gl.full([1], third, gl.int32, layout))
    notes[3].index(stage).store(gl.full([1], fourth, gl.int32, layout))


@gluon.jit
def next_tile(ring, notes, step):
    """What is announced of the tile that begins with ``step``, once its first stage is full."""
    stage = await_full(ring, step)
    first = gl.sum(notes[0].index(stage).load(EACH), axis=0)
    second = gl.sum(notes[1].index(stage).load(EACH), axis=0)
    third = gl.sum(notes[2].index(stage).load(EACH), axis=0)
    fourth = gl.sum(notes[3].index(stage).load(EACH), axis=0)
    return first, second, third, fourth


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
def publish_nothing(ring, step):
    """As `publish_copies`, of an acquired stage that has a note and no operands."""
    _left, _right, ready, _empty = ring
    mbarrier.arrive(ready.index(step % ready.shape[0]), count=1)  # for the TMA that does not come
    publish_copies(ring, step)


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
    """(BK, BN) of a stage. RIGHT_BY_N: its buffer holds (BN, BK), else (BK, BN), 64 columns after the other."""
    if RIGHT_BY_N:
        columns = right.index(stage).reshape([BN, BK]).permute([1, 0])
    else:
        swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        columns = reinterpret(right.index(stage), right.dtype, [BK, BN], swizzled)
    return columns


@gluon.jit
def start_product(
    ring, step, acc, ADD: gl.constexpr, GROUP: gl.constexpr, BN: gl.constexpr,
    LEFT_BY_K: gl.constexpr, RIGHT_BY_N: gl.constexpr,
):  # fmt: skip
    """Start the product of a stage once it is full; it is added to ``acc`` if ADD.

    A tile's first product is not: then nobody waits for an accumulator to be filled with zeros.
    """
    left, right, _ready, _empty = ring
    stage = await_full(ring, step)
    if LEFT_BY_K:
        rows = left.index(stage).slice(GROUP * GROUP_M, GROUP_M)
    else:
        rows = left.index(GROUPS * stage + GROUP).permute([1, 0])
    columns = right_operand(right, stage, BN, RIGHT_BY_N)
    return warpgroup_mma(rows, columns, acc, use_acc=ADD, is_async=True)


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
    """(GROUP_M, BN) fp32 of this consumer's rows over ``steps`` stages, at least one; and the next step's number.

    owes: whether it has still to leave the stage before the first, from which it has started stores: it does so
    beside the first product. LEFT_BY_K: the left buffers are (S, 128, BK), else (S, 2, BK, 64).
    RIGHT_BY_N: see `right_operand`.
    """
    acc = start_product(ring, step, zeros(BN), False, GROUP, BN, LEFT_BY_K, RIGHT_BY_N)
    if owes:
        tma.store_wait(0)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # for nothing: it makes a value of what the loop carries
    leave_last(ring, step, owes)
    for _ in range(1, steps):
        step += 1
        acc = start_product(ring, step, acc, True, GROUP, BN, LEFT_BY_K, RIGHT_BY_N)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        leave_last(ring, step)
    step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    leave_last(ring, step)
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
def slices_of(value, N: gl.constexpr):
    """(GROUP_M, N) cut into two or four slices of SLICE columns, a tuple from left to right."""
    gl.static_assert(N == 2 * SLICE or N == 4 * SLICE, "two slices or four")
    slices = halves(value, GROUP_M, N)
    if N == 4 * SLICE:
        slices = halves(slices[0], GROUP_M, N // 2) + halves(slices[1], GROUP_M, N // 2)
    return slices


@gluon.jit
def pairs_of(value, N: gl.constexpr):
    """The even and the odd columns of (GROUP_M, N): a thread holds both of a pair."""
    return value.reshape([GROUP_M, N // 2, 2]).split()


@gluon.jit
def load_bias(bias, expert, stride, column, width):
    """The entries ``column`` of an expert's bias; zero past ``width``.

    Asked for before a tile's products, which hide what it takes, by a register of each thread.
    """
    # The compiler is told that they are multiples of 8.
    stride, width = stride // 8 * 8, width // 8 * 8
    return gl.load(bias + expert.to(gl.int64) * stride + column, mask=column < width, other=0.0)


@gluon.jit
def new_bias_staging(BN: gl.constexpr):
    """(GROUPS, BN) fp32: by which the threads of a consumer learn a tile's bias."""
    return gl.allocate_shared_memory(gl.float32, [GROUPS, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def spread_to_rows(values, buffer, like):
    """``values`` (BN), spread over the threads, as (1, BN) fp32 of which each thread has its columns of ``like``."""
    buffer.store(values.to(gl.float32))
    return buffer.load(gl.SliceLayout(0, like.type.layout))[None, :]


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
