"""up_proj fused with the activation: ``h = x w1^T + b1, a = act(h)``; and the producer that down_proj_dgrad shares.

A grouped GEMM: row r of A is row token_of_row[r] of x, which the producer warp group gathers by cp.async; B is the
expert's weight, loaded by TMA. Two cooperative consumer warp groups (see `pipeline`) add the bias, compute the
activation, and store a, and h if it is kept, by TMA. The kernel is persistent with a dynamic scheduler. Column tiles
are innermost, so that neighbouring CTAs share gathered rows; wide outputs are walked in bands of columns, to read
weights from L2 (`tile_place`).

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
parts = 2 where gate and up are two halves of one tile, else 1 · BM, BN tile · BK k-block · S stages

With FP8 operands (SCALES "rows") x_scale is (T, 1), weight_scale is (E, w, 1), and the epilogue quantises a. x and the
weight are viewed as half as many elements of the layer's 16-bit dtype, and d counts these elements.

Weight descriptors are (E, parts, out, in) if B_K_MAJOR, else (E, parts, in, out). Output descriptors are ragged: their
bounds check ends at the expert's last row. Interleaved gate and up are adjacent columns, held by the same thread.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilemoe.kernels.experts.hopper.gluon_compat import cp_async, tma_load
from tilemoe.kernels.experts.hopper.pipeline import (
    BK,
    BM,
    CONSUMERS,
    EPILOGUE_N,
    PAIR_LAYOUT,
    RAGGED_EXTENT,
    THREAD_LAYOUT,
    WARPGROUP_M,
    begin_mainloop,
    broadcast_bias,
    deinterleave,
    epilogue_slices,
    load_columns,
    load_tokens,
    mma_mainloop,
    new_column_smem,
    new_ring,
    new_scheduler_smem,
    new_staging,
    new_tile_info,
    producer_acquire,
    producer_commit,
    producer_commit_empty,
    producer_flush,
    publish_tile,
    receive_tile,
    reshape_blocks,
    row_pointers,
    scheduler_next,
    scheduler_prefetch,
    skip_stages,
    store_slice,
    store_slices,
    tile_coords,
)
from tilemoe.kernels.experts.hopper.scales import (
    BLOCK,
    add_bias_to_slices,
    row_scale_pointers,
    row_scaled_mainloop,
    store_quantized,
)
from tilemoe.kernels.experts.triton.activations import gated_value, inner

# 64 x 64 elements of 16 bits over a warp group; each thread copies 16 bytes at a time.
CP_ASYNC_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def load_weight(weight, expert, k, col, ring, stage, B_K_MAJOR: gl.constexpr):
    """Start the TMA load of one k-block of B; its bytes count towards the stage's ``full`` barrier."""
    _a_smem, b_smem, full, _empty = ring
    if B_K_MAJOR:
        tma_load(weight, [expert, 0, col, k], full.index(stage), b_smem.index(stage))
    else:
        tma_load(weight, [expert, 0, k, col], full.index(stage), b_smem.index(stage))


@gluon.jit
def load_gathered(
    ring, step, upper, lower, scales, weight, expert, col, k_from, k_to, width_in,
    B_K_MAJOR: gl.constexpr, EVEN_K: gl.constexpr,
):  # fmt: skip
    """Producer: fill the stages of the k-blocks from ``k_from`` to ``k_to``.

    upper, lower: pointers (64, BK) to the tile's gathered rows of A. scales: None, or (pointers (BM) to the first scale
    of each row, which has one per k-block; shared memory (S, BM) to copy them to).
    Returns (next step, upper, lower) with advanced pointers, which saves adding row and column offsets in each step.
    """
    a_smem, _b_smem, full, _empty = ring
    columns = gl.arange(0, BK, gl.SliceLayout(0, CP_ASYNC_LAYOUT))
    for k in range(k_from, k_to, BK):
        stage = producer_acquire(ring, step)
        mbarrier.expect(full.index(stage), weight.block_type.nbytes)
        load_weight(weight, expert, k, col, ring, stage, B_K_MAJOR)
        buffer = a_smem.index(stage)
        if EVEN_K:
            cp_async(buffer.slice(0, WARPGROUP_M), upper)
            cp_async(buffer.slice(WARPGROUP_M, WARPGROUP_M), lower)
        else:
            inside = (k + columns < width_in)[None, :]
            cp_async(buffer.slice(0, WARPGROUP_M), upper, mask=inside)
            cp_async(buffer.slice(WARPGROUP_M, WARPGROUP_M), lower, mask=inside)
        if scales is not None:
            first_scale, scale_smem = scales
            cp_async(scale_smem.index(stage), first_scale + k // BK)
        producer_commit(ring, step)
        step += 1
        upper, lower = upper + BK, lower + BK
    return step, upper, lower


@gluon.jit
def load_h(ring, step, h, row, col, BN: gl.constexpr, GATE_UP: gl.constexpr):
    """Producer of down_proj_dgrad: after a tile's k-blocks, fill a stage for each epilogue slice, with both consumers'
    h in B's buffer.

    h: for concatenated gate and up, a descriptor of (2, R_max, n) with boxes (2, 64, 64); else of (R_max, w) with boxes
    (64, 64), two for each slice if interleaved.
    """
    _a_smem, b_smem, full, _empty = ring
    BLOCKS: gl.constexpr = 2 if GATE_UP == "interleaved" else 1
    for i in gl.static_range(BN // EPILOGUE_N):
        stage = producer_acquire(ring, step)
        mbarrier.expect(full.index(stage), CONSUMERS * BLOCKS * h.block_type.nbytes)
        buffers = reshape_blocks(
            b_smem.index(stage), CONSUMERS * BLOCKS, 2 * WARPGROUP_M if GATE_UP == "concatenated" else WARPGROUP_M
        )
        for consumer in gl.static_range(CONSUMERS):
            for block in gl.static_range(BLOCKS):
                first, inside = row + consumer * WARPGROUP_M, BLOCKS * (col + i * EPILOGUE_N) + block * EPILOGUE_N
                place = [0, first, inside] if GATE_UP == "concatenated" else [first, inside]
                buffer = buffers.index(consumer * BLOCKS + block)
                tma_load(h, place, full.index(stage), buffer.reshape(h.block_shape))
        producer_commit(ring, step)
        step += 1
    return step


@gluon.jit
def gather_producer(
    source, row_scale, stride_source, token_of_row, weight, tiles, row_tiles, tile_counter, width_in, width_out, ring,
    tile_info, scheduler_smem, extra,
    BN: gl.constexpr, B_K_MAJOR: gl.constexpr, BAND: gl.constexpr, EVEN_K: gl.constexpr, GATE_UP: gl.constexpr,
):  # fmt: skip
    """Producer of the cooperative row GEMMs: A is ``source`` (T, width_in), its rows gathered by token; see
    `load_tokens`. stride_source None: the rows are contiguous.

    tile_info: (expert, first row, end of the expert's rows, first column); expert -1 tells the consumers to stop.

    row_scale: None, or (scales (T, width_in / BK), shared memory (S, BM) to copy them to, beside A).
    extra: (h, pair_of_row, pairs) for down_proj_dgrad, else None. h's stages follow the k-blocks. In the tile's first
    stage, pairs (S, BM) gets pair_of_row of its rows.
    """
    # ``// 8 * 8`` tells the compiler that these are multiples of 8, so that it emits 16-byte copies.
    width_in = width_in // 8 * 8
    stride_source = width_in if stride_source is None else stride_source // 8 * 8
    column_tiles = gl.cdiv(width_out, BN)
    total = row_tiles * column_tiles
    rows = gl.arange(0, WARPGROUP_M, gl.SliceLayout(1, CP_ASYNC_LAYOUT))
    columns = gl.arange(0, BK, gl.SliceLayout(0, CP_ASYNC_LAYOUT))
    # The next tile's tokens are loaded after this much of the contraction; the rest, or loading h, hides their latency.
    before = width_in // BK // 2 * BK if extra is None else width_in
    step = 0
    index = gl.program_id(0)
    next_index = index + gl.num_programs(0)
    expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, BN, BAND)
    upper_token = load_tokens(token_of_row, row, end, rows)
    lower_token = load_tokens(token_of_row, row + WARPGROUP_M, end, rows)
    if row_scale is not None:
        scale_table, scale_smem = row_scale
        scale_token = load_tokens(token_of_row, row, end, gl.arange(0, BM, THREAD_LAYOUT))
    while index < total:
        next_expert, next_row, next_end, next_col = tile_coords(next_index, row_tiles, column_tiles, tiles, BN, BAND)
        upper = source + (upper_token.to(gl.int64) * stride_source)[:, None] + columns[None, :]
        lower = source + (lower_token.to(gl.int64) * stride_source)[:, None] + columns[None, :]
        scales = None if row_scale is None else (scale_table + scale_token.to(gl.int64) * (width_in // BK), scale_smem)
        prefetched = scheduler_prefetch(tile_counter, next_index < total)
        stage = producer_acquire(ring, step)
        publish_tile(tile_info, stage, expert, row, end, col)
        if extra is not None:
            h, pair_of_row, pairs = extra
            cp_async(pairs.index(stage), row_pointers(pair_of_row, row, end, gl.arange(0, BM, THREAD_LAYOUT)))
        step, upper, lower = load_gathered(
            ring, step, upper, lower, scales, weight, expert, col, 0, before, width_in, B_K_MAJOR, EVEN_K
        )
        # The next tile's coordinates have arrived by now; its tokens arrive before its first stage is filled.
        upper_token = load_tokens(token_of_row, next_row, next_end, rows)
        lower_token = load_tokens(token_of_row, next_row + WARPGROUP_M, next_end, rows)
        if row_scale is not None:
            scale_token = load_tokens(token_of_row, next_row, next_end, gl.arange(0, BM, THREAD_LAYOUT))
        number = scheduler_next(prefetched, scheduler_smem, tile_counter, total, next_index < total)
        index, next_index = next_index, number
        if extra is None:
            step, upper, lower = load_gathered(
                ring, step, upper, lower, scales, weight, expert, col, before, width_in, width_in, B_K_MAJOR, EVEN_K
            )
        else:
            step = load_h(ring, step, h, row, col, BN, GATE_UP)
        expert, row, end, col = next_expert, next_row, next_end, next_col
    publish_tile(tile_info, producer_acquire(ring, step), -1, 0, 0, 0)
    producer_commit_empty(ring, step)
    producer_flush(ring, step + 1)


@gluon.jit
def load_tile_columns(values, expert, stride, col, n, BN: gl.constexpr, B_K_MAJOR: gl.constexpr, GATE_UP: gl.constexpr):
    """`load_columns` of ``values`` (E, w) in the order of a tile's BN columns; zero past the last column."""
    column = gl.arange(0, BN, PAIR_LAYOUT)
    if GATE_UP == "concatenated":
        RUN: gl.constexpr = BN // 2 if B_K_MAJOR else EPILOGUE_N  # columns of gate, followed by as many of up
        inside = col + column // (2 * RUN) * RUN + column % RUN
        column = gl.where(inside < n, inside + column // RUN % 2 * n, 2 * n)
        width = 2 * n
    elif GATE_UP == "interleaved":
        column, width = col + column, 2 * n
    else:
        column, width = col + column, n
    return load_columns(values, expert, stride, column, width)


@gluon.jit
def gate_up_slices(acc, BN: gl.constexpr, B_K_MAJOR: gl.constexpr, GATE_UP: gl.constexpr):
    """(gates, ups) of an accumulator (64, BN): tuples of slices (64, EPILOGUE_N); without a gate both are h."""
    if GATE_UP == "interleaved":
        gate, up = deinterleave(acc, BN)
        gates, ups = epilogue_slices(gate, BN // 2), epilogue_slices(up, BN // 2)
    else:
        slices = epilogue_slices(acc, BN)
        if GATE_UP == "none":
            gates, ups = slices, slices
        elif B_K_MAJOR:
            gates, ups = (slices[0], slices[1]), (slices[2], slices[3])
        else:
            gates, ups = (slices[0], slices[2]), (slices[1], slices[3])
    return gates, ups


@gluon.jit
def store_act(
    acc, a, end, row, col, limit, alpha, staging,
    CONSUMER: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute a = act(h) of a consumer's rows, where acc (64, BN) is h, and start the TMA stores, slice by slice."""
    WIDTH: gl.constexpr = BN if GATE_UP == "none" else BN // 2
    gates, ups = gate_up_slices(acc, BN, B_K_MAJOR, GATE_UP)
    if GATE_UP == "interleaved":
        col = col // 2
    for i in gl.static_range(WIDTH // EPILOGUE_N):
        if GATE_UP == "none":
            value, _slope = inner(gates[i], ACTIVATION, False)
        else:
            value = gated_value(gates[i], ups[i], limit, alpha, ACTIVATION, False)
        tma.store_wait(1)
        place = [RAGGED_EXTENT, end, RAGGED_EXTENT - end + row, col + i * EPILOGUE_N]
        store_slice(a, place, value, staging.index(2 * CONSUMER + i % 2))


@gluon.jit
def store_quantized_act(
    slices, a, a_scale, end, row, col, n, limit, alpha, staging,
    CONSUMER: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Compute a = act(h) of a tile's four slices of h, quantise and store it; col: the tile's first column of h."""
    first, second, third, fourth = slices
    staged = staging.index(2 * CONSUMER)
    if GATE_UP == "concatenated":
        left = gated_value(first, third, limit, alpha, ACTIVATION, False)
        right = gated_value(second, fourth, limit, alpha, ACTIVATION, False)
        store_quantized((left, right), a, a_scale, end, row, col, n, staged)
    elif GATE_UP == "interleaved":
        left = pairs_value(first, limit, alpha, ACTIVATION), pairs_value(second, limit, alpha, ACTIVATION)
        right = pairs_value(third, limit, alpha, ACTIVATION), pairs_value(fourth, limit, alpha, ACTIVATION)
        store_quantized(left + right, a, a_scale, end, row, col // 2, n, staged)
    else:
        left = ungated_value(first, ACTIVATION), ungated_value(second, ACTIVATION)
        right = ungated_value(third, ACTIVATION), ungated_value(fourth, ACTIVATION)
        store_quantized(left, a, a_scale, end, row, col, n, staged)
        store_quantized(right, a, a_scale, end, row, col + BLOCK, n, staging.index(2 * CONSUMER + 1))


@gluon.jit
def pairs_value(pairs, limit, alpha, ACTIVATION: gl.constexpr):
    """a (M, EPILOGUE_N / 2) from a slice of interleaved gate and up."""
    gate, up = deinterleave(pairs, EPILOGUE_N)
    return gated_value(gate, up, limit, alpha, ACTIVATION, False)


@gluon.jit
def ungated_value(z, ACTIVATION: gl.constexpr):
    """act(z) of an ungated activation."""
    act, _slope = inner(z, ACTIVATION, False)
    return act


@gluon.jit
def act_consumer(
    a, a_scale, h, bias, stride_bias, x_scale, weight_scale, stride_se, token_of_row, d, n, limit, alpha,
    ring, tile_info, staging, column_smem,
    CONSUMER: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
    KEEP_H: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Consumer of up_proj. The epilogue scales, adds the bias, stores h (if KEEP_H) and act(h), quantised if x is.

    column_smem (CONSUMERS, BN): for the columns' scales, or the bias.
    """
    steps = gl.cdiv(d, BK) if SCALES == "none" else d // BK
    step = 0
    w = n if GATE_UP == "none" else 2 * n
    apart = n if GATE_UP == "concatenated" else BLOCK  # columns of h from a tile's left half to its right half
    expert, row, end, col = receive_tile(ring, tile_info, step)
    while expert >= 0:
        row += CONSUMER * WARPGROUP_M
        if row < end:
            if SCALES == "rows":
                of_columns = load_tile_columns(weight_scale, expert, stride_se, col, n, BN, B_K_MAJOR, GATE_UP)
                of_rows = row_scale_pointers(x_scale, token_of_row, row, end)
                buffer = column_smem.index(CONSUMER)
                slices, step = row_scaled_mainloop(ring, of_rows, of_columns, buffer, step, steps, False, CONSUMER)
                if bias is not None:
                    slices = add_bias_to_slices(slices, bias, expert, stride_bias, col, col + apart, w)
                tma.store_wait(0)  # the last store of the tile before may still read the buffer that is written first
            else:
                if bias is not None:
                    of_columns = load_tile_columns(bias, expert, stride_bias, col, n, BN, B_K_MAJOR, GATE_UP)
                acc = begin_mainloop(ring, step, CONSUMER, BN, True, B_K_MAJOR, SCALES)
                acc, step = mma_mainloop(ring, acc, step, steps, False, CONSUMER, BN, True, B_K_MAJOR, SCALES)
                if bias is not None:
                    acc += broadcast_bias(of_columns, column_smem.index(CONSUMER), acc)
                slices = epilogue_slices(acc, BN)
            if KEEP_H:
                store_slices(slices, h, None, end, row, col, staging, CONSUMER, GATE_UP, B_K_MAJOR)
            if SCALES == "rows":
                store_quantized_act(
                    slices, a, a_scale, end, row, col, n, limit, alpha, staging, CONSUMER, GATE_UP, ACTIVATION
                )
            else:
                store_act(acc, a, end, row, col, limit, alpha, staging, CONSUMER, BN, B_K_MAJOR, GATE_UP, ACTIVATION)
        else:
            step = skip_stages(ring, step, steps, False)
        expert, row, end, col = receive_tile(ring, tile_info, step)
    tma.store_wait(0)


@gluon.jit
def up_proj_act_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    a,
    a_scale,
    h,
    token_of_row,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    tile_counter,
    d,
    n,
    stride_x,
    stride_se,
    stride_bias,
    limit,
    alpha,
    SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    BAND: gl.constexpr,
    KEEP_H: gl.constexpr,
    EVEN_K: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """up_proj: ``h = x w1^T + b1``, ``a = act(h)``; x (T, d) gathered, bias (E, w), a (R_max, n); KEEP_H: h is written.

    GATE_UP "concatenated": weight (E, 2, n, d), h (R_max, 2, n); a tile has BN/2 columns of gate and the same of up,
    as two halves if B_K_MAJOR, else alternating every 64 columns. "interleaved" and "none" (no gate): weight
    (E, 1, w, d), h (R_max, w); a tile has BN columns of h. SCALES "rows": also writes a_scale (R_max, n / 128).
    """
    dtype: gl.constexpr = x.dtype.element_ty
    COLUMNS: gl.constexpr = BN // 2 if GATE_UP == "concatenated" else BN
    width_out = 2 * n if GATE_UP == "interleaved" else n
    ring = new_ring(weight, dtype, STAGES)
    staging, column_smem = new_staging(dtype), new_column_smem(BN)
    tile_info, scheduler_smem = new_tile_info(STAGES), new_scheduler_smem()
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    row_tiles = gl.load(num_tiles)  # read here: one more pointer would spill in a partition
    gl.warp_specialize(
        [
            (act_consumer, (a, a_scale, h, bias, stride_bias, x_scale, weight_scale, stride_se, token_of_row, d, n,
                            limit, alpha, ring, tile_info, staging, column_smem, 0, BN, B_K_MAJOR, GATE_UP,
                            ACTIVATION, KEEP_H, SCALES)),
            (act_consumer, (a, a_scale, h, bias, stride_bias, x_scale, weight_scale, stride_se, token_of_row, d, n,
                            limit, alpha, ring, tile_info, staging, column_smem, 1, BN, B_K_MAJOR, GATE_UP,
                            ACTIVATION, KEEP_H, SCALES)),
            (gather_producer, (x, None, stride_x, token_of_row, weight, tiles, row_tiles, tile_counter, d, width_out,
                               ring, tile_info, scheduler_smem, None, COLUMNS, B_K_MAJOR, BAND, EVEN_K, GATE_UP)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
