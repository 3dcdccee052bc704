"""Host side of the Blackwell GEMMs: the launches of `tilemoe.kernels.experts.hopper.host` for 16-bit operands.

No value is read back from the device: grids are sized by the capacity of the tile lists.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.blackwell.configs import (
    BLOCK_K,
    BLOCK_M,
    EPILOGUE_N,
    EPILOGUE_WARPS,
    MAX_REGISTERS,
    TILES,
    TileConfig,
)
from tilemoe.kernels.experts.blackwell.gemm_dgrad_dact import gemm_dgrad_dact_kernel
from tilemoe.kernels.experts.blackwell.gemm_gather_act import up_proj_act_kernel
from tilemoe.kernels.experts.blackwell.gemm_rows import gemm_rows_kernel
from tilemoe.kernels.experts.blackwell.gemm_wgrad import gemm_wgrad_kernel
from tilemoe.kernels.experts.hopper.descriptors import (
    described,
    gradient_descriptor,
    h_descriptors,
    h_output,
    ragged_descriptor,
    weight_descriptor,
)
from tilemoe.kernels.experts.triton.configs import Kernel, band_tiles
from tilemoe.kernels.experts.triton.descriptors import can_describe
from tilemoe.kernels.experts.triton.host import WeightGrad, act_outputs, dact_outputs, gate_up_layout, split_parts
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div, launch_of, persistent_grid

_EPILOGUE_BLOCK = [BLOCK_M, EPILOGUE_N]


def tile_of(kernel: Kernel, width_in: int, form: str = "dense") -> TileConfig:
    """The tile of a row GEMM with 16-bit operands, the only form ("dense"). It does not depend on ``width_in``."""
    assert form == "dense", form
    return TILES[kernel]


def up_proj_act_launch(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool, device: Device
) -> tuple[Launch, Tensor, Tensor]:
    """As `hopper.host.up_proj_act_launch`; b1 (E, w) is contiguous along w."""
    tile, tiles = TILES["up_proj_act"], listed_tiles(plan, BLOCK_M)
    weight = split_parts(w1, spec).transpose(2, 3)
    parts, d, width = weight.shape[1:]
    n = parts * width // spec.width_factor
    a, h = act_outputs(x, plan, spec, n, keep_h)
    right, k_major = weight_descriptor(weight, tile.block_n // parts)
    source, access = gathered(x, device)
    operands = (
        source,
        right,
        b1,
        ragged_descriptor(a, _EPILOGUE_BLOCK),
        h_output(h, parts, n, BLOCK_M) if keep_h else None,
    )
    strides = (x.stride(0), 0 if b1 is None else b1.stride(0))
    args = (*operands, plan.token_of_row, *tiles, d, n, *strides, spec.limit, spec.alpha)
    column_tiles = ceil_div(width, tile.block_n // parts)
    constants = _activation_constants("up_proj_act", spec, k_major, column_tiles, d, access) | {"KEEP_H": keep_h}
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return blackwell_launch(up_proj_act_kernel, grid, args, constants, tile), a, h


def rows_launch(
    kernel: Kernel, rows: Tensor, weight: Tensor, bias: Tensor | None, plan: RoutingPlan, device: Device
) -> tuple[Launch, Tensor]:
    """As `hopper.host.rows_launch`."""
    tile, (p, q), tiles = TILES[kernel], weight.shape[1:], listed_tiles(plan, BLOCK_M)
    out = rows.new_empty(plan.capacity, q)
    right, k_major = weight_descriptor(weight.unsqueeze(1), tile.block_n)
    operands = (described(rows, [BLOCK_M, BLOCK_K]), right, bias, ragged_descriptor(out, _EPILOGUE_BLOCK))
    args = (*operands, *tiles, p, q, 0 if bias is None else bias.stride(0))
    column_tiles = ceil_div(q, tile.block_n)
    constants = {"B_K_MAJOR": k_major, "BAND": band_tiles(kernel, column_tiles, p)}
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return blackwell_launch(gemm_rows_kernel, grid, args, constants, tile), out


def dgrad_dact_launch(
    do: Tensor, w2: Tensor, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec, device: Device
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """As `hopper.host.dgrad_dact_launch`; w2 (E, d, n) is contiguous along d or n."""
    tile, (d, n), tiles = TILES["down_proj_dgrad_dact"], w2.shape[1:], listed_tiles(plan, BLOCK_M)
    column_tiles = ceil_div(n, tile.block_n)
    dh, a_scaled, partial = dact_outputs(h, s, plan, n, column_tiles)
    right, k_major = weight_descriptor(w2.unsqueeze(1), tile.block_n)
    from_h, to_dh = h_descriptors(h, dh, n, spec, BLOCK_M)
    source, access = gathered(do, device)
    operands = (source, right, from_h, to_dh, ragged_descriptor(a_scaled, _EPILOGUE_BLOCK), s, partial)
    sizes = (plan.capacity, d, n, do.stride(0), spec.limit, spec.alpha)
    args = (*operands, plan.token_of_row, plan.pair_of_row, *tiles, *sizes)
    constants = _activation_constants("down_proj_dgrad_dact", spec, k_major, column_tiles, d, access)
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return blackwell_launch(gemm_dgrad_dact_kernel, grid, args, constants, tile), dh, a_scaled, partial


def _activation_constants(
    kernel: Kernel, spec: ActivationSpec, k_major: bool, column_tiles: int, contraction: int, access: str
) -> dict[str, Any]:
    """Compile-time constants of up_proj and down_proj_dgrad. GATE_UP: "none" if the activation has no gate."""
    return {
        "ACTIVATION": spec.name,
        "GATE_UP": gate_up_layout(spec) or "none",
        "B_K_MAJOR": k_major,
        "BAND": band_tiles(kernel, column_tiles, contraction),
        "ACCESS": access,
    }


def wgrad_launch(grad: WeightGrad, plan: RoutingPlan, device: Device) -> Launch:
    """As `hopper.host.wgrad_launch`."""
    kernel, by_token, by_row, out, adds = grad
    tile, p, q = TILES[kernel], by_token.shape[1], by_row.shape[1]
    source, access = gathered(by_token, device)
    to, transposed = gradient_descriptor(out, BLOCK_M, adds)
    operands = (source, ragged_descriptor(by_row, [BLOCK_K, tile.block_n]), to)
    args = (*operands, plan.token_of_row, plan.row_start_of_expert, plan.num_experts, p, q, by_token.stride(0))
    grid = persistent_grid(device, plan.num_experts * ceil_div(p, BLOCK_M) * ceil_div(q, tile.block_n))
    constants = {"TRANSPOSED": transposed, "ADDS": adds, "ACCESS": access}
    return blackwell_launch(gemm_wgrad_kernel, grid, args, constants, tile)


def gathered(source: Tensor, device: Device) -> tuple[Any, str]:
    """(the kernel argument for ``source`` (T, p), its rows gathered by token; ACCESS of `pipeline.row_producer`)."""
    if can_describe(source, device):
        return described(source, [1, BLOCK_K]), "gather"
    return source, "copy"  # rows that overlap, such as those of an expanded vector


def blackwell_launch(
    kernel: Any, grid: tuple[int], args: tuple[Any, ...], constants: dict[str, Any], tile: TileConfig
) -> Launch:
    constants = {**constants, "BN": tile.block_n, "STAGES": tile.num_stages, "REGISTERS": tile.registers}
    return launch_of(kernel, grid, args, constants, EPILOGUE_WARPS, max_registers=MAX_REGISTERS)
