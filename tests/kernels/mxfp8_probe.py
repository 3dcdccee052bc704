"""A probe, not a kernel of the package: up_proj with MXFP8 operands on Blackwell, to be compiled; it has never run.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · BM, BN tile

Operands and result are e4m3 with a scale, a byte of e8m0, for each 32 along the contraction. Scales of 128 rows and 128
columns, (128, 4), are 512 bytes side by side, those of row r and block c at ``r % 32 * 16 + r // 32 * 4 + c``: as
tcgen05.cp wants them, which copies them to four columns of tensor memory. They are stored by tile of the tile list, not
by row: an expert's first row need not be a multiple of 128. Roles and barriers are those of `blackwell.pipeline`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton_compile import Operands

from tilemoe.kernels.experts.blackwell.configs import BLOCK_M, EPILOGUE_WARPS, MAX_REGISTERS
from tilemoe.kernels.experts.blackwell.gluon_compat import tma_gather, tmem_load
from tilemoe.kernels.experts.blackwell.pipeline import BM, GATHER_LAYOUT
from tilemoe.kernels.experts.hopper.descriptors import described, ragged_descriptor
from tilemoe.kernels.experts.hopper.gemm_gather_act import load_weight
from tilemoe.kernels.experts.hopper.gluon_compat import tma_load
from tilemoe.kernels.experts.hopper.pipeline import (
    RAGGED_EXTENT,
    b_operand,
    load_tokens,
    new_barriers,
    producer_acquire,
    store_slice,
    tile_coords,
)
from tilemoe.kernels.experts.triton.activations import gated_value
from tilemoe.runtime.launch import Launch, ceil_div, launch_of

KB = gl.constexpr(128)  # k-block: 128 bytes, four scales of a row
BLOCK = gl.constexpr(32)  # values with one scale
SCALE_TILE = gl.constexpr(512)  # bytes, of 128 rows and a k-block
OUT_N = gl.constexpr(64)  # columns of a in a slice of the epilogue
LARGEST = gl.constexpr(448.0)  # of e4m3


@gluon.jit
def scales_operand(smem, stage, ROWS: gl.constexpr):
    """A stage's scales (ROWS / 128, 1, 2, 256) as (ROWS, 4) in the order of rows and blocks."""
    tiles = smem.index(stage).reshape([ROWS // 128, 32, 4, 4])
    return tiles.permute([0, 2, 1, 3]).reshape([ROWS, 4])


@gluon.jit
def producer(x, x_scales, weight, weight_scales, token_of_row, tiles, row_tiles, column_tiles, d, ring, scales,
             COLUMNS: gl.constexpr):  # fmt: skip
    a_smem, _b_smem, full, _empty = ring
    a_scales, b_scales = scales
    BYTES: gl.constexpr = BM * KB + SCALE_TILE + weight.block_type.nbytes + weight_scales.block_type.nbytes
    step = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, COLUMNS, 0)
        token = load_tokens(token_of_row, row, end, gl.arange(0, BM, GATHER_LAYOUT))
        for k in range(0, d, KB):
            stage = producer_acquire(ring, step)
            mbarrier.expect(full.index(stage), BYTES)
            load_weight(weight, expert, k, col, ring, stage, True)
            tma_gather(x, token, k, full.index(stage), a_smem.index(stage))
            tma_load(x_scales, [index // column_tiles, k // KB, 0, 0], full.index(stage), a_scales.index(stage))
            place = [expert, index % column_tiles * (COLUMNS // 64), k // KB, 0, 0]
            tma_load(weight_scales, place, full.index(stage), b_scales.index(stage))
            step += 1


@gluon.jit
def multiply(row_tiles, column_tiles, d, ring, scales, scales_tmem, accumulators, BN: gl.constexpr):
    """MMA warp. tcgen05.cp and the products after it are done in the order in which the warp issues them."""
    a_smem, b_smem, full, empty = ring
    acc, acc_full, acc_empty = accumulators
    COUNT: gl.constexpr = acc.shape[0]
    step, tile = 0, 0
    for _ in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        mbarrier.wait(acc_empty.index(tile % COUNT), ((tile // COUNT) & 1) ^ 1)
        use_acc = False
        for _k in range(0, d, KB):
            stage = step % full.shape[0]
            mbarrier.wait(full.index(stage), (step // full.shape[0]) & 1)
            tcgen05_copy(scales_operand(scales[0], stage, BM), scales_tmem[0])
            tcgen05_copy(scales_operand(scales[1], stage, BN), scales_tmem[1])
            tcgen05_mma_scaled(
                a_smem.index(stage), b_operand(b_smem, stage, BN, True, "rows"), acc.index(tile % COUNT),
                scales_tmem[0], scales_tmem[1], "e4m3", "e4m3", use_acc=use_acc, mbarriers=[empty.index(stage)],
            )  # fmt: skip
            use_acc = True
            step += 1
        tcgen05_commit(acc_full.index(tile % COUNT))
        tile += 1  # noqa: SIM113


@gluon.jit
def quantized(value):
    """(e4m3 (BM, OUT_N), e8m0 (BM, OUT_N / 32)): a scale is the least power of two that is no less than the block's
    largest magnitude / 448; 255, a NaN, of a block with a NaN or an infinity."""
    blocks = value.reshape([BM, OUT_N // BLOCK, BLOCK])
    bits = (gl.max(gl.abs(blocks), 2) * (1 / LARGEST)).to(gl.int32, bitcast=True)
    exponent = gl.minimum(gl.maximum((bits + 0x7FFFFF) >> 23, 1), 254)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    data = (blocks * gl.expand_dims(inverse, 2)).reshape([BM, OUT_N]).to(gl.float8e4nv)
    return data, gl.where(bits >= 0x7F800000, 255, exponent).to(gl.uint8)


@gluon.jit
def epilogue(a, a_scales, n, tiles, row_tiles, column_tiles, accumulators, staging, COLUMNS: gl.constexpr):
    acc, acc_full, acc_empty = accumulators
    COUNT: gl.constexpr = acc.shape[0]
    tile = 0
    for index in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        _expert, row, end, col = tile_coords(index, row_tiles, column_tiles, tiles, COLUMNS, 0)
        mbarrier.wait(acc_full.index(tile % COUNT), (tile // COUNT) & 1)
        of_tile = acc.index(tile % COUNT)
        for i in gl.static_range(COLUMNS // OUT_N):
            gate = tmem_load(of_tile.slice(i * OUT_N, OUT_N))
            up = tmem_load(of_tile.slice(COLUMNS + i * OUT_N, OUT_N))
            if i == COLUMNS // OUT_N - 1:
                mbarrier.arrive(acc_empty.index(tile % COUNT), count=1)
            data, scale = quantized(gated_value(gate, up, 0.0, 0.0, "swiglu", False))
            column = col + i * OUT_N
            tma.store_wait(1)
            place = [RAGGED_EXTENT, end, RAGGED_EXTENT - end + row, column]
            store_slice(a, place, data, staging.index(i % 2))
            rows = gl.arange(0, BM, gl.SliceLayout(1, scale.type.layout))[:, None]
            block = column // BLOCK % 4 + gl.arange(0, OUT_N // BLOCK, gl.SliceLayout(0, scale.type.layout))[None, :]
            of_k_block = a_scales + (index // column_tiles * (n // KB) + column // KB) * SCALE_TILE
            gl.store(of_k_block + rows % 32 * 16 + rows // 32 * 4 + block, scale)
        tile += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def mxfp8_up_proj_kernel(
    x, x_scales, weight, weight_scales, a, a_scales, token_of_row, expert_of_tile, row_of_tile, end_of_tile, num_tiles,
    d, n, BN: gl.constexpr, STAGES: gl.constexpr, ACCUMULATORS: gl.constexpr,
):  # fmt: skip
    """``a = swiglu(x w1^T)``; x (T, d) gathered, a (R_max, n); for scales see the module's head."""
    COLUMNS: gl.constexpr = BN // 2
    column_tiles, row_tiles = n // COLUMNS, gl.load(num_tiles)
    a_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, KB], gl.NVMMASharedLayout(128, 8, 2))
    b_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    ring = a_smem, b_smem, new_barriers(STAGES, 1), new_barriers(STAGES, 1)
    scales = (
        gl.allocate_shared_memory(gl.uint8, [STAGES] + x_scales.block_shape, x_scales.layout),  # noqa: RUF005
        gl.allocate_shared_memory(gl.uint8, [STAGES] + weight_scales.block_shape, weight_scales.layout),  # noqa: RUF005
    )
    scales_tmem = (
        allocate_tensor_memory(gl.uint8, [BM, KB // BLOCK], TensorMemoryScalesLayout()),
        allocate_tensor_memory(gl.uint8, [BN, KB // BLOCK], TensorMemoryScalesLayout()),
    )
    layout: gl.constexpr = TensorMemoryLayout([BM, BN], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [ACCUMULATORS, BM, BN], layout)
    accumulators = acc, new_barriers(ACCUMULATORS, 1), new_barriers(ACCUMULATORS, 1)
    staging = gl.allocate_shared_memory(a.dtype, [2, BM, OUT_N], gl.NVMMASharedLayout(64, 8, 2))
    tiles = (expert_of_tile, row_of_tile, end_of_tile)
    gl.warp_specialize(
        [
            (epilogue, (a, a_scales, n, tiles, row_tiles, column_tiles, accumulators, staging, COLUMNS)),
            (producer, (x, x_scales, weight, weight_scales, token_of_row, tiles, row_tiles, column_tiles, d, ring,
                        scales, COLUMNS)),
            (multiply, (row_tiles, column_tiles, d, ring, scales, scales_tmem, accumulators, BN)),
        ],
        [4, 1],
        [72, 72],
    )  # fmt: skip


def mxfp8_up_proj_launch(of: Operands, block_n: int, accumulators: int) -> Launch:
    experts, w, d = of.w1.shape
    n, column_tiles, k_blocks = w // 2, w // block_n, ceil_div(d, 128)
    x, w1, a = (t.to(torch.float8_e4m3fn) for t in (of.x, of.w1, of.a))
    x_scales, a_scales = (torch.zeros(of.tiles.capacity, k, 2, 256, dtype=torch.uint8) for k in (k_blocks, n // 128))
    w1_scales = x_scales.new_zeros(experts, column_tiles * block_n // 128, k_blocks, 2, 256)
    args = (
        described(x, [1, 128]),
        unswizzled(x_scales, [1, 1, 2, 256]),
        described(w1.unflatten(1, (2, n)), [1, 2, block_n // 2, 128]),
        unswizzled(w1_scales, [1, block_n // 128, 1, 2, 256]),
        replace(
            ragged_descriptor(a, [BLOCK_M, 128]), block_shape=[1, 1, BLOCK_M, 64], layout=gl.NVMMASharedLayout(64, 8, 4)
        ),
        a_scales,
        *(of.plan.token_of_row, *of.tiles, d, n),
    )
    constants = {"BN": block_n, "STAGES": 4, "ACCUMULATORS": accumulators}
    return launch_of(mxfp8_up_proj_kernel, (148,), args, constants, EPILOGUE_WARPS, max_registers=MAX_REGISTERS)


def unswizzled(scales: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(0, 8, len(block))
    return TensorDescriptor(scales, list(scales.shape), list(scales.stride()), block, layout)
