"""down_proj_dgrad fused with the activation's backward and the scores' gradient:
``da' = do w2``, ``dh = act'(h) s da'``, ``a_scaled = s act(h)``, and each row's ``<da', act(h)>``.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · BM, BN tile · S stages

Cooperative, with up_proj's producer, dynamic scheduler and tile order (`gemm_gather_act`): do is gathered by cp.async,
w2 loaded by TMA. The epilogue has no buffers of its own: it uses the pipeline's stages. For each slice of 64 columns
the producer loads h (gate and up) into B's buffer of one more stage. The consumer overwrites h with dh, and A's buffer
with a_scaled, and starts TMA stores of both. It releases the stage one slice later, when the stores have read it (a
pending release); a tile's last stage is released during the next tile's first wgmma. So the latency of h's loads and
of the stores is hidden.

With FP8 operands (SCALES "rows") do_scale is (T, 1) and weight_scale is (E, n, 1); do and the weight are viewed as in
`gemm_gather_act`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilemoe.kernels.experts.hopper.gemm_gather_act import gather_producer
from tilemoe.kernels.experts.hopper.gluon_compat import tma_store
from tilemoe.kernels.experts.hopper.pipeline import (
    BK,
    BM,
    CONSUMERS,
    EPILOGUE_N,
    PAIR_LAYOUT,
    RAGGED_EXTENT,
    WARPGROUP_M,
    begin_mainloop,
    consumer_release_previous,
    consumer_wait,
    deinterleave,
    epilogue_slices,
    halves,
    load_columns,
    mma_mainloop,
    new_column_smem,
    new_ring,
    new_scheduler_smem,
    new_tile_info,
    receive_tile,
    reshape_blocks,
    skip_stages,
    zero_accumulator,
)
from tilemoe.kernels.experts.hopper.scales import row_scale_pointers, row_scaled_mainloop
from tilemoe.kernels.experts.triton.activations import gated_grad, inner


@gluon.jit
def concatenated_grad(buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """Returns a (64, EPILOGUE_N) of a slice of concatenated gate and up; da: da' (64, EPILOGUE_N).

    buffer (128, EPILOGUE_N): gate above up; both are overwritten with their gradients.
    """
    gate_buffer, up_buffer = buffer.slice(0, WARPGROUP_M), buffer.slice(WARPGROUP_M, WARPGROUP_M)
    if ACTIVATION == "swiglu_oai" or ACTIVATION == "swiglu_clamped":
        # Half of the columns at a time: the clamps' masks leave too few registers for a whole slice.
        HALF: gl.constexpr = EPILOGUE_N // 2
        left, right = halves(da, WARPGROUP_M, EPILOGUE_N)
        left_gate, left_up = gate_buffer.slice(0, HALF, 1), up_buffer.slice(0, HALF, 1)
        right_gate, right_up = gate_buffer.slice(HALF, HALF, 1), up_buffer.slice(HALF, HALF, 1)
        left_a = gate_up_grad(left_gate, left_up, left, score, limit, alpha, ACTIVATION)
        right_a = gate_up_grad(right_gate, right_up, right, score, limit, alpha, ACTIVATION)
        a = joined(left_a, right_a, da)
    else:
        a = gate_up_grad(gate_buffer, up_buffer, da, score, limit, alpha, ACTIVATION)
    return a


@gluon.jit
def gate_up_grad(gate_buffer, up_buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """Returns a of some columns of a slice; gate and up, in a buffer each, are overwritten with their gradients."""
    gate = gate_buffer.load(da.type.layout).to(gl.float32)
    up = up_buffer.load(da.type.layout).to(gl.float32)
    scale = gl.convert_layout(score, gl.SliceLayout(1, da.type.layout))
    a, dgate, dup = gated_grad(gate, up, da * scale[:, None], limit, alpha, ACTIVATION, False)
    up_buffer.store(dup.to(up_buffer.dtype))
    gate_buffer.store(dgate.to(gate_buffer.dtype))
    return a


@gluon.jit
def joined(left, right, like):
    """The inverse of `halves`: (64, EPILOGUE_N) from its two halves, in the layout of ``like``. No data moves."""
    return gl.convert_layout(
        gl.join(left, right).permute([0, 2, 1]).reshape([WARPGROUP_M, EPILOGUE_N]), like.type.layout
    )


@gluon.jit
def interleaved_grad(left_buffer, right_buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """`concatenated_grad` for interleaved gate and up: each half of a slice has a buffer (64, EPILOGUE_N) of pairs."""
    left, right = halves(da, WARPGROUP_M, EPILOGUE_N)
    left_a = interleaved_half_grad(left_buffer, left, score, limit, alpha, ACTIVATION)
    right_a = interleaved_half_grad(right_buffer, right, score, limit, alpha, ACTIVATION)
    return joined(left_a, right_a, da)


@gluon.jit
def interleaved_half_grad(buffer, da, score, limit, alpha, ACTIVATION: gl.constexpr):
    """Returns a of half a slice, da' (M, EPILOGUE_N / 2); ``buffer``'s pairs of gate and up become their gradients."""
    both: gl.constexpr = gl.join(da, da).reshape([da.shape[0], EPILOGUE_N]).type.layout
    gate, up = deinterleave(buffer.load(both), EPILOGUE_N)
    gate = gl.convert_layout(gate.to(gl.float32), da.type.layout)
    up = gl.convert_layout(up.to(gl.float32), da.type.layout)
    scale = gl.convert_layout(score, gl.SliceLayout(1, da.type.layout))
    a, dgate, dup = gated_grad(gate, up, da * scale[:, None], limit, alpha, ACTIVATION, False)
    buffer.store(gl.join(dgate.to(buffer.dtype), dup.to(buffer.dtype)).reshape([da.shape[0], EPILOGUE_N]))
    return a


@gluon.jit
def dact_slice(
    da, score, dh, a_scaled, end, row, col, limit, alpha, ring, step, index,
    CONSUMER: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The epilogue of slice ``index``, da' (64, EPILOGUE_N), with h in the stage of ``step``; returns <da', a> (64).

    It starts the TMA stores of dh and a_scaled, and releases the stage of the slice before. col: the first column of a.
    """
    a_smem, b_smem, _full, _empty = ring
    stage = consumer_wait(ring, step)
    BLOCKS: gl.constexpr = 2 if GATE_UP == "interleaved" else 1
    ROWS: gl.constexpr = 2 * WARPGROUP_M if GATE_UP == "concatenated" else WARPGROUP_M
    buffers = reshape_blocks(b_smem.index(stage), CONSUMERS * BLOCKS, ROWS)
    buffer, last_buffer = buffers.index(CONSUMER * BLOCKS), buffers.index(CONSUMER * BLOCKS + BLOCKS - 1)
    a_buffer = reshape_blocks(a_smem.index(stage), CONSUMERS, WARPGROUP_M).index(CONSUMER)
    if GATE_UP == "concatenated":
        a = concatenated_grad(buffer, da, score, limit, alpha, ACTIVATION)
    elif GATE_UP == "interleaved":
        a = interleaved_grad(buffer, last_buffer, da, score, limit, alpha, ACTIVATION)
    else:
        a, slope = inner(buffer.load(da.type.layout).to(gl.float32), ACTIVATION, False)
        buffer.store((da * score[:, None] * slope).to(dh.dtype))
    # The wait follows the stores to shared memory: ptxas hoists a wait above plain arithmetic, which would start late.
    tma.store_wait(0)
    consumer_release_previous(ring, step, index > 0)
    # Columns past n add 0, since the weight, and so da', is 0 there. Summing here spills the fewest registers.
    ds = gl.sum(da * a, axis=1)
    # a_scaled is written last: the compiler puts a barrier between the fence and the first TMA store only if this
    # store's own buffer has been written since the previous barrier.
    a_buffer.store((a * score[:, None]).to(dh.dtype))
    last = RAGGED_EXTENT - end + row
    fence_async_shared()
    tma_store(a_scaled, [RAGGED_EXTENT, end, last, col], a_buffer.reshape(a_scaled.block_shape))
    if GATE_UP == "concatenated":
        tma_store(dh, [RAGGED_EXTENT, end, 0, last, col], buffer.reshape(dh.block_shape))
    else:
        tma_store(dh, [RAGGED_EXTENT, end, last, BLOCKS * col], buffer.reshape(dh.block_shape))
    if GATE_UP == "interleaved":
        tma_store(dh, [RAGGED_EXTENT, end, last, BLOCKS * col + EPILOGUE_N], last_buffer.reshape(dh.block_shape))
    return ds


@gluon.jit
def dact_slices(
    slices, score, dh, a_scaled, end, row, col, limit, alpha, ring, step,
    CONSUMER: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, see `dact_slice`: returns <da', a> (64), summed over four slices from left to right."""
    of_slice: gl.constexpr = gl.SliceLayout(1, slices[0].type.layout)
    scale = gl.convert_layout(score, of_slice)
    ds = gl.zeros([WARPGROUP_M], gl.float32, of_slice)
    if ROLLED:
        da, next_da, third_da, last_da = slices
        for i in range(4):
            ds += dact_slice(
                da, scale, dh, a_scaled, end, row, col + i * EPILOGUE_N, limit, alpha, ring, step + i,
                i, CONSUMER, GATE_UP, ACTIVATION,
            )  # fmt: skip
            da, next_da, third_da = next_da, third_da, last_da
    else:
        for i in gl.static_range(4):
            ds += dact_slice(
                slices[i], scale, dh, a_scaled, end, row, col + i * EPILOGUE_N, limit, alpha, ring, step + i,
                i, CONSUMER, GATE_UP, ACTIVATION,
            )  # fmt: skip
    return ds


@gluon.jit
def dact_consumer(
    dh, a_scaled, s, partial, do_scale, weight_scale, stride_se, token_of_row, capacity, d, n, limit, alpha,
    ring, column_smem, tile_info, pairs,
    CONSUMER: gl.constexpr, BN: gl.constexpr, B_K_MAJOR: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr,
    ROLLED: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Consumer of down_proj_dgrad. pairs (S, BM): a tile's pair_of_row, in its first stage. partial: see the kernel."""
    steps = gl.cdiv(d, BK) if SCALES == "none" else d // BK
    step, pending_release = 0, False
    layout: gl.constexpr = gl.SliceLayout(1, zero_accumulator(BN, SCALES).type.layout)
    expert, row, end, col = receive_tile(ring, tile_info, step)
    while expert >= 0:
        first = row + CONSUMER * WARPGROUP_M
        if first < end:
            pair = pairs.index(step % pairs.shape[0]).slice(CONSUMER * WARPGROUP_M, WARPGROUP_M).load(layout)
            score = gl.load(s + pair).to(gl.float32)
            if SCALES == "rows":
                of_columns = load_columns(weight_scale, expert, stride_se, col + gl.arange(0, BN, PAIR_LAYOUT), n)
                of_rows = row_scale_pointers(do_scale, token_of_row, first, end)
                slices, step = row_scaled_mainloop(
                    ring, of_rows, of_columns, column_smem.index(CONSUMER), step, steps, pending_release, CONSUMER
                )
            else:
                acc = begin_mainloop(ring, step, CONSUMER, BN, True, B_K_MAJOR, SCALES)
                acc, step = mma_mainloop(ring, acc, step, steps, pending_release, CONSUMER, BN, True, B_K_MAJOR, SCALES)
                slices = epilogue_slices(acc, BN)
            ds = dact_slices(
                slices, score, dh, a_scaled, end, first, col, limit, alpha, ring, step,
                CONSUMER, GATE_UP, ACTIVATION, ROLLED,
            )  # fmt: skip
            step += BN // EPILOGUE_N
            pending_release = True
            column_tile = (col // BN).to(gl.int64)
            stored = first + gl.arange(0, WARPGROUP_M, ds.type.layout)
            gl.store(partial + column_tile * capacity + stored, ds, mask=stored < end)
        else:
            step = skip_stages(ring, step, steps + BN // EPILOGUE_N, pending_release)
            pending_release = False
        expert, row, end, col = receive_tile(ring, tile_info, step)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["capacity"])
def gemm_dgrad_dact_kernel(
    do,
    do_scale,
    weight,
    weight_scale,
    h,
    dh,
    a_scaled,
    s,
    partial,
    token_of_row,
    pair_of_row,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    tile_counter,
    capacity,
    d,
    n,
    stride_do,
    stride_se,
    limit,
    alpha,
    SCALES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    ROLLED: gl.constexpr,
    B_K_MAJOR: gl.constexpr,
    BAND: gl.constexpr,
    EVEN_K: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """down_proj_dgrad: do (T, d) gathered, weight (E, d, n), s (pairs) in the caller's order, a_scaled (R_max, n).

    h and dh: (2, R_max, n) if gate and up are concatenated, else (R_max, w); GATE_UP is "none" without a gate.
    partial (column tiles, R_max) fp32: <da', a> over a tile's columns. ROLLED: the epilogue is a loop over slices.
    """
    ring = new_ring(weight, do.dtype.element_ty, STAGES)
    if SCALES == "none":
        column_smem: gl.constexpr = None
    else:
        column_smem = new_column_smem(BN)
    tile_info, scheduler_smem = new_tile_info(STAGES), new_scheduler_smem()
    pairs = gl.allocate_shared_memory(gl.int32, [STAGES, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    row_tiles = gl.load(num_tiles)  # read here: one more pointer would spill in a partition
    gl.warp_specialize(
        [
            (dact_consumer, (dh, a_scaled, s, partial, do_scale, weight_scale, stride_se, token_of_row, capacity, d, n,
                             limit, alpha, ring, column_smem, tile_info, pairs, 0, BN, B_K_MAJOR, GATE_UP, ACTIVATION,
                             ROLLED, SCALES)),
            (dact_consumer, (dh, a_scaled, s, partial, do_scale, weight_scale, stride_se, token_of_row, capacity, d, n,
                             limit, alpha, ring, column_smem, tile_info, pairs, 1, BN, B_K_MAJOR, GATE_UP, ACTIVATION,
                             ROLLED, SCALES)),
            (gather_producer, (do, None, stride_do, token_of_row, weight, tiles, row_tiles, tile_counter, d, n, ring,
                               tile_info, scheduler_smem, (h, pair_of_row, pairs), BN, B_K_MAJOR, BAND, EVEN_K,
                               GATE_UP)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
