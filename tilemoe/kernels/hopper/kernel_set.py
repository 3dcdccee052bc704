"""The Hopper KernelSet: the warp-specialised GEMMs where they serve and are faster, the portable kernels elsewhere.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated

Each entry looks at its operands: fp32, or a stride that TMA cannot follow goes to the portable kernel, which gives the
same numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.base import empty_weight_grad
from tilemoe.kernels.hopper import launches
from tilemoe.kernels.hopper.choose import SHAPES, is_faster, problem_of_gpu
from tilemoe.kernels.tiling import WIDTH_MULTIPLE, Device, Kernel, few_rows, tile_rows
from tilemoe.kernels.triton.descriptors import can_describe, can_describe_rows
from tilemoe.kernels.triton.kernel_set import TRITON_KERNELS, score_grad, tiles_of
from tilemoe.kernels.triton.launch import device_of
from tilemoe.kernels.triton.tiles import listed_tiles
from tilemoe.routing.plan import RoutingPlan

_DTYPES = (torch.bfloat16, torch.float16)


def up_proj_act(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
) -> tuple[Tensor, Tensor]:
    """F1: (a (R_max, n), h (R_max, w))."""
    _list_tiles_of_forward(x, w1, plan, spec)
    if not _serves_up_proj(x, w1, plan, spec):
        return TRITON_KERNELS.up_proj_act(x, w1, b1, plan, spec)
    return _up_proj_act(x, w1, b1, plan, spec, keep_h=True)


def up_proj_act_inference(x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec) -> Tensor:
    """F1 without h: a (R_max, n)."""
    if _has_few_rows(plan):
        return TRITON_KERNELS.up_proj_act_inference(x, w1, b1, plan, spec)
    _list_tiles_of_forward(x, w1, plan, spec)
    if not _serves_up_proj(x, w1, plan, spec):
        return TRITON_KERNELS.up_proj_act_inference(x, w1, b1, plan, spec)
    return _up_proj_act(x, w1, b1, plan, spec, keep_h=False)[0]


def down_proj(a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
    """F2: y (R_max, d), or the columns of d that w2 and b2 have."""
    weight = w2.transpose(1, 2)
    if not _serves_rows("down_proj", a, weight, plan):
        return TRITON_KERNELS.down_proj(a, w2, b2, plan)
    return _rows("down_proj", a, weight, b2, plan)


def down_proj_inference(a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
    """F2, where nothing will be differentiated: y (R_max, d), or the columns of d that w2 and b2 have."""
    return (TRITON_KERNELS.down_proj_inference if _has_few_rows(plan) else down_proj)(a, w2, b2, plan)


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
    device = _device(do, plan, *w2.shape[1:])
    serves = (
        device is not None
        and is_faster("down_proj_act_grad", *w2.shape[1:])
        and _is_copyable(do)
        and _describable_weight(w2, device)
        and can_describe_rows(device, h)
    )
    if device is None or not serves:
        return TRITON_KERNELS.down_proj_act_grad(do, w2, b2, h, s, plan, spec)
    tiles = tiles_of(do, plan, device)
    launch, dh, a_scaled, partial = launches.act_grad_launch(do, w2, h, s, plan, tiles, spec, device)
    launch.run()
    ds = score_grad(partial, do, b2, s, plan, tiles, SHAPES["down_proj_act_grad"].rows, device)
    return dh, ds, a_scaled


def down_proj_weight_grad(do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
    """B2: dw2 (E, d, n)."""
    if not _serves_weights("down_proj_weight_grad", do, a_scaled, plan):
        return TRITON_KERNELS.down_proj_weight_grad(do, a_scaled, plan, column_major)
    dw2 = empty_weight_grad(do, (plan.num_experts, do.shape[1], a_scaled.shape[1]), column_major)
    launches.weights_launch("down_proj_weight_grad", do, a_scaled, dw2, plan, device_of(do)).run()
    return dw2


def up_proj_act_grad(dh: Tensor, w1: Tensor, plan: RoutingPlan) -> Tensor:
    """B3: dx_rows (R_max, d), or the columns of d that w1 has."""
    if not _serves_rows("up_proj_act_grad", dh, w1, plan):
        return TRITON_KERNELS.up_proj_act_grad(dh, w1, plan)
    return _rows("up_proj_act_grad", dh, w1, None, plan)


def up_proj_weight_grad(x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
    """B4: dw1 (E, w, d)."""
    if not _serves_weights("up_proj_weight_grad", x, dh, plan):
        return TRITON_KERNELS.up_proj_weight_grad(x, dh, plan, column_major)
    dw1 = empty_weight_grad(x, (plan.num_experts, dh.shape[1], x.shape[1]), column_major)
    out = dw1.transpose(1, 2)  # the gathered operand's width comes first
    launches.weights_launch("up_proj_weight_grad", x, dh, out, plan, device_of(x)).run()
    return dw1


def _up_proj_act(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
) -> tuple[Tensor, Tensor]:
    device = device_of(x)
    tiles = tiles_of(x, plan, device)
    launch, a, h = launches.up_proj_act_launch(x, w1, _bias_rows(b1), plan, tiles, spec, keep_h, device)
    launch.run()
    return a, h


def _rows(kernel: Kernel, rows: Tensor, weight: Tensor, bias: Tensor | None, plan: RoutingPlan) -> Tensor:
    device = device_of(rows)
    tiles = listed_tiles(plan, SHAPES[kernel].rows)
    launch, out = launches.rows_launch(kernel, rows, weight, _bias_rows(bias), plan, tiles, device)
    launch.run()
    return out


def _list_tiles_of_forward(x: Tensor, w1: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> None:
    """List F2's tiles with F1's, whichever kernel F1 takes: one launch instead of two."""
    d, n = x.shape[1], w1.shape[1] // spec.width_factor
    device = _device(x, plan, d, n)
    if device is not None and is_faster("down_proj", n, d):
        listed_tiles(plan, tile_rows(x.element_size(), device), SHAPES["down_proj"].rows)


def _serves_up_proj(x: Tensor, w1: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> bool:
    d, n = x.shape[1], w1.shape[1] // spec.width_factor
    device = _device(x, plan, d, n)
    return (
        device is not None
        and is_faster("up_proj_act", d, n)
        and _is_copyable(x)
        and can_describe(launches.up_proj_weight(w1, spec), device)
    )


def _serves_rows(kernel: Kernel, rows: Tensor, weight: Tensor, plan: RoutingPlan) -> bool:
    """weight (E, in, out)."""
    device = _device(rows, plan, *weight.shape[1:])
    return (
        device is not None
        and is_faster(kernel, *weight.shape[1:])
        and can_describe_rows(device, rows)
        and _describable_weight(weight, device)
    )


def _serves_weights(kernel: Kernel, by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> bool:
    widths = by_token.shape[1], by_row.shape[1]
    device = _device(by_row, plan, *widths)
    return (
        device is not None
        and is_faster(kernel, *widths)
        and _is_copyable(by_token)
        and can_describe_rows(device, by_row)
    )


def _device(rows: Tensor, plan: RoutingPlan, *widths: int) -> Device | None:
    """What holds ``rows``, if there are any and these kernels compute in their dtype and widths.

    ValueError where no Hopper kernel runs.
    """
    device = device_of(rows)
    problem = problem_of_gpu(device, triton.__version__)
    if problem is not None:
        raise ValueError(f"kernels='hopper': {problem}; pass kernels=None or 'triton'")
    if rows.dtype not in _DTYPES or plan.capacity == 0 or any(width % WIDTH_MULTIPLE for width in widths):
        return None
    return device


def _has_few_rows(plan: RoutingPlan) -> bool:
    """Whether reading the weights bounds the forward: the portable kernels have tiles for it."""
    return few_rows(plan.capacity, plan.num_experts) is not None


def _is_copyable(t: Tensor) -> bool:
    """Whether cp.async can take 16 bytes at a time from each row."""
    return t.stride(1) == 1 and t.stride(0) % WIDTH_MULTIPLE == 0 and t.data_ptr() % 16 == 0


def _bias_rows(bias: Tensor | None) -> Tensor | None:
    """``bias`` (E, .) with aligned rows, as the kernels load it: a copy, which is small, where it has others."""
    if bias is None or (bias.stride(1) == 1 and bias.stride(0) % WIDTH_MULTIPLE == 0):
        return bias
    return bias.contiguous()


def _describable_weight(weight: Tensor, device: Device) -> bool:
    """Whether TMA can read a weight (E, in, out), whichever of in and out is contiguous."""
    return can_describe(weight, device) or can_describe(weight.transpose(1, 2), device)


HOPPER_KERNELS = replace(
    TRITON_KERNELS,
    name="hopper",
    up_proj_act=up_proj_act,
    up_proj_act_inference=up_proj_act_inference,
    down_proj=down_proj,
    down_proj_inference=down_proj_inference,
    down_proj_act_grad=down_proj_act_grad,
    down_proj_weight_grad=down_proj_weight_grad,
    up_proj_act_grad=up_proj_act_grad,
    up_proj_weight_grad=up_proj_weight_grad,
)
