"""The launches behind the KernelSet's GEMMs: shapes, tiles, descriptors and grids. Nothing here reads a device value.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.base import is_column_major
from tilemoe.kernels.tiling import Device, Kernel, Tile, choose_tile
from tilemoe.kernels.triton.act_grad import act_grad_kernel, score_grad_kernel
from tilemoe.kernels.triton.descriptors import (
    can_describe,
    can_describe_rows,
    ragged_operand,
    rows_operand,
    weight_operand,
)
from tilemoe.kernels.triton.gemm_rows import gemm_rows_kernel, up_proj_act_kernel
from tilemoe.kernels.triton.gemm_weights import gemm_weights_kernel
from tilemoe.kernels.triton.launch import Launch, ceil_div, dot_precision, persistent_grid
from tilemoe.kernels.triton.tiles import TileList
from tilemoe.routing.plan import RoutingPlan


def rows_launch(
    kernel: Kernel,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: RoutingPlan,
    tiles: TileList,
    device: Device,
) -> tuple[Launch, Tensor]:
    """F2 and B3: out (R_max, q) = rows (R_max, p) times weight (E, p, q) of any strides, plus bias (E, q)."""
    p, q = weight.shape[1:]
    out = rows.new_empty(plan.capacity, q)
    tile = choose_tile(kernel, p, q, rows.element_size(), device)
    use_tma = can_describe_rows(device, rows, out)
    operand, access, strides = weight_operand(weight.unsqueeze(1), device, tile.block_k, tile.block_n)
    launch = Launch(
        gemm_rows_kernel,
        persistent_grid(device, tiles.capacity * ceil_div(q, tile.block_n)),
        {
            "rows": rows_operand(rows, [tile.block_m, tile.block_k], use_tma),
            "weight": operand,
            "bias": bias,
            "out": ragged_operand(out, [tile.block_m, tile.block_n // tile.slices], use_tma),
            **tiles._asdict(),
            "width_in": p,
            "width_out": q,
            "stride_we": strides[0],
            "stride_win": strides[2],
            "stride_wout": strides[3],
            "stride_be": 0 if bias is None else bias.stride(0),
            "stride_bout": 0 if bias is None else bias.stride(1),
        },
        {
            "HAS_BIAS": bias is not None,
            "USE_TMA": use_tma,
            "WEIGHT_ACCESS": access,
            "EVEN_K": p % tile.block_k == 0,
            **arithmetic_constants(rows.dtype),
            "FLATTEN": tile.flatten,
            "SLICES": tile.slices,
            **blocks(tile),
        },
        tile.num_warps,
        tile.num_stages,
    )
    return launch, out


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
    """F1: (a (R_max, n), h (R_max, w), or (0, w) where it is not kept)."""
    parts = spec.width_factor
    d, n = x.shape[1], w1.shape[1] // parts
    a, h = x.new_empty(plan.capacity, n), x.new_empty(plan.capacity if keep_h else 0, parts * n)
    tile = choose_tile("up_proj_act", d, n, x.element_size(), device, gate_up_layout(spec))
    weight = _split_parts(w1, spec).transpose(2, 3)
    width = tile.block_n * parts // weight.shape[1]
    operand, access, strides = weight_operand(weight, device, tile.block_k, width)
    # Stores by pointer are faster beside a weight that comes by TMA; no other was measured.
    stores_by_tma = tile.tma_stores or access.endswith("by pointer")
    use_tma = stores_by_tma and can_describe_rows(device, a, *([h] if keep_h else []))
    bias_strides = (0, 0, 0) if b1 is None else _split_parts(b1, spec).stride()
    launch = Launch(
        up_proj_act_kernel,
        persistent_grid(device, tiles.capacity * ceil_div(n, tile.block_n)),
        {
            "x": x,
            "weight": operand,
            "bias": b1,
            "a": ragged_operand(a, [tile.block_m, tile.block_n // tile.slices], use_tma),
            "h": _h_out(h, spec, tile, use_tma) if keep_h else None,
            "token_of_row": plan.token_of_row,
            **tiles._asdict(),
            "d": d,
            "n": n,
            "stride_x": x.stride(0),
            "stride_we": strides[0],
            "stride_wpart": strides[1],
            "stride_win": strides[2],
            "stride_wout": strides[3],
            "stride_be": bias_strides[0],
            "stride_bpart": bias_strides[1],
            "stride_bout": bias_strides[2],
            "limit": spec.limit,
            "alpha": spec.alpha,
        },
        {
            **activation_constants(spec, x.dtype),
            "HAS_BIAS": b1 is not None,
            "KEEP_H": keep_h,
            "WIDE": _is_wide(x),
            "USE_TMA": use_tma,
            "WEIGHT_ACCESS": access,
            "EVEN_K": d % tile.block_k == 0,
            **arithmetic_constants(x.dtype),
            "FLATTEN": tile.flatten,
            "SLICES": tile.slices,
            **blocks(tile),
        },
        tile.num_warps,
        tile.num_stages,
    )
    return launch, a, h


def act_grad_launch(
    do: Tensor,
    w2: Tensor,
    h: Tensor,
    s: Tensor,
    plan: RoutingPlan,
    tiles: TileList,
    spec: ActivationSpec,
    device: Device,
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """B1: (dh like h, a_scaled (R_max, n), partial (column tiles, R_max) fp32 of the scores' gradient)."""
    d, n = w2.shape[1:]
    tile = choose_tile("down_proj_act_grad", d, n, do.element_size(), device, gate_up_layout(spec))
    column_tiles = ceil_div(n, tile.block_n)
    dh, a_scaled = h.new_empty(h.shape), h.new_empty(plan.capacity, n)
    partial = s.new_empty(column_tiles, plan.capacity, dtype=torch.float32)
    use_tma = can_describe_rows(device, h, dh, a_scaled)
    operand, access, strides = weight_operand(w2.unsqueeze(1), device, tile.block_k, tile.block_n)
    launch = Launch(
        act_grad_kernel,
        persistent_grid(device, tiles.capacity * column_tiles),
        {
            "do": do,
            "weight": operand,
            "h": h,
            "s": s,
            "dh": _h_out(dh, spec, tile, use_tma),
            "a_scaled": ragged_operand(a_scaled, [tile.block_m, tile.block_n // tile.slices], use_tma),
            "partial": partial,
            "token_of_row": plan.token_of_row,
            "pair_of_row": plan.pair_of_row,
            **tiles._asdict(),
            "capacity": plan.capacity,
            "d": d,
            "n": n,
            "stride_do": do.stride(0),
            "stride_we": strides[0],
            "stride_win": strides[2],
            "stride_wout": strides[3],
            "limit": spec.limit,
            "alpha": spec.alpha,
        },
        {
            **activation_constants(spec, do.dtype),
            "WIDE": _is_wide(do),
            "USE_TMA": use_tma,
            "WEIGHT_ACCESS": access,
            "EVEN_K": d % tile.block_k == 0,
            **arithmetic_constants(do.dtype),
            "FLATTEN": tile.flatten,
            "SLICES": tile.slices,
            "LOAD_AHEAD": tile.load_ahead,
            **blocks(tile),
        },
        tile.num_warps,
        tile.num_stages,
    )
    return launch, dh, a_scaled, partial


def score_grad_launch(
    partial: Tensor, products: Tensor | None, s: Tensor, plan: RoutingPlan, tiles: TileList, tile_m: int
) -> tuple[Launch, Tensor]:
    """ds like s: the parts of each row added up, plus its entry of products (T, E); 0 for a skipped pair."""
    ds = s.new_zeros(s.shape)
    launch = Launch(
        score_grad_kernel,
        (tiles.capacity,),
        {
            "partial": partial,
            "products": products,
            "ds": ds,
            "token_of_row": plan.token_of_row,
            "pair_of_row": plan.pair_of_row,
            **tiles._asdict(),
            "capacity": plan.capacity,
            "num_partial": partial.shape[0],
            "num_experts": plan.num_experts,
        },
        {"HAS_PRODUCTS": products is not None, "BLOCK_M": tile_m},
        num_warps=4,
        num_stages=2,
    )
    return launch, ds


def weights_launch(
    kernel: Kernel, by_token: Tensor, by_row: Tensor, out: Tensor, plan: RoutingPlan, device: Device
) -> Launch:
    """B2 and B4: to out (E, p, q), dense with p or q contiguous, from by_token (T, p) and by_row (R_max, q)."""
    p, q = by_token.shape[1], by_row.shape[1]
    transposed = is_column_major(out)
    out = out.transpose(1, 2) if transposed else out
    tile = choose_tile(kernel, p, q, by_row.element_size(), device)
    use_tma = can_describe(out, device) and can_describe_rows(device, by_row)
    width = tile.block_n // tile.slices
    out_block = [1, width, tile.block_m] if transposed else [1, tile.block_m, width]
    return Launch(
        gemm_weights_kernel,
        persistent_grid(device, plan.num_experts * ceil_div(p, tile.block_m) * ceil_div(q, tile.block_n)),
        {
            "by_token": by_token,
            "by_row": ragged_operand(by_row, [tile.block_k, tile.block_n], use_tma),
            "out": rows_operand(out, out_block, use_tma),
            "token_of_row": plan.token_of_row,
            "row_start_of_expert": plan.row_start_of_expert,
            "num_experts": plan.num_experts,
            "p": p,
            "q": q,
            "stride_token": by_token.stride(0),
        },
        {
            "TRANSPOSED": transposed,
            "WIDE": _is_wide(by_token),
            "USE_TMA": use_tma,
            "EVEN_M": p % tile.block_m == 0,
            **arithmetic_constants(by_row.dtype),
            "SLICES": tile.slices,
            **blocks(tile),
        },
        tile.num_warps,
        tile.num_stages,
    )


def _split_parts(t: Tensor, spec: ActivationSpec) -> Tensor:
    """(E, parts, ...) view of a w1 (E, w, d) or b1 (E, w): two parts where gate and up are concatenated, else one."""
    return t.unflatten(1, (2, -1)) if gate_up_layout(spec) == "concatenated" else t.unsqueeze(1)


def gate_up_layout(spec: ActivationSpec) -> str | None:
    return spec.gate_up if spec.is_gated else None


def _h_out(h: Tensor, spec: ActivationSpec, tile: Tile, use_tma: bool) -> Any:
    """h or dh (R_max, w) to be written in tiles: gate and up apart, (R_max, 2, n), unless they alternate."""
    width = tile.block_n // tile.slices
    if spec.is_gated and spec.gate_up == "concatenated":
        return ragged_operand(h.unflatten(1, (2, -1)), [tile.block_m, 1, width], use_tma)
    return ragged_operand(h, [tile.block_m, spec.width_factor * width], use_tma)


def activation_constants(spec: ActivationSpec, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "ACTIVATION": spec.name,
        "PRECISE": dtype == torch.float32,
        "GATED": spec.is_gated,
        "INTERLEAVED": gate_up_layout(spec) == "interleaved",
    }


def arithmetic_constants(dtype: torch.dtype) -> dict[str, Any]:
    """How products are multiplied and added up: as matrix units do, and in fp32 by IEEE step by step.

    One chain of fp32 sums over the contraction would err by its length's square root.
    """
    precision = dot_precision(dtype)
    return {"PRECISION": precision, "APART": dtype == torch.float32 and precision == "ieee"}


def _is_wide(rows: Tensor) -> bool:
    """Whether an element of ``rows`` can lie too far from the first for 32 bits."""
    return rows.shape[0] * rows.stride(0) >= 1 << 31


def blocks(tile: Tile) -> dict[str, int]:
    return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
