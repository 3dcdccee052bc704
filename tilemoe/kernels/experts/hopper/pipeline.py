"""Building blocks of all Hopper GEMMs: TMA/cp.async pipeline, tile scheduler, mainloop, epilogue stores.

BM, BN tile · BK k-block (contraction per stage) · S stages

Kernels are persistent and warp-specialised: a producer (a warp group if it issues cp.async, one warp if all loads are
TMA) fills stages of shared memory with A (BM x BK) and B (BK x BN); two consumer warp groups run wgmma on them.
Cooperative kernels (up_proj, down_proj_dgrad, the weight gradients, and `gemm_cooperative`): the consumers share a
tile; each has 64 of its 128 rows and its own epilogue. Except in weight gradients, a consumer whose rows are all past
the expert's last row skips its mainloop, so that a ragged end costs half a tile. Ping-pong kernels (down_proj and
up_proj_dgrad in `gemm_pingpong`, `gemm_stationary`): each consumer has whole tiles (or blocks of 64 rows). The epilogue
of one overlaps the mainloop of the other, which meanwhile has the tensor cores to itself.

Pipeline, like CUTLASS's PipelineTmaAsync: the tuple ``ring = (a_smem, b_smem, full, empty)`` of operand buffers
(S, ...) and mbarriers (S, 1). Each role counts its k-blocks in ``step``, from 0: stage step % S, phase step // S % 2.

Tile scheduler: the producer decodes a tile's coordinates and passes them to the consumers in shared memory,
``tile_info``, with the tile's first stage. Static: CTA i of P has tiles i, i + P, ... Dynamic (kernels that use
`gemm_gather_act.gather_producer`): see `scheduler_next`.

SCALES is "none" for 16-bit operands; else the operands are e4m3, and `scales` describes their scales. The pipeline
moves bytes: it treats two e4m3 values of a row as one element of the layer's 16-bit dtype, so that BK, the producers
and the stages are the same. `operand` views a stage as the matrix that wgmma multiplies.
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

from tilemoe.kernels.experts.hopper import configs
from tilemoe.kernels.experts.hopper.gluon_compat import reinterpret, tma_store
from tilemoe.kernels.experts.triton.configs import RAGGED_EXTENT as _RAGGED_EXTENT

CONSUMERS = gl.constexpr(configs.CONSUMERS)
WARPGROUP_M = gl.constexpr(configs.WARPGROUP_M)
BM = gl.constexpr(configs.COOPERATIVE_M)
BK = gl.constexpr(configs.BLOCK_K)
EPILOGUE_N = gl.constexpr(configs.EPILOGUE_N)
ADDED_N = gl.constexpr(configs.ADDED_N)
RAGGED_EXTENT = gl.constexpr(_RAGGED_EXTENT)
# 1-D layouts of a warp group: one element per thread (a single element is replicated), and two per thread.
THREAD_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [configs.CONSUMER_WARPS], [0]))
PAIR_LAYOUT = gl.constexpr(gl.BlockedLayout([2], [32], [configs.CONSUMER_WARPS], [0]))
WARPGROUP_THREADS = gl.constexpr(32 * configs.CONSUMER_WARPS)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """(COUNT, 1) mbarriers; each completes a phase after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def new_ring(weight, dtype: gl.constexpr, STAGES: gl.constexpr):
    """A cooperative kernel's ring; a producer warp group fills A, (S, BM, BK), by cp.async and B by TMA."""
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], gl.NVMMASharedLayout(128, 16, 2))
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    return a_smem, b_smem, new_barriers(STAGES, 2), new_barriers(STAGES, CONSUMERS)


@gluon.jit
def new_staging(dtype: gl.constexpr):
    """(2 * CONSUMERS, WARPGROUP_M, EPILOGUE_N): two staging buffers for each consumer's TMA stores."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(dtype, [2 * CONSUMERS, WARPGROUP_M, EPILOGUE_N], layout)


# Tile scheduler


@gluon.jit
def tile_place(index, row_tiles, column_tiles, BAND: gl.constexpr):
    """(row tile, column tile) of tile ``index`` of row_tiles x column_tiles.

    Column tiles innermost. BAND: the column tiles of a band; all row tiles are walked in a band before the next. 0: no
    bands. See `tilemoe.kernels.experts.triton.configs.band_tiles`.
    """
    if BAND == 0:
        row_tile, column_tile = index // column_tiles, index % column_tiles
    else:
        first = index // gl.maximum(row_tiles * BAND, 1) * BAND
        of_band, columns = index - row_tiles * first, gl.maximum(gl.minimum(BAND, column_tiles - first), 1)
        row_tile, column_tile = of_band // columns, first + of_band % columns
    return row_tile, column_tile


@gluon.jit
def tile_coords(index, row_tiles, column_tiles, tiles, BN: gl.constexpr, BAND: gl.constexpr):
    """(expert, first row, end of the expert's rows, first column) of tile ``index``, see `tile_place`.

    tiles: (expert_of_tile, row_of_tile, end_of_tile). An ``index`` past the last tile loads nothing and returns
    coordinates that must not be used. So a producer can decode one tile ahead, which hides the latency of the loads.
    """
    expert_of_tile, row_of_tile, end_of_tile = tiles
    tile, column_tile = tile_place(index, row_tiles, column_tiles, BAND)
    col = column_tile * BN  # computed before the loads: after them, two more values spill in an FP8 kernel
    exists = index < row_tiles * column_tiles
    expert = gl.load(expert_of_tile + tile, mask=exists, other=0)
    row = gl.load(row_of_tile + tile, mask=exists, other=0)
    end = gl.load(end_of_tile + tile, mask=exists, other=0)
    return expert, row, end, col


@gluon.jit
def scheduler_prefetch(tile_counter, wanted):
    """Dynamic scheduler: if ``wanted``, draw the next tile id by an atomicAdd on tile_counter, for `scheduler_next`.

    Thread 0 adds; nothing waits until the result is used. The other threads are masked off and deliberately get another
    address: for equal addresses the compiler first reduces within the warp, and broadcasts (waits for) the result.
    """
    thread = gl.arange(0, WARPGROUP_THREADS, THREAD_LAYOUT)
    one = gl.full([WARPGROUP_THREADS], 1, gl.int32, THREAD_LAYOUT)
    counter = tile_counter + gl.where(thread == 0, 0, 1)
    return gl.atomic_add(counter, one, mask=(thread == 0) & wanted, sem="relaxed")


@gluon.jit
def new_scheduler_smem():
    """(128) int32 of shared memory, through which `scheduler_next` broadcasts a tile id to its warp group."""
    return gl.allocate_shared_memory(gl.int32, [WARPGROUP_THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def scheduler_next(prefetched, scheduler_smem, tile_counter, total, wanted):
    """The tile id that `scheduler_prefetch` drew, broadcast through shared memory; ``total`` or more: no tile is left.

    This is a dynamic persistent scheduler: CTA i of P starts with tiles i and i + P, and prefetches further ids, from
    2 P on, by atomicAdd. The CTA that draws the last number resets the counter to 0.
    """
    scheduler_smem.store(prefetched)
    number = gl.sum(scheduler_smem.slice(0, 1).load(THREAD_LAYOUT), axis=0)
    is_last = number == total - gl.num_programs(0) - 1
    gl.store(tile_counter, 0, mask=wanted & is_last)
    return gl.where(wanted, number + 2 * gl.num_programs(0), total)


@gluon.jit
def new_tile_info(STAGES: gl.constexpr):
    """Shared memory for four int32 per stage, which describe the tile that begins in the stage; see `publish_tile`."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    second = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    third = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    fourth = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    return first, second, third, fourth


@gluon.jit
def publish_tile(tile_info, stage, first, second, third, fourth):
    """Producer: pass four numbers, which describe a tile, with its first stage; acquire that before."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile_info[0].index(stage).store(gl.full([1], first, gl.int32, layout))
    tile_info[1].index(stage).store(gl.full([1], second, gl.int32, layout))
    tile_info[2].index(stage).store(gl.full([1], third, gl.int32, layout))
    tile_info[3].index(stage).store(gl.full([1], fourth, gl.int32, layout))


@gluon.jit
def receive_tile(ring, tile_info, step):
    """Consumer: the four numbers of the tile that begins at ``step``; waits until that stage is full."""
    stage = consumer_wait(ring, step)
    first = gl.sum(tile_info[0].index(stage).load(THREAD_LAYOUT), axis=0)
    second = gl.sum(tile_info[1].index(stage).load(THREAD_LAYOUT), axis=0)
    third = gl.sum(tile_info[2].index(stage).load(THREAD_LAYOUT), axis=0)
    fourth = gl.sum(tile_info[3].index(stage).load(THREAD_LAYOUT), axis=0)
    return first, second, third, fourth


# Pipeline


@gluon.jit
def producer_acquire(ring, step):
    """The stage of ``step``; waits until the consumers have released it."""
    _a_smem, _b_smem, full, empty = ring
    stage = step % full.shape[0]
    mbarrier.wait(empty.index(stage), ((step // full.shape[0]) & 1) ^ 1)
    return stage


@gluon.jit
def producer_commit(ring, step):
    """Commit ``step``'s cp.async group, and arrive at ``full`` of the stage of LAG steps before, which is now complete.

    cp.async completes per thread, not on an mbarrier. So each thread calls wait_group and a proxy fence for wgmma; the
    lag keeps LAG groups in flight. Fencing in the consumers was not faster (docs/lab/power.md at 36a9631).
    """
    _a_smem, _b_smem, full, _empty = ring
    STAGES: gl.constexpr = full.shape[0]
    LAG: gl.constexpr = STAGES - 2  # consumers release a stage one step late: a longer lag would deadlock
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    fence_async_shared()
    mbarrier.arrive(full.index((step + STAGES - LAG) % STAGES), count=1, pred=step >= LAG)


@gluon.jit
def producer_commit_empty(ring, step):
    """`producer_commit` for a stage that has tile_info but no operands."""
    _a_smem, _b_smem, full, _empty = ring
    mbarrier.arrive(full.index(step % full.shape[0]), count=1)  # in place of the TMA load's arrival
    producer_commit(ring, step)


@gluon.jit
def producer_flush(ring, step):
    """After all ``step`` k-blocks: wait for all copies, and arrive at the last LAG stages; see `producer_commit`."""
    _a_smem, _b_smem, full, _empty = ring
    STAGES: gl.constexpr = full.shape[0]
    LAG: gl.constexpr = STAGES - 2
    async_copy.wait_group(0)
    fence_async_shared()
    for i in gl.static_range(LAG):
        mbarrier.arrive(full.index((step + STAGES - LAG + i) % STAGES), count=1, pred=step >= LAG - i)


@gluon.jit
def consumer_wait(ring, step):
    """The stage of ``step``; waits until it is full."""
    _a_smem, _b_smem, full, _empty = ring
    stage = step % full.shape[0]
    mbarrier.wait(full.index(stage), (step // full.shape[0]) & 1)
    return stage


@gluon.jit
def consumer_release_previous(ring, step, pred=True):
    """Release the stage of the step before ``step``, if ``pred``."""
    _a_smem, _b_smem, _full, empty = ring
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=pred)


@gluon.jit
def skip_stages(ring, step, steps, pending_release):
    """Release the ``steps`` stages of a tile without rows for this consumer, unread. Returns the next step.

    pending_release: see `mma_mainloop`.
    """
    _a_smem, _b_smem, _full, empty = ring
    if pending_release:
        tma.store_wait(0)
        consumer_release_previous(ring, step)
    for _ in range(steps):
        stage = consumer_wait(ring, step)
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def release_b(b_ring, k_block, arrivals):
    """Arrive up to twice at ``b_empty`` of a k-block of a weight that stays in shared memory (`gemm_stationary`)."""
    _a_smem, _b_smem, _b_full, b_empty = b_ring
    mbarrier.arrive(b_empty.index(k_block), count=1, pred=arrivals > 0)
    mbarrier.arrive(b_empty.index(k_block), count=1, pred=arrivals > 1)


# Mainloop


@gluon.jit
def zero_accumulator(BN: gl.constexpr, SCALES: gl.constexpr):
    """(WARPGROUP_M, BN) fp32 zeros in wgmma's accumulator layout for one warp group."""
    K: gl.constexpr = 16 if SCALES == "none" else 32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, K])
    return gl.zeros([WARPGROUP_M, BN], gl.float32, layout)


@gluon.jit
def operand(buffer, ROWS: gl.constexpr, SCALES: gl.constexpr):
    """A stage's buffer (ROWS, BK) of 16-bit elements as wgmma reads it: unchanged, or as e4m3 (ROWS, 2 * BK)."""
    if SCALES == "none":
        values = buffer.reshape([ROWS, BK])
    else:
        values = reinterpret(buffer, gl.float8e4nv, [ROWS, 2 * BK], gl.NVMMASharedLayout(128, 8, 2))
    return values


@gluon.jit
def b_operand(b_smem, stage, BN: gl.constexpr, B_K_MAJOR: gl.constexpr, SCALES: gl.constexpr):
    """A stage's B (BK, BN). B_K_MAJOR: stored as (BN, BK), K contiguous; else as (BK, BN), N contiguous."""
    if B_K_MAJOR:
        b = operand(b_smem.index(stage), BN, SCALES).permute([1, 0])
    else:
        swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        b = reinterpret(b_smem.index(stage), b_smem.dtype, [BK, BN], swizzled)
    return b


@gluon.jit
def issue_mma(
    ring, step, acc, ACCUMULATE: gl.constexpr, CONSUMER: gl.constexpr, BN: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Wait until a stage is full and issue its wgmma, without waiting for that.

    ACCUMULATE is False for a tile's first k-block, which overwrites acc, so that acc need not be zeroed.
    """
    a_smem, b_smem, _full, _empty = ring
    stage = consumer_wait(ring, step)
    if A_K_MAJOR:
        a = operand(a_smem.index(stage), BM, SCALES).slice(CONSUMER * WARPGROUP_M, WARPGROUP_M)
    else:
        a = a_smem.index(CONSUMERS * stage + CONSUMER).permute([1, 0])
    b = b_operand(b_smem, stage, BN, B_K_MAJOR, SCALES)
    return warpgroup_mma(a, b, acc, use_acc=ACCUMULATE, is_async=True)


@gluon.jit
def begin_mainloop(
    ring, step, CONSUMER: gl.constexpr, BN: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Issue a tile's first wgmma; see `mma_mainloop`. The mainloop hides loads that are issued after this."""
    acc = zero_accumulator(BN, SCALES)
    return issue_mma(ring, step, acc, False, CONSUMER, BN, A_K_MAJOR, B_K_MAJOR, SCALES)


@gluon.jit
def mma_mainloop(
    ring, acc, step, steps, pending_release, CONSUMER: gl.constexpr, BN: gl.constexpr, A_K_MAJOR: gl.constexpr,
    B_K_MAJOR: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Returns (accumulator (WARPGROUP_M, BN) fp32 of this consumer's rows over ``steps`` >= 1 stages, next step).

    acc: the result of `begin_mainloop` for ``step``.
    pending_release: the previous tile's TMA stores still read the preceding stage (down_proj_dgrad). It is released
    when they are done, while the first wgmma runs.
    A_K_MAJOR: a_smem is (S, BM, BK), else (2 S, BK, 64), a block for each consumer. B_K_MAJOR: see `b_operand`.
    """
    if pending_release:
        tma.store_wait(0)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # never blocks: makes acc a value that the loop can carry
    consumer_release_previous(ring, step, pending_release)
    for _ in range(1, steps):
        step += 1
        acc = issue_mma(ring, step, acc, True, CONSUMER, BN, A_K_MAJOR, B_K_MAJOR, SCALES)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        consumer_release_previous(ring, step)
    step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release_previous(ring, step)
    return acc, step


@gluon.jit
def row_pointers(table, row, end, rows):
    """Pointers to the entries ``row + rows`` of a table of all rows, clamped to the expert's last row.

    Rows past the end repeat the last row: their results are not stored, or the other operand is zero there.
    """
    return table + gl.maximum(gl.minimum(row + rows, end - 1), 0)


@gluon.jit
def load_tokens(token_of_row, row, end, rows):
    """The tokens of the rows ``row + rows``, clamped to the expert's last row; without token_of_row, these rows."""
    if token_of_row is None:
        token = gl.maximum(gl.minimum(row + rows, end - 1), 0)
    else:
        token = gl.load(row_pointers(token_of_row, row, end, rows))
    return token


# Epilogue


@gluon.jit
def reshape_blocks(buffer, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """The memory of a stage's ``buffer``, reinterpreted as COUNT blocks of (ROWS, EPILOGUE_N)."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(buffer, buffer.dtype, [COUNT, ROWS, EPILOGUE_N], swizzled)


@gluon.jit
def halves(value, M: gl.constexpr, N: gl.constexpr):
    """The left and the right half of (M, N). In wgmma's layout this moves no data between threads."""
    return value.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()


@gluon.jit
def epilogue_slices(value, N: gl.constexpr):
    """(WARPGROUP_M, N) as a tuple of two or four slices of EPILOGUE_N columns, from left to right."""
    gl.static_assert(N == 2 * EPILOGUE_N or N == 4 * EPILOGUE_N, "two slices or four")
    slices = halves(value, WARPGROUP_M, N)
    if N == 4 * EPILOGUE_N:
        slices = halves(slices[0], WARPGROUP_M, N // 2) + halves(slices[1], WARPGROUP_M, N // 2)
    return slices


@gluon.jit
def deinterleave(value, N: gl.constexpr):
    """The even and the odd of N columns. No data moves: a thread holds both columns of a pair."""
    return value.reshape([value.shape[0], N // 2, 2]).split()


@gluon.jit
def load_columns(values, expert, stride, column, width):
    """An expert's entries ``column`` of ``values`` (E, width), a bias or scales, in the warp group's registers.

    Zero past ``width``. Issue it before a tile's mainloop, which hides the load.
    """
    # ``// 8 * 8`` tells the compiler that these are multiples of 8.
    stride, width = stride // 8 * 8, width // 8 * 8
    return gl.load(values + expert.to(gl.int64) * stride + column, mask=column < width, other=0.0)


@gluon.jit
def new_column_smem(BN: gl.constexpr):
    """(CONSUMERS, BN) fp32 of shared memory, through which each consumer broadcasts one value per column of a tile."""
    return gl.allocate_shared_memory(gl.float32, [CONSUMERS, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def broadcast_bias(values, buffer, like):
    """``values`` (BN), distributed over the threads, as (1, BN) fp32 in the layout of ``like``'s columns."""
    buffer.store(values.to(gl.float32))
    return buffer.load(gl.SliceLayout(0, like.type.layout))[None, :]


@gluon.jit
def store_slice(descriptor, place, value, buffer):
    """Start a TMA store of ``value`` (WARPGROUP_M, EPILOGUE_N) to coordinates ``place``; ``buffer`` must be free."""
    buffer.store(value.to(descriptor.dtype))
    fence_and_store(descriptor, place, buffer)


@gluon.jit
def fence_and_store(descriptor, place, buffer):
    """Make the threads' writes to ``buffer`` visible to TMA, and start its TMA store to the coordinates ``place``."""
    fence_async_shared()
    source = buffer.reshape(descriptor.block_shape)
    tma_store(descriptor, place, source)


@gluon.jit
def store_slices(
    slices, out, bias, end, row, col, staging,
    CONSUMER: gl.constexpr, GATE_UP: gl.constexpr, B_K_MAJOR: gl.constexpr,
):  # fmt: skip
    """Start the TMA stores of a consumer's slices of a tile, through its two buffers (`new_staging`).

    bias: (BN) in shared memory to add, or None. GATE_UP "concatenated": out has two parts. In the tile their columns
    are its two halves if B_K_MAJOR, else they alternate every EPILOGUE_N.
    """
    last = RAGGED_EXTENT - end + row
    for i in gl.static_range(len(slices)):
        value = slices[i]
        if bias is not None:
            value += bias.slice(i * EPILOGUE_N, EPILOGUE_N).load(gl.SliceLayout(0, value.type.layout))[None, :]
        tma.store_wait(1)
        if GATE_UP != "concatenated":
            place = [RAGGED_EXTENT, end, last, col + i * EPILOGUE_N]
        elif B_K_MAJOR:
            place = [RAGGED_EXTENT, end, last, i // 2, col + i % 2 * EPILOGUE_N]
        else:
            place = [RAGGED_EXTENT, end, last, i % 2, col + i // 2 * EPILOGUE_N]
        store_slice(out, place, value, staging.index(2 * CONSUMER + i % 2))
