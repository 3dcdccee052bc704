"""Host side of the portable GEMMs: tile, outputs, descriptors, compile-time constants and grid of each launch.

No value is read back from the device: grids are sized by the capacity of the tile lists. If the plan lacks a tile list,
the kernel that fills it is launched at once.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.dense import is_column_major
from tilemoe.kernels.experts.triton.configs import MIN_BLOCK, Kernel, TileConfig, band_tiles, choose_tile
from tilemoe.kernels.experts.triton.descriptors import (
    can_describe,
    can_describe_rows,
    gathered_argument,
    ragged_argument,
    rows_argument,
    weight_argument,
)
from tilemoe.kernels.experts.triton.gemm_dgrad_dact import gemm_dgrad_dact_kernel, score_grad_kernel
from tilemoe.kernels.experts.triton.gemm_rows import gemm_rows_kernel, up_proj_act_kernel
from tilemoe.kernels.experts.triton.gemm_wgrad import gemm_wgrad_kernel
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch, ceil_div, dot_precision, launch_of, persistent_grid


def rows_launch(
    kernel: Kernel, rows: Tensor, weight: Tensor, bias: Tensor | None, plan: RoutingPlan, device: Device
) -> tuple[Launch, Tensor]:
    """down_proj and up_proj_dgrad: (launch, out (R_max, q)). out is rows (R_max, p) times weight (E, p, q), of any
    strides, plus bias (E, q)."""
    p, q = weight.shape[1:]
    out = rows.new_empty(plan.capacity, q)
    tile = choose_tile(kernel, p, q, rows.element_size(), device)
    tiles = listed_tiles(plan, tile.block_m)
    use_tma = can_describe_rows(device, rows, out)
    left = rows_argument(rows, [tile.block_m, tile.block_k], use_tma)
    right, access, (stride_we, _, stride_win, stride_wout) = weight_argument(
        weight.unsqueeze(1), device, tile.block_k, tile.block_n
    )
    to = ragged_argument(out, [tile.block_m, tile.block_n // tile.slices], use_tma)
    bias_strides = (0, 0) if bias is None else bias.stride()
    args = (left, right, bias, to, *tiles, p, q, stride_we, stride_win, stride_wout, *bias_strides)
    column_tiles = ceil_div(q, tile.block_n)
    constants = {
        "HAS_BIAS": bias is not None,
        "BAND": band_tiles(kernel, column_tiles, p),
        **_row_gemm_constants(tile, rows.dtype, use_tma, access, p),
    }
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return launch_of(gemm_rows_kernel, grid, args, constants, tile.num_warps, tile.num_stages), out


def up_proj_act_launch(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool, device: Device
) -> tuple[Launch, Tensor, Tensor]:
    """up_proj: (launch, a (R_max, n), h (R_max, w)); without ``keep_h`` h is (0, w)."""
    d, n = x.shape[1], w1.shape[1] // spec.width_factor
    tile = choose_tile("up_proj_act", d, n, x.element_size(), device, gate_up_layout(spec))
    tiles = listed_tiles(plan, tile.block_m)
    a, h = act_outputs(x, plan, spec, n, keep_h)
    weight = split_parts(w1, spec).transpose(2, 3)
    width, column_tiles = tile.block_n * spec.width_factor // weight.shape[1], ceil_div(n, tile.block_n)
    right, access, strides = weight_argument(weight, device, tile.block_k, width)
    # tma_stores False was measured to be faster only for weights loaded by TMA, so it applies only to these.
    stores_by_tma = tile.tma_stores or access.endswith("by pointer")
    use_tma = stores_by_tma and can_describe_rows(device, a, *([h] if keep_h else []))
    left, by_tma = gathered_argument(x, tile.block_k, device)
    bias_strides = (0, 0, 0) if b1 is None else split_parts(b1, spec).stride()
    to_a = ragged_argument(a, [tile.block_m, tile.block_n // tile.slices], use_tma)
    to_h = _h_argument(h, spec, tile, use_tma) if keep_h else None
    operands = (left, right, b1, to_a, to_h, plan.token_of_row, *tiles)
    args = (*operands, d, n, x.stride(0), *strides, *bias_strides, spec.limit, spec.alpha)
    constants = {
        **activation_constants(spec, x.dtype),
        "HAS_BIAS": b1 is not None,
        "KEEP_H": keep_h,
        "GATHER_BY_TMA": by_tma,
        "INT64_OFFSETS": needs_int64(x),
        "BAND": band_tiles("up_proj_act", column_tiles, d),
        **_row_gemm_constants(tile, x.dtype, use_tma, access, d),
    }
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return launch_of(up_proj_act_kernel, grid, args, constants, tile.num_warps, tile.num_stages), a, h


def dgrad_dact_launch(
    do: Tensor, w2: Tensor, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec, device: Device
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """down_proj_dgrad: (launch, dh like h, a_scaled (R_max, n), partial (column tiles, R_max) fp32).

    partial: each row's <da', a> over the columns of one tile, for `score_grad_launch`.
    """
    d, n = w2.shape[1:]
    tile = choose_tile("down_proj_dgrad_dact", d, n, do.element_size(), device, gate_up_layout(spec))
    tiles = listed_tiles(plan, tile.block_m)
    column_tiles = ceil_div(n, tile.block_n)
    dh, a_scaled, partial = dact_outputs(h, s, plan, n, column_tiles)
    use_tma = can_describe_rows(device, h, dh, a_scaled)
    right, access, (stride_we, _, stride_win, stride_wout) = weight_argument(
        w2.unsqueeze(1), device, tile.block_k, tile.block_n
    )
    left, by_tma = gathered_argument(do, tile.block_k, device)
    to_dh = _h_argument(dh, spec, tile, use_tma)
    to_a = ragged_argument(a_scaled, [tile.block_m, tile.block_n // tile.slices], use_tma)
    operands = (left, right, h, s, to_dh, to_a, partial, plan.token_of_row, plan.pair_of_row, *tiles)
    scalars = (plan.capacity, d, n, do.stride(0), stride_we, stride_win, stride_wout, spec.limit, spec.alpha)
    constants = {
        **activation_constants(spec, do.dtype),
        "GATHER_BY_TMA": by_tma,
        "INT64_OFFSETS": needs_int64(do),
        "LOAD_AHEAD": tile.load_ahead,
        "BAND": band_tiles("down_proj_dgrad_dact", column_tiles, d),
        **_row_gemm_constants(tile, do.dtype, use_tma, access, d),
    }
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    args = (*operands, *scalars)
    launch = launch_of(gemm_dgrad_dact_kernel, grid, args, constants, tile.num_warps, tile.num_stages)
    return launch, dh, a_scaled, partial


def score_grad_launch(
    partial: Tensor, products: Tensor | None, s: Tensor, plan: RoutingPlan, tile_m: int
) -> tuple[Launch, Tensor]:
    """(launch, ds like s): the sum of each row's partial sums and its entry of products (T, E); 0 for skipped pairs."""
    ds, tiles = s.new_zeros(s.shape), listed_tiles(plan, tile_m)
    indices = (plan.token_of_row, plan.pair_of_row, *tiles)
    args = (partial, products, ds, *indices, plan.capacity, partial.shape[0], plan.num_experts)
    constants = {"HAS_PRODUCTS": products is not None, "BLOCK_M": tile_m}
    return launch_of(score_grad_kernel, (tiles.capacity,), args, constants, num_stages=2), ds


class WeightGrad(NamedTuple):
    """A weight gradient to compute: out (E, p, q) from by_token (T, p), gathered, and by_row (R_max, q).

    adds: the gradient is added to out, which is fp32, instead of overwriting it.
    """

    kernel: Kernel
    by_token: Tensor
    by_row: Tensor
    out: Tensor
    adds: bool = False


def wgrad_launch(grad: WeightGrad, plan: RoutingPlan, device: Device) -> Launch:
    """The launch that computes ``grad``; out is dense and contiguous along p or q."""
    kernel, by_token, by_row, out, adds = grad
    p, q = by_token.shape[1], by_row.shape[1]
    transposed = is_column_major(out)
    out = out.transpose(1, 2) if transposed else out
    tile = choose_tile(kernel, p, q, by_row.element_size(), device)
    use_tma = can_describe(out, device) and can_describe_rows(device, by_row)
    # Slices are staged in shared memory. For an fp32 output they are half as wide, so that they take the same bytes.
    wider = out.element_size() > by_row.element_size() and tile.block_n >= 2 * tile.slices * MIN_BLOCK
    slices = min(2 * tile.slices, 4) if wider else tile.slices
    columns = tile.block_n // slices
    left, by_tma = gathered_argument(by_token, tile.block_m, device)
    right = ragged_argument(by_row, [tile.block_k, tile.block_n], use_tma)
    to = rows_argument(out, [1, columns, tile.block_m] if transposed else [1, tile.block_m, columns], use_tma)
    indices = (plan.token_of_row, plan.row_start_of_expert, plan.num_experts)
    constants = {
        "TRANSPOSED": transposed,
        "ADDS": adds,
        "GATHER_BY_TMA": by_tma,
        "INT64_OFFSETS": needs_int64(by_token),
        "USE_TMA": use_tma,
        "EVEN_M": p % tile.block_m == 0,
        **arithmetic_constants(by_row.dtype),
        "SLICES": slices,
        **blocks(tile),
    }
    grid = persistent_grid(device, plan.num_experts * ceil_div(p, tile.block_m) * ceil_div(q, tile.block_n))
    args = (left, right, to, *indices, p, q, by_token.stride(0))
    return launch_of(gemm_wgrad_kernel, grid, args, constants, tile.num_warps, tile.num_stages)


# Shared with the Hopper kernels


def split_parts(t: Tensor, spec: ActivationSpec) -> Tensor:
    """A view (E, parts, ...) of w1 (E, w, d) or b1 (E, w): two parts if gate and up are concatenated, else one."""
    return t.unflatten(1, (2, -1)) if gate_up_layout(spec) == "concatenated" else t.unsqueeze(1)


def gate_up_layout(spec: ActivationSpec) -> str | None:
    return spec.gate_up if spec.is_gated else None


def act_outputs(x: Tensor, plan: RoutingPlan, spec: ActivationSpec, n: int, keep_h: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised a (R_max, n) and h (R_max, w); without ``keep_h`` h is (0, w)."""
    return x.new_empty(plan.capacity, n), x.new_empty(plan.capacity if keep_h else 0, spec.width_factor * n)


def dact_outputs(h: Tensor, s: Tensor, plan: RoutingPlan, n: int, column_tiles: int) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised dh like h, a_scaled (R_max, n) and partial (column tiles, R_max) fp32."""
    partial = s.new_empty(column_tiles, plan.capacity, dtype=torch.float32)
    return h.new_empty(h.shape), h.new_empty(plan.capacity, n), partial


# Compile-time constants


def activation_constants(spec: ActivationSpec, dtype: torch.dtype) -> dict[str, Any]:
    precise, interleaved = dtype == torch.float32, gate_up_layout(spec) == "interleaved"
    return {"ACTIVATION": spec.name, "PRECISE": precise, "GATED": spec.is_gated, "INTERLEAVED": interleaved}


def arithmetic_constants(dtype: torch.dtype) -> dict[str, Any]:
    """PRECISION of tl.dot, and SPLIT_ACCUM: in IEEE fp32 each k-block is summed on its own, then added.

    A single chain of fp32 sums over the contraction would have an error that grows with the square root of its length.
    """
    precision = dot_precision(dtype)
    return {"PRECISION": precision, "SPLIT_ACCUM": dtype == torch.float32 and precision == "ieee"}


def blocks(tile: TileConfig) -> dict[str, int]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}


def _row_gemm_constants(
    tile: TileConfig, dtype: torch.dtype, use_tma: bool, weight_access: str, contraction: int
) -> dict[str, Any]:
    return {
        "USE_TMA": use_tma,
        "WEIGHT_ACCESS": weight_access,
        "EVEN_K": contraction % tile.block_k == 0,
        **arithmetic_constants(dtype),
        "FLATTEN": tile.flatten,
        "SLICES": tile.slices,
        **blocks(tile),
    }


def _h_argument(h: Tensor, spec: ActivationSpec, tile: TileConfig, use_tma: bool) -> Any:
    """The kernel argument for h or dh (R_max, w) as an output; concatenated gate and up become (R_max, 2, n)."""
    width = tile.block_n // tile.slices
    if gate_up_layout(spec) == "concatenated":
        return ragged_argument(h.unflatten(1, (2, -1)), [tile.block_m, 1, width], use_tma)
    return ragged_argument(h, [tile.block_m, spec.width_factor * width], use_tma)


def needs_int64(rows: Tensor) -> bool:
    """Whether element offsets within ``rows`` need more than 32 bits."""
    return rows.shape[0] * rows.stride(0) >= 1 << 31
