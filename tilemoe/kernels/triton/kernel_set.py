"""The Triton KernelSet: each entry builds its launch, runs it and returns what the kernel wrote.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.base import KernelSet, empty_weight_grad
from tilemoe.kernels.tiling import WIDTH_MULTIPLE, Device, few_rows, problem_of_widths, tile_rows
from tilemoe.kernels.triton import bias_grad, mlp
from tilemoe.kernels.triton import few_rows as few_rows_kernels
from tilemoe.kernels.triton.combine import combine, combine_grad
from tilemoe.kernels.triton.launch import device_of
from tilemoe.kernels.triton.tiles import TileList, listed_tiles
from tilemoe.routing.plan import RoutingPlan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(dtype: torch.dtype, *widths: int) -> str | None:
    """Why these kernels cannot compute in ``dtype`` with these values of d and n, in a few words; None if they can."""
    if dtype not in DTYPES:
        return f"no Triton kernel computes in {dtype}"
    return problem_of_widths(*widths)


def up_proj_act(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
) -> tuple[Tensor, Tensor]:
    """F1: (a (R_max, n), h (R_max, w))."""
    return _up_proj_act(x, w1, b1, plan, spec, keep_h=True)


def up_proj_act_inference(x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec) -> Tensor:
    """F1 without h: a (R_max, n)."""
    block_m = few_rows(plan.capacity, plan.num_experts)
    if block_m is not None and plan.capacity > 0:
        device = _check(x, x.shape[1], w1.shape[1] // spec.width_factor)
        launch, a = few_rows_kernels.up_proj_act_launch(_by_token(x), w1, b1, plan, spec, block_m, device)
        launch.run()
        return a
    return _up_proj_act(x, w1, b1, plan, spec, keep_h=False)[0]


def down_proj(a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
    """F2: y (R_max, d), or the columns of d that w2 and b2 have."""
    device = _check(a, *w2.shape[1:])
    if plan.capacity == 0:
        return a.new_empty(0, w2.shape[1])
    launch, y = mlp.rows_launch(
        "down_proj", a.contiguous(), w2.transpose(1, 2), b2, plan, tiles_of(a, plan, device), device
    )
    launch.run()
    return y


def down_proj_inference(a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
    """F2, where nothing will be differentiated: y (R_max, d), or the columns of d that w2 and b2 have."""
    block_m = few_rows(plan.capacity, plan.num_experts)
    if block_m is not None and plan.capacity > 0:
        device = _check(a, *w2.shape[1:])
        launch, y = few_rows_kernels.down_proj_launch(a.contiguous(), w2, b2, plan, block_m, device)
        launch.run()
        return y
    return down_proj(a, w2, b2, plan)


def down_proj_act_grad(
    do: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    h: Tensor,
    s: Tensor,
    plan: RoutingPlan,
    spec: ActivationSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """B1: (dh (R_max, w), ds like s, a_scaled (R_max, n))."""
    device = _check(do, *w2.shape[1:])
    if plan.capacity == 0:
        return torch.empty_like(h), torch.zeros_like(s), h.new_empty(0, w2.shape[2])
    do, h, tiles = _by_token(do), h.contiguous(), tiles_of(do, plan, device)
    launch, dh, a_scaled, partial = mlp.act_grad_launch(do, w2, h, s, plan, tiles, spec, device)
    launch.run()
    tile_m = tile_rows(do.element_size(), device)
    return dh, score_grad(partial, do, b2, s, plan, tiles, tile_m, device), a_scaled


def score_grad(
    partial: Tensor,
    do: Tensor,
    b2: Tensor | None,
    s: Tensor,
    plan: RoutingPlan,
    tiles: TileList,
    tile_m: int,
    device: Device,
) -> Tensor:
    """ds like s, from B1's partial (column tiles, R_max), do (T, d) with aligned rows, and tiles of ``tile_m`` rows."""
    products = None if b2 is None else bias_grad.bias_products(do, _by_token(b2), device)
    launch, ds = mlp.score_grad_launch(partial, products, s, plan, tiles, tile_m)
    launch.run()
    return ds


def down_proj_weight_grad(do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
    """B2: dw2 (E, d, n)."""
    device = _check(do, do.shape[1], a_scaled.shape[1])
    dw2 = empty_weight_grad(do, (plan.num_experts, do.shape[1], a_scaled.shape[1]), column_major)
    if plan.capacity == 0:
        return dw2.zero_()
    mlp.weights_launch("down_proj_weight_grad", _by_token(do), a_scaled.contiguous(), dw2, plan, device).run()
    return dw2


def up_proj_act_grad(dh: Tensor, w1: Tensor, plan: RoutingPlan) -> Tensor:
    """B3: dx_rows (R_max, d), or the columns of d that w1 has."""
    device = _check(dh, *w1.shape[1:])
    if plan.capacity == 0:
        return dh.new_empty(0, w1.shape[2])
    launch, dx_rows = mlp.rows_launch(
        "up_proj_act_grad", dh.contiguous(), w1, None, plan, tiles_of(dh, plan, device), device
    )
    launch.run()
    return dx_rows


def up_proj_weight_grad(x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
    """B4: dw1 (E, w, d)."""
    device = _check(x, x.shape[1], dh.shape[1])
    dw1 = empty_weight_grad(x, (plan.num_experts, dh.shape[1], x.shape[1]), column_major)
    if plan.capacity == 0:
        return dw1.zero_()
    out = dw1.transpose(1, 2)  # the gathered operand's width comes first
    mlp.weights_launch("up_proj_weight_grad", _by_token(x), dh.contiguous(), out, plan, device).run()
    return dw1


def down_proj_bias_grad(do: Tensor, s: Tensor, plan: RoutingPlan) -> Tensor:
    """db2 (E, d) in s's dtype: the sum of each expert's rows of s times do."""
    device = _check(do, do.shape[1])
    if plan.capacity == 0:
        return s.new_zeros(plan.num_experts, do.shape[1])
    return bias_grad.down_proj_bias_grad(_by_token(do), s, plan, device).to(s.dtype)


def up_proj_bias_grad(dh: Tensor, plan: RoutingPlan) -> Tensor:
    """db1 (E, w) fp32: the sum of each expert's rows of dh."""
    device = _check(dh, dh.shape[1])
    if plan.capacity == 0:
        return dh.new_zeros(plan.num_experts, dh.shape[1], dtype=torch.float32)
    return bias_grad.up_proj_bias_grad(dh.contiguous(), plan, device)


def _up_proj_act(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
) -> tuple[Tensor, Tensor]:
    n = w1.shape[1] // spec.width_factor
    device = _check(x, x.shape[1], n)
    if plan.capacity == 0:
        return x.new_empty(0, n), x.new_empty(0, w1.shape[1])
    launch, a, h = mlp.up_proj_act_launch(_by_token(x), w1, b1, plan, tiles_of(x, plan, device), spec, keep_h, device)
    launch.run()
    return a, h


def _check(rows: Tensor, *widths: int) -> Device:
    """What holds ``rows``, once it is clear that these kernels serve it; ValueError otherwise."""
    problem = unsupported(rows.dtype, *widths)
    if problem is not None:
        raise ValueError(f"kernels='triton': {problem}; pass kernels=None or 'torch'")
    return device_of(rows)


def tiles_of(rows: Tensor, plan: RoutingPlan, device: Device) -> TileList:
    """The plan's rows cut into tiles, which all row GEMMs of one operator share."""
    return listed_tiles(plan, tile_rows(rows.element_size(), device))


def _by_token(t: Tensor) -> Tensor:
    """A gathered operand may have any row stride that keeps its rows aligned, and no other address or stride.

    Loads of less than 4 bytes cannot be asynchronous: what Triton does instead takes more shared memory than there is.
    """
    is_aligned = t.stride(1) == 1 and t.stride(0) % WIDTH_MULTIPLE == 0 and t.data_ptr() % 16 == 0
    return t if is_aligned else t.clone(memory_format=torch.contiguous_format)


TRITON_KERNELS = KernelSet(
    name="triton",
    up_proj_act=up_proj_act,
    up_proj_act_inference=up_proj_act_inference,
    down_proj=down_proj,
    down_proj_inference=down_proj_inference,
    combine=combine,
    down_proj_act_grad=down_proj_act_grad,
    down_proj_weight_grad=down_proj_weight_grad,
    up_proj_act_grad=up_proj_act_grad,
    up_proj_weight_grad=up_proj_weight_grad,
    combine_grad=combine_grad,
    down_proj_bias_grad=down_proj_bias_grad,
    up_proj_bias_grad=up_proj_bias_grad,
)
