"""Host side of the Hopper GEMMs: outputs, TMA descriptors, compile-time constants and grid of each launch.

Reads no value back from the device: grids are sized by the capacity of the tile lists.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.dense import is_column_major
from tilemoe.kernels.experts.hopper import configs
from tilemoe.kernels.experts.hopper.configs import (
    ADDED_N,
    BLOCK_K,
    EPILOGUE_N,
    TILES,
    WARPGROUP_M,
    TileConfig,
    tile_of,
)
from tilemoe.kernels.experts.hopper.descriptors import described, ragged_descriptor, weight_descriptor
from tilemoe.kernels.experts.hopper.gemm_dgrad_dact import gemm_dgrad_dact_kernel
from tilemoe.kernels.experts.hopper.gemm_gather_act import up_proj_act_kernel
from tilemoe.kernels.experts.hopper.gemm_pingpong import gemm_rows_kernel
from tilemoe.kernels.experts.hopper.gemm_stationary import gemm_stationary_kernel
from tilemoe.kernels.experts.hopper.gemm_wgrad import gemm_wgrad_kernel
from tilemoe.kernels.experts.triton.configs import Kernel, band_tiles
from tilemoe.kernels.experts.triton.host import (
    act_outputs,
    dact_outputs,
    gate_up_layout,
    ones_beside,
    split_parts,
)
from tilemoe.kernels.experts.triton.tiles import TileList
from tilemoe.kernels.launching import launch_of
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div, persistent_grid

_EPILOGUE_BLOCK = [WARPGROUP_M, EPILOGUE_N]


def rows_launch(
    kernel: Kernel,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: RoutingPlan,
    tiles: TileList,
    device: Device,
) -> tuple[Launch, Tensor]:
    """down_proj and up_proj_dgrad: (launch, out (R_max, q)), each expert's rows (R_max, p) times its weight (E, p, q),
    plus bias (E, q).

    weight: p or q contiguous. bias: q contiguous. tiles: of `tile_of`'s block_m.
    """
    p, q = weight.shape[1:]
    out = rows.new_empty(plan.capacity, q)
    tile = tile_of(kernel, p)
    right, k_major = weight_descriptor(weight.unsqueeze(1), tile.block_n)
    left, to = described(rows, [WARPGROUP_M, BLOCK_K]), ragged_descriptor(out, _EPILOGUE_BLOCK)
    operands, sizes = (left, right, bias, to, *tiles), (p, q, _row_stride(bias))
    column_tiles = ceil_div(q, tile.block_n)
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    if tile.b_stages:
        args = (*operands, plan.row_start_of_expert, *sizes)
        constants = {"B_K_MAJOR": k_major, "B_STAGES": tile.b_stages}
        return hopper_launch(gemm_stationary_kernel, grid, args, constants, tile), out
    constants = {"B_K_MAJOR": k_major, "BAND": band_tiles(kernel, column_tiles, p)}
    return hopper_launch(gemm_rows_kernel, grid, (*operands, *sizes), constants, tile), out


def up_proj_act_launch(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    plan: RoutingPlan,
    tiles: TileList,
    spec: ActivationSpec,
    keep_h: bool,
    device: Device,
) -> tuple[Launch, Tensor, Tensor]:
    """up_proj: (launch, a (R_max, n), h (R_max, w), or (0, w) if not kept). w1 (E, w, d), w or d contiguous; b1 (E,
    w)."""
    d, n = x.shape[1], w1.shape[1] // spec.width_factor
    a, h = act_outputs(x, plan, spec, n, keep_h)
    weight = split_parts(w1, spec).transpose(2, 3)
    parts, width = weight.shape[1], weight.shape[3]
    tile = TILES["up_proj_act"]
    columns = tile.block_n // parts
    column_tiles = ceil_div(width, columns)
    right, k_major = weight_descriptor(weight, columns)
    to_a, to_h = ragged_descriptor(a, _EPILOGUE_BLOCK), h_output(h, parts, n) if keep_h else None
    operands = (x, right, b1, to_a, to_h, plan.token_of_row, *tiles)
    args = (*operands, d, n, x.stride(0), _row_stride(b1), spec.limit, spec.alpha)
    constants = {
        **gather_constants("up_proj_act", spec, column_tiles, d),
        "KEEP_H": keep_h,
        **_weight_constants(k_major, d),
    }
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return hopper_launch(up_proj_act_kernel, grid, args, constants, tile), a, h


def dgrad_dact_launch(
    do: Tensor,
    w2: Tensor,
    h: Tensor,
    s: Tensor,
    plan: RoutingPlan,
    tiles: TileList,
    spec: ActivationSpec,
    device: Device,
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """down_proj_dgrad: (launch, dh like h, a_scaled (R_max, n), partial (column tiles, R_max) fp32).

    partial: each row's <da', a> over the columns of one tile, for `score_grad` to add up.
    """
    d, n = w2.shape[1:]
    tile = TILES["down_proj_dgrad_dact"]
    column_tiles = ceil_div(n, tile.block_n)
    dh, a_scaled, partial = dact_outputs(h, s, plan, n, column_tiles)
    right, k_major = weight_descriptor(w2.unsqueeze(1), tile.block_n)
    from_h, to_dh = h_descriptors(h, dh, n, spec)
    operands = (do, right, from_h, to_dh, ragged_descriptor(a_scaled, _EPILOGUE_BLOCK), s, partial)
    indices = (plan.token_of_row, plan.pair_of_row, *tiles)
    args = (*operands, *indices, plan.capacity, d, n, do.stride(0), spec.limit, spec.alpha)
    constants = {
        **gather_constants("down_proj_dgrad_dact", spec, column_tiles, d),
        "ROLLED": spec.name in configs.ACTIVATIONS_IN_A_LOOP,
        **_weight_constants(k_major, d),
    }
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return hopper_launch(gemm_dgrad_dact_kernel, grid, args, constants, tile), dh, a_scaled, partial


def wgrad_launch(
    kernel: Kernel,
    by_token: Tensor,
    by_row: Tensor,
    out: Tensor,
    plan: RoutingPlan,
    device: Device,
    adds: bool = False,
    sums: Tensor | None = None,
) -> Launch:
    """down_proj_wgrad and up_proj_wgrad: out (E, p, q) from by_token (T, p), gathered, and by_row (R_max, q); p or q
    of out is contiguous.

    adds: out, fp32, is accumulated into instead of overwritten. sums: (E, q) fp32, to get each expert's sum of by_row's
    rows.
    """
    p, q = by_token.shape[1], by_row.shape[1]
    ones, width = ones_beside(by_token, sums)
    tile = TILES[kernel]
    to, transposed = gradient_descriptor(out, adds)
    operands = (by_token, ragged_descriptor(by_row, [BLOCK_K, tile.block_n]), to)
    indices = (plan.token_of_row, plan.row_start_of_expert, plan.num_experts)
    args = (*operands, *indices, p, q, by_token.stride(0), ones, sums)
    grid = persistent_grid(device, plan.num_experts * ceil_div(width, tile.block_m) * ceil_div(q, tile.block_n))
    return hopper_launch(gemm_wgrad_kernel, grid, args, {"TRANSPOSED": transposed, "ADDS": adds}, tile)


# Shared with the FP8 kernels


def gradient_descriptor(out: Tensor, adds: bool) -> tuple[Any, bool]:
    """(descriptor of a gradient (E, p, q), p or q contiguous, to store or add a slice of a tile; is it transposed)."""
    block = [WARPGROUP_M, ADDED_N] if adds else _EPILOGUE_BLOCK
    if is_column_major(out):
        return described(out.transpose(1, 2), [1, *block[::-1]]), True
    return described(out, [1, *block]), False


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


def gather_constants(kernel: Kernel, spec: ActivationSpec, column_tiles: int, contraction: int) -> dict[str, Any]:
    """Constants of up_proj and down_proj_dgrad. GATE_UP: the layout of gate and up, "none" where the activation has no
    gate."""
    band = band_tiles(kernel, column_tiles, contraction)
    return {"ACTIVATION": spec.name, "GATE_UP": gate_up_layout(spec) or "none", "BAND": band}


def h_output(h: Tensor, parts: int, n: int) -> Any:
    """A ragged descriptor of h (R_max, w), seen as (R_max, 2, n) if gate and up are two parts."""
    if parts == 2:
        return ragged_descriptor(h.unflatten(1, (2, n)), [WARPGROUP_M, 1, EPILOGUE_N])
    return ragged_descriptor(h, _EPILOGUE_BLOCK)


def h_descriptors(h: Tensor, dh: Tensor, n: int, spec: ActivationSpec) -> tuple[Any, Any]:
    """(descriptor that down_proj_dgrad reads h by, ragged one that it writes dh by); concatenated gate and up: one box
    of both."""
    if gate_up_layout(spec) != "concatenated":
        return described(h, _EPILOGUE_BLOCK), ragged_descriptor(dh, _EPILOGUE_BLOCK)
    h, dh = (t.unflatten(1, (2, n)).transpose(0, 1) for t in (h, dh))
    block = [2, *_EPILOGUE_BLOCK]
    return described(h, block), ragged_descriptor(dh, block, rows_at=1)


def _weight_constants(k_major: bool, contraction: int) -> dict[str, bool]:
    return {"B_K_MAJOR": k_major, "EVEN_K": contraction % BLOCK_K == 0}


def _row_stride(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.stride(0)
