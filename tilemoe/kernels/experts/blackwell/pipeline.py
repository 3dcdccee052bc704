"""Building blocks of all Blackwell GEMMs: barriers, accumulators in tensor memory, producers, the MMA warp.

BM, BN tile · BK k-block (contraction per stage) · S stages

Kernels are persistent and warp-specialised, with one CTA per SM. A producer fills stages of shared memory with A
(BM x BK) and B (BK x BN); one warp issues tcgen05.mma on them into one of two accumulators in tensor memory; the
epilogue warps read the other. So the epilogue of a tile overlaps the mainloop of the next.

Barriers (mbarriers), who waits for each, and what completes its phase:

full (S)       the MMA warp: TMA's bytes, and if A is loaded by cp.async an arrival of the producer (`relay`)
empty (S)      the producer: tcgen05.commit, once the products that read the stage are done
acc_full (2)   the epilogue: tcgen05.commit, once all products of the tile are done
acc_empty (2)  the MMA warp: an arrival of the epilogue, once it has read all of the accumulator

Each role counts its k-blocks in ``step`` and its tiles in ``tile``, from 0: stage step % S, phase step // S % 2;
accumulator tile % 2, phase tile // 2 % 2. The first wait for an empty stage or accumulator passes at once.

Tile scheduler: static. CTA i of P has tiles i, i + P, ..., and each role decodes the coordinates it needs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilemoe.kernels.experts.blackwell import configs
from tilemoe.kernels.experts.blackwell.gluon_compat import tma_gather, tmem_load
from tilemoe.kernels.experts.hopper.gemm_gather_act import CP_ASYNC_LAYOUT, load_weight
from tilemoe.kernels.experts.hopper.gluon_compat import cp_async, reinterpret, tma_load
from tilemoe.kernels.experts.hopper.pipeline import (
    b_operand,
    load_columns,
    load_tokens,
    new_barriers,
    producer_acquire,
    store_slice,
    tile_coords,
)

ACCUMULATORS = gl.constexpr(configs.ACCUMULATORS)
BM = gl.constexpr(configs.BLOCK_M)
BK = gl.constexpr(configs.BLOCK_K)
EPILOGUE_N = gl.constexpr(configs.EPILOGUE_N)
# Layout of gather4's row indices: four per thread, the same in all lanes of a warp.
GATHER_LAYOUT = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0])))


@gluon.jit
def new_ring(weight, dtype: gl.constexpr, STAGES: gl.constexpr, ACCESS: gl.constexpr):
    """(a_smem (S, BM, BK), b_smem, full, empty); ACCESS: see `row_producer`."""
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], gl.NVMMASharedLayout(128, 16, 2))
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    return a_smem, b_smem, new_barriers(STAGES, 2 if ACCESS == "copy" else 1), new_barriers(STAGES, 1)


@gluon.jit
def new_accumulators(BN: gl.constexpr):
    """(acc (2, BM, BN) fp32 in tensor memory, acc_full, acc_empty)."""
    layout: gl.constexpr = TensorMemoryLayout([BM, BN], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [ACCUMULATORS, BM, BN], layout)
    return acc, new_barriers(ACCUMULATORS, 1), new_barriers(ACCUMULATORS, 1)


@gluon.jit
def new_staging(dtype: gl.constexpr):
    """(2, BM, EPILOGUE_N): two staging buffers for the epilogue's TMA stores."""
    return gl.allocate_shared_memory(dtype, [2, BM, EPILOGUE_N], gl.NVMMASharedLayout(128, 16, 2))


# Producer


@gluon.jit
def row_producer(
    source, stride_source, token_of_row, weight, tiles, row_tiles, width_in, width_out, ring,
    COLUMNS: gl.constexpr, B_K_MAJOR: gl.constexpr, BAND: gl.constexpr, ACCESS: gl.constexpr,
):  # fmt: skip
    """Producer of the row GEMMs: fills the stages of all tiles of this CTA.

    ACCESS: how A is loaded. "rows": the tile's rows of ``source`` (R_max, width_in), by TMA. Else rows of ``source``
    (T, width_in) are gathered by token: "gather" by TMA's gather4; "copy", if TMA cannot describe them, by cp.async.
    COLUMNS: a tile's columns in each of B's parts.
    """
    a_smem, _b_smem, full, _empty = ring
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte copies.
    width_in, stride_source = width_in // 8 * 8, stride_source // 8 * 8
    OF_ROW: gl.constexpr = gl.SliceLayout(1, CP_ASYNC_LAYOUT) if ACCESS == "copy" else GATHER_LAYOUT
    A_BYTES: gl.constexpr = 0 if ACCESS == "copy" else BM * BK * 2
    column_tiles = gl.cdiv(width_out, COLUMNS)
    expert, row, end, col = tile_coords(gl.program_id(0), row_tiles, column_tiles, tiles, COLUMNS, BAND)
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        next_expert, next_row, next_end, next_col = tile_coords(
            index + gl.num_programs(0), row_tiles, column_tiles, tiles, COLUMNS, BAND
        )
        if ACCESS != "rows":
            token = load_tokens(token_of_row, row, end, gl.arange(0, BM, OF_ROW))
        if ACCESS == "copy":
            columns = gl.arange(0, BK, gl.SliceLayout(0, CP_ASYNC_LAYOUT))
            pointers = source + (token.to(gl.int64) * stride_source)[:, None] + columns[None, :]
        for k in range(0, width_in, BK):
            stage = producer_acquire(ring, step)
            mbarrier.expect(full.index(stage), weight.block_type.nbytes + A_BYTES)
            load_weight(weight, expert, k, col, ring, stage, B_K_MAJOR)
            if ACCESS == "rows":
                tma_load(source, [row, k], full.index(stage), a_smem.index(stage))
            elif ACCESS == "gather":
                tma_gather(source, token, k, full.index(stage), a_smem.index(stage))
            else:
                cp_async(a_smem.index(stage), pointers + k, mask=(k + columns < width_in)[None, :])
                relay(ring, step)
            step += 1
        expert, row, end, col = next_expert, next_row, next_end, next_col
    if ACCESS == "copy":
        relay_rest(ring, step)


@gluon.jit
def relay(ring, step):
    """Commit ``step``'s cp.async group, and arrive at ``full`` of the stage of S - 1 steps before, now complete.

    cp.async completes per thread, not on an mbarrier. So each thread calls wait_group and a proxy fence for tcgen05;
    the lag keeps S - 1 groups in flight.
    """
    _a_smem, _b_smem, full, _empty = ring
    LAG: gl.constexpr = full.shape[0] - 1
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    fence_async_shared()
    mbarrier.arrive(full.index((step + 1) % full.shape[0]), count=1, pred=step >= LAG)


@gluon.jit
def relay_rest(ring, step):
    """After all ``step`` k-blocks: wait for all copies, and arrive at the last S - 1 stages; see `relay`."""
    _a_smem, _b_smem, full, _empty = ring
    LAG: gl.constexpr = full.shape[0] - 1
    async_copy.wait_group(0)
    fence_async_shared()
    for i in gl.static_range(LAG):
        mbarrier.arrive(full.index((step + 1 + i) % full.shape[0]), count=1, pred=step >= LAG - i)


# MMA warp


@gluon.jit
def mma_tile(ring, accumulators, step, steps, tile, BN: gl.constexpr, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr):
    """Issue a tile's ``steps`` products once the epilogue has released the accumulator. Returns the next step.

    A_K_MAJOR: a stage of a_smem is (BM, BK), else two blocks of (BK, 64). B_K_MAJOR: see `b_operand`. With no steps the
    accumulator keeps its old values.
    """
    a_smem, b_smem, full, empty = ring
    acc, acc_full, acc_empty = accumulators
    buffer = tile % ACCUMULATORS
    mbarrier.wait(acc_empty.index(buffer), ((tile // ACCUMULATORS) & 1) ^ 1)
    use_acc = False
    for _ in range(steps):
        stage = step % full.shape[0]
        mbarrier.wait(full.index(stage), (step // full.shape[0]) & 1)
        if A_K_MAJOR:
            a = a_smem.index(stage)
        else:
            swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
            a = reinterpret(a_smem.index(stage), a_smem.dtype, [BK, BM], swizzled).permute([1, 0])
        b = b_operand(b_smem, stage, BN, B_K_MAJOR, "none")
        tcgen05_mma(a, b, acc.index(buffer), use_acc=use_acc, mbarriers=[empty.index(stage)])
        use_acc = True
        step += 1
    tcgen05_commit(acc_full.index(buffer))
    return step


@gluon.jit
def row_mma(row_tiles, column_tiles, width_in, ring, accumulators, BN: gl.constexpr, B_K_MAJOR: gl.constexpr):
    """The MMA warp of the row GEMMs."""
    step, tile = 0, 0
    for _ in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        step = mma_tile(ring, accumulators, step, gl.cdiv(width_in, BK), tile, BN, True, B_K_MAJOR)
        tile += 1  # noqa: SIM113


# Epilogue


@gluon.jit
def wait_accumulator(accumulators, tile):
    """The accumulator (BM, BN) of the ``tile``-th tile of this CTA; waits until it is full."""
    acc, acc_full, _acc_empty = accumulators
    mbarrier.wait(acc_full.index(tile % ACCUMULATORS), (tile // ACCUMULATORS) & 1)
    return acc.index(tile % ACCUMULATORS)


@gluon.jit
def release_accumulator(accumulators, tile):
    """Release the accumulator of the ``tile``-th tile to the MMA warp; call it once all of it has been read."""
    _acc, _acc_full, acc_empty = accumulators
    mbarrier.arrive(acc_empty.index(tile % ACCUMULATORS), count=1)


@gluon.jit
def load_slice(slices, index, bias, expert, stride_bias, column, width):
    """Slice ``index`` (BM, EPILOGUE_N) of an accumulator, plus ``bias``, if any, from ``column`` on."""
    value = tmem_load(slices.index(index))
    if bias is not None:
        # ``// 8 * 8`` tells the compiler that this is a multiple of 8, so that it emits 16-byte loads.
        columns = column // 8 * 8 + gl.arange(0, EPILOGUE_N, gl.SliceLayout(0, value.type.layout))
        value += load_columns(bias, expert, stride_bias, columns, width).to(gl.float32)[None, :]
    return value


@gluon.jit
def store_staged(descriptor, place, value, staging, count):
    """Start the ``count``-th TMA store of a tile, through the two staging buffers in turn. A tile must have an even
    number of stores."""
    tma.store_wait(1)
    store_slice(descriptor, place, value, staging.index(count % 2))
