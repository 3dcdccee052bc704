"""The weight gradients down_proj_wgrad and up_proj_wgrad: ``out_e = A_e^T B_e``, contracted over the expert's rows,
with A gathered by token.

T tokens · E experts · R_max static row capacity · p, q widths of A (gathered) and B (contiguous) · G CTAs
c width of a slice of A
BM x BN tile of (p, q) · BK k-block: rows of the expert per stage

Cooperative (see `pipeline`): the producer warp group loads A by cp.async and B by TMA; neither is K-major. Each of two
consumer warp groups has 64 of a tile's BM rows. Persistent with a static scheduler: one expert after the other, the
gradient's shorter side innermost. An expert without rows takes a stage without operands; its gradient is zero.

FP8 operands (`gemm_transposed_kernel`) are transposed copies of length L along the rows, laid out by
`triton.formats.transpose`. Both are K-major and loaded by TMA, so that the producer is one warp; a k-block is 128 rows.
Tensor cores truncate their sums to some 14 bits, so that a long sum of products with a mean becomes too small: by .7%
after 4,096 rows if both operands' mean is half their standard deviation, by 8% after 32,768 (docs/fp8.md). So a sum
of more than CHUNK k-blocks is divided into chunks of equal size, and the chunks' sums are added in fp32. Registers
have no room for a second accumulator, so the sum of the chunks so far is in global memory, in practice in L2. Each
thread writes its own elements of the tile and reads them back, so that no synchronisation is needed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilemoe.kernels.experts.hopper.gemm_gather_act import CP_ASYNC_LAYOUT
from tilemoe.kernels.experts.hopper.gluon_compat import cp_async, tma_add, tma_load
from tilemoe.kernels.experts.hopper.pipeline import (
    ADDED_N,
    BK,
    BM,
    CONSUMERS,
    EPILOGUE_N,
    RAGGED_EXTENT,
    WARPGROUP_M,
    begin_mainloop,
    epilogue_slices,
    fence_and_store,
    halves,
    mma_mainloop,
    new_barriers,
    new_tile_info,
    producer_acquire,
    producer_commit,
    producer_commit_empty,
    producer_flush,
    publish_tile,
    receive_tile,
    row_pointers,
    skip_stages,
    store_slice,
    zero_accumulator,
)
from tilemoe.kernels.experts.hopper.scales import BLOCK


@gluon.jit
def weight_tile_coords(index, total, width, q, row_start_of_expert, BN: gl.constexpr):
    """(expert, start and end of its rows, the tile's first row and column in (width, q)) of tile ``index``; if that is
    ``total`` or more, of the last tile."""
    index = gl.minimum(index, total - 1)
    row_tiles, column_tiles = gl.cdiv(width, BM), gl.cdiv(q, BN)
    tiles = row_tiles * column_tiles
    expert = index // tiles
    start = gl.load(row_start_of_expert + expert)
    end = gl.load(row_start_of_expert + expert + 1)
    # The shorter side is innermost, so that the CTAs of a wave share more of the data they read.
    along_rows = row_tiles < column_tiles
    shorter = gl.minimum(row_tiles, column_tiles)
    fast, slow = index % tiles % shorter, index % tiles // shorter
    row, column = gl.where(along_rows, fast, slow), gl.where(along_rows, slow, fast)
    return expert, start, end, row * BM, column * BN


@gluon.jit
def copy_a(buffer, lines, columns, p):
    """cp.async of ``columns`` of A, zero past the last column. lines: pointers to by_token's rows."""
    cp_async(buffer, lines + columns[None, :], mask=(columns < p)[None, :])


@gluon.jit
def wgrad_producer(
    by_token,
    stride_token,
    token_of_row,
    by_row,
    row_start_of_expert,
    num_experts,
    p,
    q,
    ring,
    tile_info,
    BN: gl.constexpr,
):
    """Producer: fills stages with BK rows of A, by_token (T, p) gathered, and of B, by_row (R_max, q). Past the
    expert's last row B is zero.

    tile_info: (expert, first row and column of the tile, number of stages), where 0 stages means one without operands.
    """
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte copies.
    p, stride_token = p // 8 * 8, stride_token // 8 * 8
    a_smem, b_smem, full, _empty = ring
    total = num_experts * gl.cdiv(p, BM) * gl.cdiv(q, BN)
    rows = gl.arange(0, BK, gl.SliceLayout(1, CP_ASYNC_LAYOUT))
    columns = gl.arange(0, WARPGROUP_M, gl.SliceLayout(0, CP_ASYNC_LAYOUT))
    step = 0
    expert, start, end, first, col = weight_tile_coords(gl.program_id(0), total, p, q, row_start_of_expert, BN)
    token = gl.load(row_pointers(token_of_row, start, end, rows))
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        next_expert, next_start, next_end, next_first, next_col = weight_tile_coords(
            index + gl.num_programs(0), total, p, q, row_start_of_expert, BN
        )
        stage = producer_acquire(ring, step)
        publish_tile(tile_info, stage, expert, first, col, gl.cdiv(end - start, BK))
        if start >= end:
            producer_commit_empty(ring, step)
            step += 1
        upper = first + columns
        lower = upper + WARPGROUP_M
        for k in range(start, end, BK):
            lines = by_token + (token.to(gl.int64) * stride_token)[:, None]
            # Prefetch the next stage's tokens, or the next tile's.
            more = k + BK < end
            row, bound = gl.where(more, k + BK, next_start), gl.where(more, end, next_end)
            token = gl.load(row_pointers(token_of_row, row, bound, rows))
            stage = producer_acquire(ring, step)
            mbarrier.expect(full.index(stage), by_row.block_type.nbytes)
            place = [RAGGED_EXTENT, end, RAGGED_EXTENT - end + k, col]
            tma_load(by_row, place, full.index(stage), b_smem.index(stage))
            copy_a(a_smem.index(CONSUMERS * stage), lines, upper, p)
            copy_a(a_smem.index(CONSUMERS * stage + 1), lines, lower, p)
            producer_commit(ring, step)
            step += 1
        # The loop prefetches the next tile's tokens, but without rows it has not run.
        no_rows = (start + rows * 0) >= end
        token = gl.load(row_pointers(token_of_row, next_start, next_end, rows), mask=no_rows, other=token)
        expert, start, end, first, col = next_expert, next_start, next_end, next_first, next_col
    producer_flush(ring, step)


@gluon.jit
def add_slice(out, value, expert, row, col, staging, CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Start TMA reduce-adds of ``value`` (WARPGROUP_M, EPILOGUE_N) to the gradient in memory, 32 columns at a time.

    L2 does the addition: no thread loads the old values or waits for them.
    """
    left, right = halves(value, WARPGROUP_M, EPILOGUE_N)
    for i in gl.static_range(2):
        tma.store_wait(1)
        buffer = staging.index(2 * CONSUMER + i)
        added_col = col + i * ADDED_N
        if TRANSPOSED:
            buffer.permute([1, 0]).store(left if i == 0 else right)
        else:
            buffer.store(left if i == 0 else right)
        fence_async_shared()
        place = [expert, added_col, row] if TRANSPOSED else [expert, row, added_col]
        tma_add(out, place, buffer.reshape(out.block_shape))


@gluon.jit
def store_gradient(
    out, value, expert, row, col, staging, i: gl.constexpr,
    CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """Start the TMA store, or reduce-add, of the ``i``-th slice (WARPGROUP_M, EPILOGUE_N) of a tile's gradient."""
    if ADDS:
        add_slice(out, value, expert, row, col, staging, CONSUMER, TRANSPOSED)
    else:
        tma.store_wait(1)
        buffer = staging.index(2 * CONSUMER + i % 2)
        if TRANSPOSED:
            buffer.permute([1, 0]).store(value.to(out.dtype))
            fence_and_store(out, [expert, col, row], buffer)
        else:
            store_slice(out, [expert, row, col], value, buffer)


@gluon.jit
def wgrad_consumer(
    out, num_experts, p, q, ring, tile_info, staging,
    CONSUMER: gl.constexpr, BN: gl.constexpr, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """Consumer. The epilogue stores or adds its 64 rows of the tile, transposed if the output is (E, q, p)."""
    total = num_experts * gl.cdiv(p, BM) * gl.cdiv(q, BN)
    step = 0
    for _ in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, col, steps = receive_tile(ring, tile_info, step)
        acc = zero_accumulator(BN, "none")
        if steps > 0:
            acc = begin_mainloop(ring, step, CONSUMER, BN, False, False, "none")
            acc, step = mma_mainloop(ring, acc, step, steps, False, CONSUMER, BN, False, False, "none")
        else:
            step = skip_stages(ring, step, 1, False)
        row = first + CONSUMER * WARPGROUP_M
        slices = epilogue_slices(acc, BN)
        for i in gl.static_range(4):
            store_gradient(out, slices[i], expert, row, col + i * EPILOGUE_N, staging, i, CONSUMER, TRANSPOSED, ADDS)
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
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """``out_e = sum over rows r of e of by_token[token_r]^T by_row[r]`` (E, p, q), or (E, q, p) if TRANSPOSED.

    Zeros for an expert without rows. ADDS: the gradient is added to out, which is fp32.
    """
    dtype: gl.constexpr = by_token.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    staged: gl.constexpr = gl.NVMMASharedLayout(128, 32 if ADDS else 16, 2)
    a_smem = gl.allocate_shared_memory(dtype, [CONSUMERS * STAGES, BK, WARPGROUP_M], swizzled)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + by_row.block_shape, by_row.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(out.dtype, [2 * CONSUMERS] + out.block_shape[1:], staged)  # noqa: RUF005
    ring = (a_smem, b_smem, new_barriers(STAGES, 2), new_barriers(STAGES, CONSUMERS))
    tile_info = new_tile_info(STAGES)
    gl.warp_specialize(
        [
            (wgrad_consumer, (out, num_experts, p, q, ring, tile_info, staging, 0, BN, TRANSPOSED, ADDS)),
            (wgrad_consumer, (out, num_experts, p, q, ring, tile_info, staging, 1, BN, TRANSPOSED, ADDS)),
            (wgrad_producer, (by_token, stride_token, token_of_row, by_row, row_start_of_expert, num_experts,
                              p, q, ring, tile_info, BN)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# With FP8 operands


@gluon.jit
def transposed_producer(
    by_token, by_row, row_start_of_expert, num_experts, width, q, ring, tile_info, BN: gl.constexpr
):  # fmt: skip
    """Producer, one warp: it fills stages with 128 rows of A, by_token (c, L / 2), and of B, by_row (q, L / 2).

    tile_info: (expert, first row and column of the tile, number of stages), where 0 stages means one without operands.
    """
    a_smem, b_smem, full, _empty = ring
    total = num_experts * gl.cdiv(width, BM) * gl.cdiv(q, BN)
    step = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, start, end, first, col = weight_tile_coords(index, total, width, q, row_start_of_expert, BN)
        steps = gl.cdiv(end - start, BLOCK)
        place = (start // BLOCK + expert) * BK  # `triton.formats.transpose.first_block` times BK
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
    """``value`` (WARPGROUP_M, EPILOGUE_N) plus the sum of the tile's earlier chunks, if such a sum ``exists``."""
    if exists:
        value += gl.load(partial_pointers(partial, value, i, CONSUMER, BN))
    return value


@gluon.jit
def transposed_consumer(
    out, scale, partial, num_experts, first_of_slice, width, q, ring, tile_info, staging,
    CONSUMER: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, TRANSPOSED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """Consumer. The epilogue of a chunk multiplies by the expert's scale and adds the sum of the chunks before. It
    writes the result to ``partial``, or after the last chunk to ``out``, stored or added as in `wgrad_consumer`.
    """
    total = num_experts * gl.cdiv(width, BM) * gl.cdiv(q, BN)
    rows = gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, zero_accumulator(BN, "experts").type.layout))
    step = 0
    for _ in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, col, steps = receive_tile(ring, tile_info, step)
        chunks, row = gl.maximum(gl.cdiv(steps, CHUNK), 1), first_of_slice + first + CONSUMER * WARPGROUP_M
        of_expert = scale + expert + 0 * rows  # one scale for all rows, loaded like row scales: after the first wgmma
        for chunk in range(chunks):
            acc = zero_accumulator(BN, "experts")
            if steps > 0:
                count = gl.cdiv(steps, chunks - chunk)
                acc = begin_mainloop(ring, step, CONSUMER, BN, True, True, "experts")
                of_rows = gl.load(of_expert)
                acc, step = mma_mainloop(ring, acc, step, count, False, CONSUMER, BN, True, True, "experts")
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
    """by_token (c, L / 2) and by_row (q, L / 2), viewed as 16-bit elements, and scale (E) -> ``width`` = c rows of out
    (E, p, q) from first_of_slice on, or columns of out (E, q, p) if TRANSPOSED.

    Zeros for an expert without rows. ADDS: the gradient is added to out, which is fp32.
    partial (G, CONSUMERS, WARPGROUP_M, BN) fp32: space for the sums of a tile's chunks, each of at most CHUNK k-blocks.
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
