"""Host side of the Hopper GEMMs: outputs, TMA descriptors, compile-time constants and grid of each launch.

No value is read back from the device: grids are sized by the capacity of the tile lists. An operand is a 16-bit tensor
or an `Operand` in e4m3, contiguous along the contraction, with the scales of `quantize`.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.fp8 import BLOCK, ROWS, scales_of
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.hopper import configs
from tilemoe.kernels.experts.hopper.configs import BLOCK_K, EPILOGUE_N, WARPGROUP_M, TileConfig, tile_of
from tilemoe.kernels.experts.hopper.descriptors import (
    described,
    gradient_descriptor,
    h_descriptors,
    h_output,
    ragged_descriptor,
    weight_descriptor,
)
from tilemoe.kernels.experts.hopper.gemm_cooperative import gemm_cooperative_kernel
from tilemoe.kernels.experts.hopper.gemm_dgrad_dact import gemm_dgrad_dact_kernel
from tilemoe.kernels.experts.hopper.gemm_gather_act import up_proj_act_kernel
from tilemoe.kernels.experts.hopper.gemm_pingpong import gemm_rows_kernel
from tilemoe.kernels.experts.hopper.gemm_stationary import gemm_stationary_kernel
from tilemoe.kernels.experts.hopper.gemm_wgrad import gemm_transposed_kernel, gemm_wgrad_kernel
from tilemoe.kernels.experts.triton.configs import Kernel, band_tiles
from tilemoe.kernels.experts.triton.formats.transpose import WgradOperands
from tilemoe.kernels.experts.triton.host import WeightGrad, dact_outputs, gate_up_layout, split_parts
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div, launch_of, persistent_grid

_EPILOGUE_BLOCK = [WARPGROUP_M, EPILOGUE_N]


def rows_launch(
    kernel: Kernel,
    rows: Tensor | Operand,
    weight: Tensor | Operand,
    bias: Tensor | None,
    plan: RoutingPlan,
    device: Device,
) -> tuple[Launch, Tensor]:
    """down_proj and up_proj_dgrad: (launch, out (R_max, q)). out is each expert's rows (R_max, p) times its weight
    (E, p, q), plus bias (E, q).

    weight: contiguous along p or q, in FP8 along p. bias: contiguous along q.
    """
    tile = tile_for(kernel, weight)
    tiles = listed_tiles(plan, tile.block_m)
    left, right = _moved(rows), _moved(weight)
    p, q = right.shape[1:]
    out = left.new_empty(plan.capacity, q)
    from_weight, k_major = weight_descriptor(right.unsqueeze(1), tile.block_n)
    to = ragged_descriptor(out, _EPILOGUE_BLOCK)
    operands = (_scale(rows), from_weight, _scale(weight), bias, to, *tiles)
    sizes = (p, q, *_scale_strides(weight), _row_stride(bias))
    column_tiles = ceil_div(q, tile.block_n)
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    constants: dict[str, Any]
    if tile.b_stages:
        args = (described(left, [WARPGROUP_M, BLOCK_K]), *operands, plan.row_start_of_expert, *sizes)
        constants = {"SCALES": _scales(weight), "B_K_MAJOR": k_major, "B_STAGES": tile.b_stages}
        return hopper_launch(gemm_stationary_kernel, grid, args, constants, tile), out
    if isinstance(weight, Operand):
        constants = {"SCALES": _scales(weight)}
        args = (left, *operands, plan.tile_counter, *sizes)
        return hopper_launch(gemm_cooperative_kernel, grid, args, constants, tile), out
    args = (described(left, [WARPGROUP_M, BLOCK_K]), from_weight, bias, to, *tiles, p, q, _row_stride(bias))
    constants = {"B_K_MAJOR": k_major, "BAND": band_tiles(kernel, column_tiles, p)}
    return hopper_launch(gemm_rows_kernel, grid, args, constants, tile), out


def tile_for(kernel: Kernel, weight: Tensor | Operand) -> TileConfig:
    """The tile of a row GEMM. weight: for down_proj and up_proj_dgrad (E, p, q)."""
    if isinstance(weight, Tensor):
        return tile_of(kernel, weight.shape[1])
    return tile_of(kernel, weight.data.shape[1], "fp8")


def up_proj_act_launch(
    x: Tensor | Operand,
    w1: Tensor | Operand,
    b1: Tensor | None,
    plan: RoutingPlan,
    spec: ActivationSpec,
    keep_h: bool,
    device: Device,
) -> tuple[Launch, Tensor | Operand, Tensor]:
    """up_proj: (launch, a (R_max, n), h (R_max, w)); without ``keep_h`` h is (0, w). w1 (E, w, d) is contiguous along w
    or d; b1 (E, w). In FP8 w1 is contiguous along d, and a is quantised."""
    source = _moved(x)
    weight = split_parts(_moved(w1), spec).transpose(2, 3)
    parts, d, width = weight.shape[1:]
    n = parts * width // spec.width_factor
    a = _empty_a(x, plan.capacity, n)
    h = source.new_empty(plan.capacity if keep_h else 0, spec.width_factor * n)
    tile = tile_for("up_proj_act", w1)
    tiles = listed_tiles(plan, tile.block_m)
    columns = tile.block_n // parts
    column_tiles = ceil_div(width, columns)
    right, k_major = weight_descriptor(weight, columns)
    to_a, to_h = ragged_descriptor(_moved(a), _EPILOGUE_BLOCK), h_output(h, parts, n, WARPGROUP_M) if keep_h else None
    operands = (source, _scale(x), right, _scale(w1), b1, to_a, _scale(a), to_h)
    strides = (_gathered_stride(x), _scale_strides(w1)[0], _row_stride(b1))
    indices = (plan.token_of_row, *tiles, plan.tile_counter)
    args = (*operands, *indices, d, n, *strides, spec.limit, spec.alpha)
    constants = {**_gather_constants("up_proj_act", spec, column_tiles, w1, k_major, d), "KEEP_H": keep_h}
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return hopper_launch(up_proj_act_kernel, grid, args, constants, tile), a, h


def dgrad_dact_launch(
    do: Tensor | Operand,
    w2: Tensor | Operand,
    h: Tensor,
    s: Tensor,
    plan: RoutingPlan,
    spec: ActivationSpec,
    device: Device,
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """down_proj_dgrad: (launch, dh like h, a_scaled (R_max, n), partial (column tiles, R_max) fp32). w2 (E, d, n); in
    FP8 it is contiguous along d.

    partial: each row's <da', a> over the columns of one tile; `score_grad` adds these up.
    """
    source, weight = _moved(do), _moved(w2)
    d, n = weight.shape[1:]
    tile = tile_for("down_proj_dgrad_dact", w2)
    tiles = listed_tiles(plan, tile.block_m)
    column_tiles = ceil_div(n, tile.block_n)
    dh, a_scaled, partial = dact_outputs(h, s, plan, n, column_tiles)
    right, k_major = weight_descriptor(weight.unsqueeze(1), tile.block_n)
    from_h, to_dh = h_descriptors(h, dh, n, spec, WARPGROUP_M)
    operands = (source, _scale(do), right, _scale(w2), from_h, to_dh, ragged_descriptor(a_scaled, _EPILOGUE_BLOCK))
    indices = (plan.token_of_row, plan.pair_of_row, *tiles, plan.tile_counter)
    strides = (_gathered_stride(do), _scale_strides(w2)[0])
    args = (*operands, s, partial, *indices, plan.capacity, d, n, *strides, spec.limit, spec.alpha)
    constants = {
        **_gather_constants("down_proj_dgrad_dact", spec, column_tiles, w2, k_major, d),
        "ROLLED": spec.name in configs.ACTIVATIONS_IN_A_LOOP,
    }
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return hopper_launch(gemm_dgrad_dact_kernel, grid, args, constants, tile), dh, a_scaled, partial


def wgrad_launch(grad: WeightGrad, plan: RoutingPlan, device: Device) -> Launch:
    """The launch that computes ``grad``; its out is contiguous along p or q."""
    kernel, by_token, by_row, out, adds = grad
    p, q = by_token.shape[1], by_row.shape[1]
    tile = tile_of(kernel, p)
    to, transposed = gradient_descriptor(out, WARPGROUP_M, adds)
    operands = (by_token, ragged_descriptor(by_row, [BLOCK_K, tile.block_n]), to)
    indices = (plan.token_of_row, plan.row_start_of_expert, plan.num_experts)
    args = (*operands, *indices, p, q, by_token.stride(0))
    grid = persistent_grid(device, plan.num_experts * ceil_div(p, tile.block_m) * ceil_div(q, tile.block_n))
    return hopper_launch(gemm_wgrad_kernel, grid, args, {"TRANSPOSED": transposed, "ADDS": adds}, tile)


def fp8_wgrad_launch(operands: WgradOperands, out: Tensor, plan: RoutingPlan, device: Device, adds: bool) -> Launch:
    """down_proj_wgrad and up_proj_wgrad with FP8 operands: the launch for a slice of out (E, p, q), contiguous along p
    or q. adds: the gradient is added to out, which is fp32."""
    tile, width, q = configs.FP8_WGRAD, operands.by_token.shape[0], operands.by_row.shape[0]
    left, right = (data.view(torch.bfloat16) for data in (operands.by_token, operands.by_row))
    to, transposed = gradient_descriptor(out, WARPGROUP_M, adds)
    described_operands = (described(left, [tile.block_m, BLOCK_K]), described(right, [tile.block_n, BLOCK_K]))
    sizes = (plan.num_experts, operands.first, width, q)
    grid = persistent_grid(device, plan.num_experts * ceil_div(width, tile.block_m) * ceil_div(q, tile.block_n))
    partial = operands.scale.new_empty(*grid, tile.block_m, tile.block_n)
    args = (*described_operands, operands.scale, to, partial, plan.row_start_of_expert, *sizes)
    constants = {"TRANSPOSED": transposed, "ADDS": adds, "CHUNK": configs.CHUNK}
    return hopper_launch(gemm_transposed_kernel, grid, args, constants, tile)


# Operands, 16-bit or FP8


def _empty_a(x: Tensor | Operand, rows: int, n: int) -> Tensor | Operand:
    if isinstance(x, Tensor):
        return x.new_empty(rows, n)
    scale = x.data.new_empty(rows, n // BLOCK, dtype=torch.float32)
    return Operand(x.data.new_empty(rows, n), scale, ROWS, x.dtype)


def _moved(operand: Tensor | Operand) -> Tensor:
    """The operand as 16-bit elements, which the pipeline moves: FP8 values as pairs along the contiguous dimension."""
    if isinstance(operand, Tensor):
        return operand
    data, dtype = operand.data, operand.dtype
    return data.view(dtype) if data.stride(-1) == 1 else data.transpose(1, 2).view(dtype).transpose(1, 2)


def _scale(operand: Tensor | Operand) -> Tensor | None:
    return None if isinstance(operand, Tensor) else operand.scale


def _scales(weight: Tensor | Operand) -> str:
    return "none" if isinstance(weight, Tensor) else scales_of(weight)


def _scale_strides(weight: Tensor | Operand) -> tuple[int | None, ...]:
    """Strides of a weight's scales from expert to expert, along its columns, and along the contraction."""
    if isinstance(weight, Tensor):
        return None, None, None
    of_expert, of_contraction, of_column = weight.scale.stride()
    return of_expert, of_column, of_contraction


def _gathered_stride(rows: Tensor | Operand) -> int | None:
    """The row stride of 16-bit rows. None for quantised rows, which are contiguous."""
    return rows.stride(0) if isinstance(rows, Tensor) else None


# Launches


def hopper_launch(
    kernel: Any, grid: tuple[int], args: tuple[Any, ...], constants: dict[str, Any], tile: TileConfig
) -> Launch:
    constants = {
        **constants,
        "BN": tile.block_n,
        "STAGES": tile.num_stages,
        "CONSUMER_REGISTERS": tile.consumer_registers,
        "PRODUCER_REGISTERS": tile.producer_registers,
    }
    return launch_of(kernel, grid, args, constants, configs.CONSUMER_WARPS, max_registers=configs.MAX_REGISTERS)


def _gather_constants(
    kernel: Kernel, spec: ActivationSpec, column_tiles: int, weight: Tensor | Operand, k_major: bool, width_in: int
) -> dict[str, Any]:
    """Compile-time constants of up_proj and down_proj_dgrad. GATE_UP: the layout of gate and up, or "none" without a
    gate. width_in: the contraction's length in 16-bit elements."""
    contraction = width_in if isinstance(weight, Tensor) else 2 * width_in
    return {
        "SCALES": _scales(weight),
        "ACTIVATION": spec.name,
        "GATE_UP": gate_up_layout(spec) or "none",
        "BAND": band_tiles(kernel, column_tiles, contraction),
        "B_K_MAJOR": k_major,
        "EVEN_K": width_in % BLOCK_K == 0,
    }


def _row_stride(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.stride(0)
