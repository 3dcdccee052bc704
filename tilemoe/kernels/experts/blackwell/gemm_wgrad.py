"""The weight gradients down_proj_wgrad and up_proj_wgrad: ``out_e = A_e^T B_e``, contracted over the expert's rows,
with A gathered by token.

T tokens · E experts · R_max static row capacity · p, q widths of A (gathered) and B (contiguous)
BM x BN tile of (p, q) · BK k-block: rows of the expert per stage

Tiles and their order are those of `hopper.gemm_wgrad`; the roles are those of `pipeline`. Neither operand is K-major.
Past an expert's last row B is zero and A repeats that row. An expert without rows takes no stage; its gradient is zero.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilemoe.kernels.experts.blackwell.gluon_compat import tma_gather, tmem_load
from tilemoe.kernels.experts.blackwell.pipeline import (
    BK,
    BM,
    EPILOGUE_N,
    GATHER_LAYOUT,
    mma_tile,
    new_accumulators,
    new_ring,
    relay,
    relay_rest,
    release_accumulator,
    wait_accumulator,
)
from tilemoe.kernels.experts.hopper.gemm_gather_act import CP_ASYNC_LAYOUT
from tilemoe.kernels.experts.hopper.gemm_wgrad import copy_a, weight_tile_coords
from tilemoe.kernels.experts.hopper.gluon_compat import tma_add, tma_load, tma_store
from tilemoe.kernels.experts.hopper.pipeline import (
    ADDED_N,
    RAGGED_EXTENT,
    load_tokens,
    producer_acquire,
    reshape_blocks,
)


@gluon.jit
def wgrad_producer(
    by_token, stride_token, token_of_row, by_row, sizes, ring, BN: gl.constexpr, ACCESS: gl.constexpr
):  # fmt: skip
    """Producer: fills stages with BK rows of A, by_token (T, p) gathered, and of B, by_row (R_max, q). Past the
    expert's last row B is zero.

    A stage of A is two blocks of (BK, EPILOGUE_N). ACCESS: as in `pipeline.row_producer`, but not "rows".
    """
    row_start_of_expert, num_experts, p, q = sizes
    a_smem, b_smem, full, _empty = ring
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte copies.
    p, stride_token = p // 8 * 8, stride_token // 8 * 8
    OF_ROW: gl.constexpr = gl.SliceLayout(1, CP_ASYNC_LAYOUT) if ACCESS == "copy" else GATHER_LAYOUT
    A_BYTES: gl.constexpr = 0 if ACCESS == "copy" else BM * BK * 2
    rows = gl.arange(0, BK, OF_ROW)
    columns = gl.arange(0, EPILOGUE_N, gl.SliceLayout(0, CP_ASYNC_LAYOUT))
    total = num_experts * gl.cdiv(p, BM) * gl.cdiv(q, BN)
    step = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _expert, start, end, first, col = weight_tile_coords(index, total, p, q, row_start_of_expert, BN)
        next_token = load_tokens(token_of_row, start, end, rows)
        for k in range(start, end, BK):
            token = next_token
            next_token = load_tokens(token_of_row, k + BK, end, rows)  # one stage ahead, to hide the latency
            stage = producer_acquire(ring, step)
            mbarrier.expect(full.index(stage), by_row.block_type.nbytes + A_BYTES)
            place = [RAGGED_EXTENT, end, RAGGED_EXTENT - end + k, col]
            tma_load(by_row, place, full.index(stage), b_smem.index(stage))
            blocks = reshape_blocks(a_smem.index(stage), 2, BK)
            for i in gl.static_range(2):
                if ACCESS == "gather":
                    tma_gather(by_token, token, first + i * EPILOGUE_N, full.index(stage), blocks.index(i))
                else:
                    lines = by_token + (token.to(gl.int64) * stride_token)[:, None]
                    copy_a(blocks.index(i), lines, first + i * EPILOGUE_N + columns, p)
            if ACCESS == "copy":
                relay(ring, step)
            step += 1
    if ACCESS == "copy":
        relay_rest(ring, step)


@gluon.jit
def wgrad_mma(sizes, ring, accumulators, BN: gl.constexpr):
    """The MMA warp of the weight gradients."""
    row_start_of_expert, num_experts, p, q = sizes
    total = num_experts * gl.cdiv(p, BM) * gl.cdiv(q, BN)
    step, tile = 0, 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        _expert, start, end, _first, _col = weight_tile_coords(index, total, p, q, row_start_of_expert, BN)
        step = mma_tile(ring, accumulators, step, gl.cdiv(end - start, BK), tile, BN, False, False)
        tile += 1  # noqa: SIM113


@gluon.jit
def store_gradient(out, value, expert, row, col, buffer, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr):
    """Start the TMA store, or reduce-add, of a slice ``value`` (BM, EPILOGUE_N or ADDED_N) of a tile's gradient.

    L2 does the addition: no thread loads the old values or waits for them.
    """
    tma.store_wait(1)
    if TRANSPOSED:
        buffer.permute([1, 0]).store(value.to(out.dtype))
    else:
        buffer.store(value.to(out.dtype))
    fence_async_shared()
    place = [expert, col, row] if TRANSPOSED else [expert, row, col]
    if ADDS:
        tma_add(out, place, buffer.reshape(out.block_shape))
    else:
        tma_store(out, place, buffer.reshape(out.block_shape))


@gluon.jit
def zero_unless(condition, value):
    """``value`` if a scalar condition holds, else zeros, even where value is NaN."""
    LAYOUT: gl.constexpr = value.type.layout
    return gl.where(condition, value, gl.zeros(value.shape, gl.float32, LAYOUT))


@gluon.jit
def wgrad_epilogue(
    out, sizes, accumulators, staging, BN: gl.constexpr, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr
):  # fmt: skip
    """The epilogue warps: store or add a tile, transposed if out is (E, q, p). TMA drops elements past p or q."""
    row_start_of_expert, num_experts, p, q = sizes
    COLUMNS: gl.constexpr = ADDED_N if ADDS else EPILOGUE_N
    total = num_experts * gl.cdiv(p, BM) * gl.cdiv(q, BN)
    tile = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, end, row, col = weight_tile_coords(index, total, p, q, row_start_of_expert, BN)
        acc = wait_accumulator(accumulators, tile)
        for i in gl.static_range(BN // COLUMNS):
            value = tmem_load(acc.slice(i * COLUMNS, COLUMNS))
            if i == BN // COLUMNS - 1:
                release_accumulator(accumulators, tile)
            value = zero_unless(start < end, value)  # without rows no product has overwritten the old accumulator
            store_gradient(out, value, expert, row, col + i * COLUMNS, staging.index(i % 2), TRANSPOSED, ADDS)
        tile += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def gemm_wgrad_kernel(
    by_token,
    by_row,
    out,
    token_of_row,
    row_start_of_expert,
    num_experts,
    p,
    q,
    stride_token,
    TRANSPOSED: gl.constexpr,
    ADDS: gl.constexpr,
    ACCESS: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """``out_e = sum over rows r of e of by_token[token_r]^T by_row[r]`` (E, p, q), or (E, q, p) if TRANSPOSED.

    Zeros for an expert without rows. ADDS: the gradient is added to out, which is fp32.
    """
    staged: gl.constexpr = gl.NVMMASharedLayout(128, 32 if ADDS else 16, 2)
    ring = new_ring(by_row, by_row.dtype, STAGES, ACCESS)
    accumulators = new_accumulators(BN)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape[1:], staged)  # noqa: RUF005
    sizes = (row_start_of_expert, num_experts, p, q)
    fence_async_shared()  # a thread has initialised the barriers, at which TMA and tcgen05 arrive
    gl.warp_specialize(
        [
            (wgrad_epilogue, (out, sizes, accumulators, staging, BN, TRANSPOSED, ADDS)),
            (wgrad_producer, (by_token, stride_token, token_of_row, by_row, sizes, ring, BN, ACCESS)),
            (wgrad_mma, (sizes, ring, accumulators, BN)),
        ],
        [4, 1],
        [REGISTERS, REGISTERS],
    )
