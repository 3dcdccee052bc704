"""up_proj, down_proj, down_proj_dgrad and up_proj_dgrad with FP8 operands: up_proj ``a = act(x w1^T + b1)``, down_proj
and up_proj_dgrad ``out_r = rows_r weight_e^T (+ bias_e)``, down_proj_dgrad as in `hopper.gemm_dgrad_dact`.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
parts = 2 where gate and up are two halves of a tile, else 1 · BM, BN tile · S stages

All four are cooperative: `hopper`'s producer warp group (A by cp.async, B by TMA), dynamic scheduler and tile order;
two consumer warp groups run a mainloop of `mainloop` and an epilogue. up_proj quantises a there.

Operands are e4m3, contiguous along the contraction, seen as half as many elements of the layer's 16-bit dtype: x and
do (T, d / 2), rows (R_max, in / 2), weight descriptors (E, parts, out, in / 2). Scales are fp32. up_proj,
down_proj_dgrad and up_proj_dgrad have one for each row of A and each output column of the weight: (., 1) and (E, out,
1). down_proj has block scales, (R_max, in / 128) and (E, out / 128, in / 128), the latter with the strides given.
Output descriptors are ragged.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilemoe.kernels.experts.hopper.gemm_dgrad_dact import dact_slices
from tilemoe.kernels.experts.hopper.gemm_gather_act import gather_producer, load_tile_columns
from tilemoe.kernels.experts.hopper.pipeline import (
    BK,
    BM,
    CONSUMERS,
    EPILOGUE_N,
    PAIR_LAYOUT,
    WARPGROUP_M,
    deinterleave,
    load_columns,
    new_barriers,
    new_column_smem,
    new_scheduler_smem,
    new_tile_info,
    receive_tile,
    skip_stages,
)
from tilemoe.kernels.experts.hopper_fp8.mainloop import (
    BLOCK,
    add_bias_to_slices,
    mma_mainloop,
    row_scale_pointers,
    scale_pointers,
    scale_slices,
    scaled_mainloop,
    store_quantized,
    store_slices,
    zero_tile,
)
from tilemoe.kernels.experts.triton.activations import gated_value, inner


@gluon.jit
def new_ring(weight, dtype: gl.constexpr, STAGES: gl.constexpr):
    """The pipeline's buffers and mbarriers."""
    a_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], gl.NVMMASharedLayout(128, 16, 2))
    b_smem = gl.allocate_shared_memory(dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    return a_smem, b_smem, new_barriers(STAGES, 2), new_barriers(STAGES, CONSUMERS)


@gluon.jit
def new_staging(dtype: gl.constexpr):
    """(2 * CONSUMERS, WARPGROUP_M, EPILOGUE_N): two staging buffers for each consumer's TMA stores."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(dtype, [2 * CONSUMERS, WARPGROUP_M, EPILOGUE_N], layout)


@gluon.jit
def rows_consumer(
    out, bias, stride_bias, row_scale, weight_scale, stride_se, stride_sout, stride_sin, width_in, width_out,
    ring, scale_smem, tile_info, staging, CONSUMER: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Consumer of down_proj and up_proj_dgrad. Epilogue: scale (SCALES "rows"), add the bias, store. scale_smem: see
    the kernel."""
    steps = width_in // BK
    step = 0
    expert, row, end, col = receive_tile(ring, tile_info, step)
    while expert >= 0:
        row += CONSUMER * WARPGROUP_M
        if row < end:
            if SCALES == "rows":
                columns = col + gl.arange(0, 2 * BLOCK, PAIR_LAYOUT)
                of_columns = load_columns(weight_scale, expert, stride_se, columns, width_out)
                of_rows = row_scale_pointers(row_scale, None, row, end)
                acc, of_rows, step = mma_mainloop(ring, of_rows, step, steps, False, CONSUMER)
                slices = scale_slices(acc, of_rows, of_columns, scale_smem.index(CONSUMER))
            else:
                scales = scale_pointers(weight_scale, expert, col, col + BLOCK, width_out, stride_se, stride_sout)
                slices, step = scaled_mainloop(ring, scale_smem, scales, stride_sin, step, steps, CONSUMER)
            if bias is not None:
                slices = add_bias_to_slices(slices, bias, expert, stride_bias, col, col + BLOCK, width_out)
            store_slices(slices, out, end, row, col, False, staging, CONSUMER)
        else:
            step = skip_stages(ring, step, steps, False)
        expert, row, end, col = receive_tile(ring, tile_info, step)
    tma.store_wait(0)


@gluon.jit
def gemm_rows_kernel(
    rows,
    rows_scale,
    weight,
    weight_scale,
    bias,
    out,
    expert_of_tile,
    row_of_tile,
    end_of_tile,
    num_tiles,
    width_in,
    width_out,
    stride_se,
    stride_sout,
    stride_sin,
    stride_bias,
    SCALES: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """down_proj and up_proj_dgrad: rows (R_max, width_in), weight (E, 1, width_out, width_in), bias (E, width_out).

    out (R_max, width_out). width_in counts elements of 16 bits: half the contraction's length.
    """
    ring = new_ring(weight, out.dtype, STAGES)
    staging = new_staging(out.dtype)
    if SCALES == "rows":
        scale_smem = new_column_smem(BN)
        row_scale: gl.constexpr = None
    else:  # the row scales of each stage, beside its A
        scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        row_scale = (rows_scale, scale_smem)
    tile_info, scheduler_smem = new_tile_info(STAGES), new_scheduler_smem()
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (rows_consumer, (out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin,
                             width_in, width_out, ring, scale_smem, tile_info, staging, 0, SCALES)),
            (rows_consumer, (out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin,
                             width_in, width_out, ring, scale_smem, tile_info, staging, 1, SCALES)),
            (gather_producer, (rows, row_scale, width_in, None, weight, tiles, num_tiles,
                               width_in, width_out, ring, tile_info, scheduler_smem, None, BN, True, 0, True,
                               "none")),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def pairs_value(pairs, limit, alpha, ACTIVATION: gl.constexpr):
    """a (WARPGROUP_M, EPILOGUE_N / 2) of a slice of interleaved gate and up."""
    gate, up = deinterleave(pairs, EPILOGUE_N)
    return gated_value(gate, up, limit, alpha, ACTIVATION, False)


@gluon.jit
def value(z, ACTIVATION: gl.constexpr):
    """act(z) of an ungated activation."""
    act, _slope = inner(z, ACTIVATION, False)
    return act


@gluon.jit
def store_act(
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
        left = value(first, ACTIVATION), value(second, ACTIVATION)
        right = value(third, ACTIVATION), value(fourth, ACTIVATION)
        store_quantized(left, a, a_scale, end, row, col, n, staged)
        store_quantized(right, a, a_scale, end, row, col + BLOCK, n, staging.index(2 * CONSUMER + 1))


@gluon.jit
def act_consumer(
    a, a_scale, h, bias, stride_bias, x_scale, weight_scale, stride_se, token_of_row, width_in, n, limit, alpha,
    ring, scale_smem, tile_info, staging,
    CONSUMER: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, KEEP_H: gl.constexpr,
):  # fmt: skip
    """Consumer of up_proj. Epilogue: scale, add the bias, store h (if KEEP_H), quantise and store act(h)."""
    steps = width_in // BK
    step = 0
    BN: gl.constexpr = 2 * BLOCK
    w = n if GATE_UP == "none" else 2 * n
    apart = n if GATE_UP == "concatenated" else BLOCK  # distance in h's columns from a tile's left half to its right
    expert, row, end, col = receive_tile(ring, tile_info, step)
    while expert >= 0:
        row += CONSUMER * WARPGROUP_M
        if row < end:
            of_columns = load_tile_columns(weight_scale, expert, stride_se, col, n, BN, True, GATE_UP)
            of_rows = row_scale_pointers(x_scale, token_of_row, row, end)
            acc, of_rows, step = mma_mainloop(ring, of_rows, step, steps, False, CONSUMER)
            slices = scale_slices(acc, of_rows, of_columns, scale_smem.index(CONSUMER))
            if bias is not None:
                slices = add_bias_to_slices(slices, bias, expert, stride_bias, col, col + apart, w)
            tma.store_wait(0)  # of the tile before, whose last store may read the buffer that is written first here
            if KEEP_H:
                store_slices(slices, h, end, row, col, GATE_UP == "concatenated", staging, CONSUMER)
            store_act(slices, a, a_scale, end, row, col, n, limit, alpha, staging, CONSUMER, GATE_UP, ACTIVATION)
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
    width_in,
    n,
    stride_se,
    stride_bias,
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    KEEP_H: gl.constexpr,
    BAND: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """up_proj: x (T, d) gathered, bias (E, w). Writes a (R_max, n) in FP8, its scales (R_max, n / 128), and h if
    KEEP_H.

    width_in is d in elements of 16 bits: d / 2. GATE_UP: as in `hopper.gemm_gather_act`.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    COLUMNS: gl.constexpr = BN // 2 if GATE_UP == "concatenated" else BN
    width_out = 2 * n if GATE_UP == "interleaved" else n
    ring = new_ring(weight, dtype, STAGES)
    scale_smem = new_column_smem(BN)
    staging = new_staging(dtype)
    tile_info, scheduler_smem = new_tile_info(STAGES), new_scheduler_smem()
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (act_consumer, (a, a_scale, h, bias, stride_bias, x_scale, weight_scale, stride_se, token_of_row,
                            width_in, n, limit, alpha, ring, scale_smem, tile_info, staging, 0, GATE_UP, ACTIVATION,
                            KEEP_H)),
            (act_consumer, (a, a_scale, h, bias, stride_bias, x_scale, weight_scale, stride_se, token_of_row,
                            width_in, n, limit, alpha, ring, scale_smem, tile_info, staging, 1, GATE_UP, ACTIVATION,
                            KEEP_H)),
            (gather_producer, (x, None, width_in, token_of_row, weight, tiles, num_tiles,
                               width_in, width_out, ring, tile_info, scheduler_smem, None, COLUMNS, True, BAND, True,
                               GATE_UP)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def dact_consumer(
    dh, a_scaled, s, partial, do_scale, weight_scale, stride_se, token_of_row, capacity, width_in, n, limit, alpha,
    ring, scale_smem, tile_info, pairs,
    CONSUMER: gl.constexpr, BN: gl.constexpr, GATE_UP: gl.constexpr, ACTIVATION: gl.constexpr, ROLLED: gl.constexpr,
):  # fmt: skip
    """Consumer of down_proj_dgrad: as `hopper.gemm_dgrad_dact.dact_consumer`, with scales."""
    steps = width_in // BK
    step, pending_release = 0, False
    layout: gl.constexpr = gl.SliceLayout(1, zero_tile().type.layout)
    expert, row, end, col = receive_tile(ring, tile_info, step)
    while expert >= 0:
        first = row + CONSUMER * WARPGROUP_M
        if first < end:
            pair = pairs.index(step % pairs.shape[0]).slice(CONSUMER * WARPGROUP_M, WARPGROUP_M).load(layout)
            score = gl.load(s + pair).to(gl.float32)
            of_columns = load_columns(weight_scale, expert, stride_se, col + gl.arange(0, BN, PAIR_LAYOUT), n)
            of_rows = row_scale_pointers(do_scale, token_of_row, first, end)
            acc, of_rows, step = mma_mainloop(ring, of_rows, step, steps, pending_release, CONSUMER)
            slices = scale_slices(acc, of_rows, of_columns, scale_smem.index(CONSUMER))
            ds = dact_slices(
                slices, score, dh, a_scaled, end, first, col, limit, alpha, ring, step,
                CONSUMER, GATE_UP, ACTIVATION, ROLLED,
            )  # fmt: skip
            step += BN // EPILOGUE_N
            pending_release = True
            stored = first + gl.arange(0, WARPGROUP_M, ds.type.layout)
            gl.store(partial + (col // BN).to(gl.int64) * capacity + stored, ds, mask=stored < end)
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
    capacity,
    width_in,
    n,
    stride_se,
    limit,
    alpha,
    ACTIVATION: gl.constexpr,
    GATE_UP: gl.constexpr,
    ROLLED: gl.constexpr,
    BAND: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """down_proj_dgrad: do (T, d) gathered, weight (E, 1, n, d), both FP8; the rest is as in `hopper.gemm_dgrad_dact`.

    width_in is d in elements of 16 bits: d / 2.
    """
    ring = new_ring(weight, do.dtype.element_ty, STAGES)
    scale_smem = new_column_smem(BN)
    tile_info, scheduler_smem = new_tile_info(STAGES), new_scheduler_smem()
    pairs = gl.allocate_shared_memory(gl.int32, [STAGES, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (dact_consumer, (dh, a_scaled, s, partial, do_scale, weight_scale, stride_se, token_of_row, capacity,
                             width_in, n, limit, alpha, ring, scale_smem, tile_info, pairs, 0, BN, GATE_UP,
                             ACTIVATION, ROLLED)),
            (dact_consumer, (dh, a_scaled, s, partial, do_scale, weight_scale, stride_se, token_of_row, capacity,
                             width_in, n, limit, alpha, ring, scale_smem, tile_info, pairs, 1, BN, GATE_UP,
                             ACTIVATION, ROLLED)),
            (gather_producer, (do, None, width_in, token_of_row, weight, tiles, num_tiles,
                               width_in, n, ring, tile_info, scheduler_smem, (h, pair_of_row, pairs), BN, True, BAND,
                               True, GATE_UP)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
