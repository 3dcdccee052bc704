"""down_proj_wgrad and up_proj_wgrad with FP8 operands, ``out_e = A_e^T B_e`` contracted over the expert's rows, from
transposed copies.

E experts · p, q widths of A and B · c width of a slice of A · L room along the rows, laid out by `triton.transpose`
BM x BN tile of (c, q) · BK k-block: 128 rows, as 64 elements of 16 bits · G CTAs

Cooperative (see `hopper.pipeline`), both operands K-major and by TMA: one warp is the producer. Tile order, epilogue
and what an expert without rows takes are those of `hopper.gemm_wgrad`.

Tensor cores truncate as they add, to some 14 bits, so that a long sum of products with a mean comes out too small: by
.7% after 4,096 rows where both operands' mean is half their standard deviation, by 8% after 32,768 (docs/fp8.md). So a
sum of more than CHUNK k-blocks is made of chunks of equal size, and the sums of chunks are added in fp32. Registers
have no room for a second accumulator, so the chunks' sum so far is in global memory, in practice in L2: each thread
writes its own elements of the tile and reads them back, so no synchronisation is needed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilemoe.kernels.experts.hopper.gemm_wgrad import store_gradient, weight_tile_coords
from tilemoe.kernels.experts.hopper.gluon_compat import tma_load
from tilemoe.kernels.experts.hopper.pipeline import (
    BK,
    BM,
    CONSUMERS,
    EPILOGUE_N,
    WARPGROUP_M,
    epilogue_slices,
    new_barriers,
    new_tile_info,
    producer_acquire,
    publish_tile,
    receive_tile,
    skip_stages,
)
from tilemoe.kernels.experts.hopper_fp8.mainloop import BLOCK, mma_mainloop, zero_tile


@gluon.jit
def transposed_producer(
    by_token, by_row, row_start_of_expert, num_experts, width, q, ring, tile_info, BN: gl.constexpr
):  # fmt: skip
    """Producer, one warp: stages of 128 rows of A, by_token (c, L / 2), and of B, by_row (q, L / 2).

    tile_info: (expert, first row and column of the tile, number of stages); 0 comes in a stage without operands.
    """
    a_smem, b_smem, full, _empty = ring
    total = num_experts * gl.cdiv(width, BM) * gl.cdiv(q, BN)
    step = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, end, first, col = weight_tile_coords(index, total, width, q, row_start_of_expert, BN)
        steps = gl.cdiv(end - start, BLOCK)
        place = (start // BLOCK + expert) * BK  # as `triton.transpose.first_block`
        stage = producer_acquire(ring, step)
        publish_tile(tile_info, stage, expert, first, col, steps)
        if steps == 0:
            mbarrier.arrive(full.index(stage), count=1)
            step += 1
        for k in range(steps):
            stage = producer_acquire(ring, step)
            mbarrier.expect(full.index(stage), by_token.block_type.nbytes + by_row.block_type.nbytes)
            tma_load(by_token, [first, place + k * BK], full.index(stage), a_smem.index(stage))
            tma_load(by_row, [col, place + k * BK], full.index(stage), b_smem.index(stage))
            step += 1


@gluon.jit
def partial_pointers(partial, value, i: gl.constexpr, CONSUMER: gl.constexpr, BN: gl.constexpr):
    """Pointers to the ``i``-th slice of this consumer's tile in partial (G, CONSUMERS, WARPGROUP_M, BN)."""
    tile = partial + (gl.program_id(0) * CONSUMERS + CONSUMER) * (WARPGROUP_M * BN)
    rows = gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, value.type.layout))
    columns = i * EPILOGUE_N + gl.arange(0, EPILOGUE_N, gl.SliceLayout(0, value.type.layout))
    return tile + rows[:, None] * BN + columns[None, :]


@gluon.jit
def add_partial(partial, value, i: gl.constexpr, exists, CONSUMER: gl.constexpr, BN: gl.constexpr):
    """``value`` (WARPGROUP_M, EPILOGUE_N) plus what the tile's earlier chunks have summed, if one ``exists``."""
    if exists:
        value += gl.load(partial_pointers(partial, value, i, CONSUMER, BN))
    return value


@gluon.jit
def transposed_consumer(
    out, scale, partial, num_experts, first_of_slice, width, q, ring, tile_info, staging,
    CONSUMER: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """Consumer. Epilogue of each chunk: multiply by the expert's scale and add the chunks before it. The sum goes to
    ``partial``, that of the last chunk to ``out``, as `hopper.gemm_wgrad.wgrad_consumer` stores or adds it.
    """
    total = num_experts * gl.cdiv(width, BM) * gl.cdiv(q, BN)
    rows = gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, zero_tile().type.layout))
    step = 0
    for _ in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, col, steps = receive_tile(ring, tile_info, step)
        chunks, row = gl.maximum(gl.cdiv(steps, CHUNK), 1), first_of_slice + first + CONSUMER * WARPGROUP_M
        of_expert = scale + expert + 0 * rows  # one scale for all rows, loaded as theirs are: behind a product
        for chunk in range(chunks):
            acc = zero_tile()
            if steps > 0:
                count = gl.cdiv(steps, chunks - chunk)
                acc, of_rows, step = mma_mainloop(ring, of_expert, step, count, False, CONSUMER)
                acc *= of_rows[:, None]
                steps -= count
            else:
                step = skip_stages(ring, step, 1, False)
            slices = epilogue_slices(acc, BN)
            for i in gl.static_range(4):
                value = add_partial(partial, slices[i], i, chunk > 0, CONSUMER, BN)
                if steps > 0:
                    gl.store(partial_pointers(partial, value, i, CONSUMER, BN), value)
                else:
                    store_gradient(
                        out, value, expert, row, col + i * EPILOGUE_N, staging, i, CONSUMER, TRANSPOSED, ADDS
                    )
    tma.store_wait(0)


@gluon.jit
def gemm_transposed_kernel(
    by_token,
    by_row,
    scale,
    out,
    partial,
    row_start_of_expert,
    num_experts,
    first_of_slice,
    width,
    q,
    TRANSPOSED: gl.constexpr,
    ADDS: gl.constexpr,
    CHUNK: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """by_token (c, L / 2) and by_row (q, L / 2) of 16 bits, scale (E) -> ``width`` = c rows, from first_of_slice on,
    of out (E, p, q), or columns of (E, q, p) if TRANSPOSED.

    Zeros for an expert without rows. ADDS: out, fp32, is accumulated into.
    partial (G, CONSUMERS, WARPGROUP_M, BN) fp32: room for sums of a tile's chunks, each of at most CHUNK k-blocks.
    """
    staged: gl.constexpr = gl.NVMMASharedLayout(128, 32 if ADDS else 16, 2)
    a_smem = gl.allocate_shared_memory(by_token.dtype, [STAGES, BM, BK], by_token.layout)
    b_smem = gl.allocate_shared_memory(by_row.dtype, [STAGES, BN, BK], by_row.layout)
    staging = gl.allocate_shared_memory(out.dtype, [2 * CONSUMERS] + out.block_shape[1:], staged)  # noqa: RUF005
    ring = (a_smem, b_smem, new_barriers(STAGES, 1), new_barriers(STAGES, CONSUMERS))
    tile_info = new_tile_info(STAGES)
    gl.warp_specialize(
        [
            (transposed_consumer, (out, scale, partial, num_experts, first_of_slice, width, q, ring, tile_info,
                                   staging, 0, BN, CHUNK, TRANSPOSED, ADDS)),
            (transposed_consumer, (out, scale, partial, num_experts, first_of_slice, width, q, ring, tile_info,
                                   staging, 1, BN, CHUNK, TRANSPOSED, ADDS)),
            (transposed_producer, (by_token, by_row, row_start_of_expert, num_experts, width, q, ring, tile_info, BN)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
