"""Host side of the FP8 GEMMs for Hopper: outputs, TMA descriptors, compile-time constants and grid of each launch.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

Reads no value back from the device. Operands' data are e4m3, contiguous along the contraction, which is their last
dimension: rows (., p), weights (E, q, p). Scales are those of `quantize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.fp8 import BLOCK, ROWS, scales_of
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.hopper import configs
from tilemoe.kernels.experts.hopper.configs import BLOCK_K, EPILOGUE_N, WARPGROUP_M, TileConfig
from tilemoe.kernels.experts.hopper.descriptors import described, ragged_descriptor
from tilemoe.kernels.experts.hopper.host import (
    gather_constants,
    gradient_descriptor,
    h_descriptors,
    h_output,
    hopper_launch,
)
from tilemoe.kernels.experts.hopper_fp8.gemm import gemm_dgrad_dact_kernel, gemm_rows_kernel, up_proj_act_kernel
from tilemoe.kernels.experts.hopper_fp8.gemm_stationary import gemm_stationary_kernel
from tilemoe.kernels.experts.hopper_fp8.gemm_wgrad import gemm_transposed_kernel
from tilemoe.kernels.experts.triton.host import dact_outputs, split_parts
from tilemoe.kernels.experts.triton.tiles import TileList
from tilemoe.kernels.experts.triton.transpose import WgradOperands
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div, persistent_grid

TILE = TileConfig(configs.COOPERATIVE_M, 2 * BLOCK, 4, 224, 56)  # of every kernel but the following two
WGRAD = TileConfig(configs.COOPERATIVE_M, 2 * BLOCK, 4, 240, 32)
CHUNK = 40  # k-blocks that tensor cores sum for a weight gradient, 5120 rows; longer sums are chunks, added in fp32
STATIONARY = TileConfig(configs.STATIONARY_M, 2 * BLOCK, 8, 232, 40, 4)
_EPILOGUE_BLOCK = [WARPGROUP_M, EPILOGUE_N]


def rows_launch(
    rows: Operand,
    weight: Operand,
    bias: Tensor | None,
    plan: RoutingPlan,
    tiles: TileList,
    device: Device,
) -> tuple[Launch, Tensor]:
    """down_proj and up_proj_dgrad: (launch, out (R_max, q)), rows (R_max, p) times weight (E, q, p) transposed, plus
    bias (E, q).

    bias: q contiguous. tiles: of `rows_tile`'s block_m.
    """
    q, p = weight.data.shape[1:]
    dtype, tile = rows.dtype, rows_tile(p)
    out = rows.data.new_empty(plan.capacity, q, dtype=dtype)
    left = _pairs(rows.data, dtype)
    right = described(_pairs(weight.data, dtype).unsqueeze(1), [1, 1, tile.block_n, BLOCK_K])
    operands = (right, weight.scale, bias, ragged_descriptor(out, _EPILOGUE_BLOCK), *tiles)
    sizes = (p // 2, q, *weight.scale.stride(), 0 if bias is None else bias.stride(0))
    column_tiles = ceil_div(q, tile.block_n)
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    constants = {"SCALES": scales_of(weight)}
    if tile.b_stages:
        args = (described(left, [WARPGROUP_M, BLOCK_K]), rows.scale, *operands, plan.row_start_of_expert, *sizes)
        return hopper_launch(gemm_stationary_kernel, grid, args, {**constants, "B_STAGES": tile.b_stages}, tile), out
    args = (left, rows.scale, *operands, *sizes)
    return hopper_launch(gemm_rows_kernel, grid, args, constants, tile), out


def rows_tile(width_in: int) -> TileConfig:
    """The tile of down_proj and up_proj_dgrad for a contraction of length ``width_in``.

    Weight-stationary only where the k-blocks of two blocks divide the stages: each consumer then always waits at the
    same stages, whose phases it has followed. Loads land in any order, so another's stage might be a phase behind.
    """
    steps = width_in // BLOCK
    is_short = steps <= STATIONARY.b_stages and STATIONARY.num_stages % (2 * steps) == 0
    return STATIONARY if is_short else TILE


def up_proj_act_launch(
    x: Operand,
    w1: Operand,
    b1: Tensor | None,
    plan: RoutingPlan,
    tiles: TileList,
    spec: ActivationSpec,
    keep_h: bool,
    device: Device,
) -> tuple[Launch, Operand, Tensor]:
    """up_proj: (launch, a (R_max, n) quantised, h (R_max, w) in x's dtype, or (0, w) if not kept). b1's rows:
    contiguous."""
    d, n, dtype = x.data.shape[1], w1.data.shape[1] // spec.width_factor, x.dtype
    scale = x.data.new_empty(plan.capacity, n // BLOCK, dtype=torch.float32)
    a = Operand(x.data.new_empty(plan.capacity, n), scale, ROWS, dtype)
    h = x.data.new_empty(plan.capacity if keep_h else 0, spec.width_factor * n, dtype=dtype)
    weight = split_parts(_pairs(w1.data, dtype), spec)
    parts, width = weight.shape[1:3]
    columns = TILE.block_n // parts
    to_a, to_h = ragged_descriptor(_pairs(a.data, dtype), _EPILOGUE_BLOCK), h_output(h, parts, n) if keep_h else None
    right = described(weight, [1, parts, columns, BLOCK_K])
    column_tiles = ceil_div(width, columns)
    operands = (_pairs(x.data, dtype), x.scale, right, w1.scale, b1, to_a, a.scale, to_h, plan.token_of_row, *tiles)
    bias_stride = 0 if b1 is None else b1.stride(0)
    sizes = (d // 2, n, w1.scale.stride(0), bias_stride, spec.limit, spec.alpha)
    constants = {**gather_constants("up_proj_act", spec, column_tiles, d), "KEEP_H": keep_h}
    args = (*operands, *sizes)
    return _launch(up_proj_act_kernel, tiles.capacity * column_tiles, args, constants, device), a, h


def dgrad_dact_launch(
    do: Operand,
    w2: Operand,
    h: Tensor,
    s: Tensor,
    plan: RoutingPlan,
    tiles: TileList,
    spec: ActivationSpec,
    device: Device,
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """down_proj_dgrad: (launch, dh like h, a_scaled (R_max, n), partial (column tiles, R_max) fp32) as `hopper`'s; w2
    (E, n, d)."""
    n, d = w2.data.shape[1:]
    column_tiles = ceil_div(n, TILE.block_n)
    dh, a_scaled, partial = dact_outputs(h, s, plan, n, column_tiles)
    right = described(_pairs(w2.data, h.dtype).unsqueeze(1), [1, 1, TILE.block_n, BLOCK_K])
    from_h, to_dh = h_descriptors(h, dh, n, spec)
    outputs = (from_h, to_dh, ragged_descriptor(a_scaled, _EPILOGUE_BLOCK), s, partial)
    indices = (plan.token_of_row, plan.pair_of_row, *tiles)
    sizes = (plan.capacity, d // 2, n, w2.scale.stride(0), spec.limit, spec.alpha)
    constants = {
        **gather_constants("down_proj_dgrad_dact", spec, column_tiles, d),
        "ROLLED": spec.name in configs.ACTIVATIONS_IN_A_LOOP,
    }
    args = (_pairs(do.data, h.dtype), do.scale, right, w2.scale, *outputs, *indices, *sizes)
    launch = _launch(gemm_dgrad_dact_kernel, tiles.capacity * column_tiles, args, constants, device)
    return launch, dh, a_scaled, partial


def wgrad_launch(operands: WgradOperands, out: Tensor, plan: RoutingPlan, device: Device, adds: bool) -> Launch:
    """down_proj_wgrad and up_proj_wgrad: a slice of out (E, p, q), p or q contiguous; adds: out, fp32, is accumulated
    into."""
    width, q = operands.by_token.shape[0], operands.by_row.shape[0]
    left, right = (_pairs(data, torch.bfloat16) for data in (operands.by_token, operands.by_row))
    to, transposed = gradient_descriptor(out, adds)
    described_operands = (described(left, [WGRAD.block_m, BLOCK_K]), described(right, [WGRAD.block_n, BLOCK_K]))
    sizes = (plan.num_experts, operands.first, width, q)
    grid = persistent_grid(device, plan.num_experts * ceil_div(width, WGRAD.block_m) * ceil_div(q, WGRAD.block_n))
    partial = operands.scale.new_empty(*grid, WGRAD.block_m, WGRAD.block_n)
    args = (*described_operands, operands.scale, to, partial, plan.row_start_of_expert, *sizes)
    constants = {"TRANSPOSED": transposed, "ADDS": adds, "CHUNK": CHUNK}
    return hopper_launch(gemm_transposed_kernel, grid, args, constants, WGRAD)


def _launch(kernel: Any, tiles: int, args: tuple[Any, ...], constants: dict[str, Any], device: Device) -> Launch:
    return hopper_launch(kernel, persistent_grid(device, tiles), args, constants, TILE)


def _pairs(data: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 (..., p) viewed as (..., p / 2) of a 16-bit dtype, as which the pipeline moves it."""
    return data.view(dtype)
