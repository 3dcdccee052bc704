"""down_proj and up_proj_dgrad with FP8 operands, cooperative: ``out_r = rows_r weight_e^T (+ bias_e)``.

E experts · R_max static row capacity · BM, BN tile · S stages

It uses up_proj's producer, dynamic scheduler and tile order (`gemm_gather_act`), and a mainloop of `pipeline` or
`scales`.

Operands are e4m3, contiguous along the contraction, and viewed as half as many elements of the layer's 16-bit dtype:
rows (R_max, in / 2), weight descriptor (E, 1, out, in / 2). Scales are fp32. SCALES "rows" (up_proj_dgrad): one for
each row of A and each output column of the weight, (R_max, 1) and (E, out, 1). SCALES "blocks" (down_proj): (R_max,
in / 128) and (E, out / 128, in / 128), the latter with given strides. The output descriptor is ragged.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from tilemoe.kernels.experts.hopper.gemm_gather_act import gather_producer
from tilemoe.kernels.experts.hopper.pipeline import (
    BK,
    BM,
    PAIR_LAYOUT,
    WARPGROUP_M,
    load_columns,
    new_column_smem,
    new_ring,
    new_scheduler_smem,
    new_staging,
    new_tile_info,
    receive_tile,
    skip_stages,
    store_slices,
)
from tilemoe.kernels.experts.hopper.scales import (
    BLOCK,
    add_bias_to_slices,
    new_row_smem,
    row_scale_pointers,
    row_scaled_mainloop,
    scale_pointers,
    scaled_mainloop,
)


@gluon.jit
def rows_consumer(
    out, bias, stride_bias, row_scale, weight_scale, stride_se, stride_sout, stride_sin, width_in, width_out,
    ring, scale_smem, tile_info, staging, CONSUMER: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Consumer of down_proj and up_proj_dgrad. The epilogue scales (SCALES "rows"), adds the bias and stores.
    scale_smem: see the kernel."""
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
                buffer = scale_smem.index(CONSUMER)
                slices, step = row_scaled_mainloop(ring, of_rows, of_columns, buffer, step, steps, False, CONSUMER)
            else:
                scales = scale_pointers(weight_scale, expert, col, col + BLOCK, width_out, stride_se, stride_sout)
                slices, step = scaled_mainloop(
                    ring, None, scale_smem, scales, stride_sin, step, steps, None, None, CONSUMER
                )
            if bias is not None:
                slices = add_bias_to_slices(slices, bias, expert, stride_bias, col, col + BLOCK, width_out)
            store_slices(slices, out, None, end, row, col, staging, CONSUMER, "none", True)
        else:
            step = skip_stages(ring, step, steps, False)
        expert, row, end, col = receive_tile(ring, tile_info, step)
    tma.store_wait(0)


@gluon.jit
def gemm_cooperative_kernel(
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
    tile_counter,
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

    out (R_max, width_out). width_in counts 16-bit elements: it is half the contraction's length.
    """
    ring = new_ring(weight, out.dtype, STAGES)
    staging = new_staging(out.dtype)
    if SCALES == "rows":
        scale_smem = new_column_smem(BN)
        row_scale: gl.constexpr = None
    else:  # each stage has its rows' scales beside A
        scale_smem = new_row_smem(STAGES, BM)
        row_scale = (rows_scale, scale_smem)
    tile_info, scheduler_smem = new_tile_info(STAGES), new_scheduler_smem()
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    row_tiles = gl.load(num_tiles)  # read here: one more pointer would spill in a partition
    gl.warp_specialize(
        [
            (rows_consumer, (out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin,
                             width_in, width_out, ring, scale_smem, tile_info, staging, 0, SCALES)),
            (rows_consumer, (out, bias, stride_bias, rows_scale, weight_scale, stride_se, stride_sout, stride_sin,
                             width_in, width_out, ring, scale_smem, tile_info, staging, 1, SCALES)),
            (gather_producer, (rows, row_scale, None, None, weight, tiles, row_tiles, tile_counter,
                               width_in, width_out, ring, tile_info, scheduler_smem, None, BN, True, 0, True,
                               "none")),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
