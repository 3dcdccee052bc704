"""The Hopper backend: the warp-specialised GEMMs where they serve and are faster, the portable kernels elsewhere.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated

Each method looks at its operands: fp32, or a stride that TMA cannot follow goes to the portable kernel, which gives the
same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.base import empty_weight_grad
from tilemoe.kernels.experts.hopper import configs, host, serves
from tilemoe.kernels.experts.hopper.configs import TILES, is_faster
from tilemoe.kernels.experts.triton.backend import TritonBackend, aligned_rows, has_aligned_rows, score_grad, tiles_of
from tilemoe.kernels.experts.triton.configs import WIDTH_MULTIPLE, Kernel, small_m, tile_rows
from tilemoe.kernels.experts.triton.descriptors import can_describe, can_describe_rows
from tilemoe.kernels.experts.triton.host import split_parts
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of

_DTYPES = (torch.bfloat16, torch.float16)


class HopperBackend(TritonBackend):
    name = "hopper"

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        return super().why_unsupported(device, dtype, widths) or serves.why_unsupported(device)

    def up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor]:
        """F1: (a (R_max, n), h (R_max, w))."""
        _list_tiles_of_forward(x, w1, plan, spec)
        if not _takes_up_proj(x, w1, plan, spec):
            return super().up_proj_act(x, w1, b1, plan, spec)
        return _up_proj_act(x, w1, b1, plan, spec, keep_h=True)

    def up_proj_act_inference(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> Tensor:
        """F1 without h: a (R_max, n)."""
        if _has_small_m(plan):
            return super().up_proj_act_inference(x, w1, b1, plan, spec)
        _list_tiles_of_forward(x, w1, plan, spec)
        if not _takes_up_proj(x, w1, plan, spec):
            return super().up_proj_act_inference(x, w1, b1, plan, spec)
        return _up_proj_act(x, w1, b1, plan, spec, keep_h=False)[0]

    def down_proj(self, a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """F2: y (R_max, d), or the columns of d that w2 and b2 have."""
        weight = w2.transpose(1, 2)
        if not _takes_rows("down_proj", a, weight, plan):
            return super().down_proj(a, w2, b2, plan)
        return _rows("down_proj", a, weight, b2, plan)

    def down_proj_dgrad_dact(
        self,
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
        is_taken = (
            device is not None
            and is_faster("down_proj_dgrad_dact", *w2.shape[1:])
            and has_aligned_rows(do)
            and _describable_weight(w2, device)
            and can_describe_rows(device, h)
        )
        if device is None or not is_taken:
            return super().down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
        tiles = tiles_of(do, plan, device)
        launch, dh, a_scaled, partial = host.dgrad_dact_launch(do, w2, h, s, plan, tiles, spec, device)
        launch.run()
        ds = score_grad(partial, do, b2, s, plan, tiles, TILES["down_proj_dgrad_dact"].block_m, device)
        return dh, ds, a_scaled

    def down_proj_wgrad(self, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
        """B2: dw2 (E, d, n)."""
        if not _takes_wgrad("down_proj_wgrad", do, a_scaled, plan):
            return super().down_proj_wgrad(do, a_scaled, plan, column_major)
        dw2 = empty_weight_grad(do, (plan.num_experts, do.shape[1], a_scaled.shape[1]), column_major)
        host.wgrad_launch("down_proj_wgrad", do, a_scaled, dw2, plan, device_of(do)).run()
        return dw2

    def up_proj_dgrad(self, dh: Tensor, w1: Tensor, plan: RoutingPlan) -> Tensor:
        """B3: dx_rows (R_max, d), or the columns of d that w1 has."""
        if not _takes_rows("up_proj_dgrad", dh, w1, plan):
            return super().up_proj_dgrad(dh, w1, plan)
        return _rows("up_proj_dgrad", dh, w1, None, plan)

    def up_proj_wgrad(self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
        """B4: dw1 (E, w, d)."""
        if not _takes_wgrad("up_proj_wgrad", x, dh, plan):
            return super().up_proj_wgrad(x, dh, plan, column_major)
        dw1 = empty_weight_grad(x, (plan.num_experts, dh.shape[1], x.shape[1]), column_major)
        out = dw1.transpose(1, 2)  # the gathered operand's width comes first
        host.wgrad_launch("up_proj_wgrad", x, dh, out, plan, device_of(x)).run()
        return dw1


def _up_proj_act(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
) -> tuple[Tensor, Tensor]:
    device = device_of(x)
    tiles = tiles_of(x, plan, device)
    launch, a, h = host.up_proj_act_launch(x, w1, _aligned_bias(b1), plan, tiles, spec, keep_h, device)
    launch.run()
    return a, h


def _rows(kernel: Kernel, rows: Tensor, weight: Tensor, bias: Tensor | None, plan: RoutingPlan) -> Tensor:
    device = device_of(rows)
    tiles = listed_tiles(plan, TILES[kernel].block_m)
    launch, out = host.rows_launch(kernel, rows, weight, _aligned_bias(bias), plan, tiles, device)
    launch.run()
    return out


def _list_tiles_of_forward(x: Tensor, w1: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> None:
    """List F2's tiles with F1's, whichever kernel F1 takes: one launch instead of two."""
    d, n = x.shape[1], w1.shape[1] // spec.width_factor
    device = _device(x, plan, d, n)
    if device is not None and is_faster("down_proj", n, d):
        listed_tiles(plan, tile_rows(x.element_size(), device), TILES["down_proj"].block_m)


def _takes_up_proj(x: Tensor, w1: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> bool:
    d, n = x.shape[1], w1.shape[1] // spec.width_factor
    device = _device(x, plan, d, n)
    return (
        device is not None
        and is_faster("up_proj_act", d, n)
        and has_aligned_rows(x)
        and _describable_weight(split_parts(w1, spec).transpose(2, 3), device)
    )


def _takes_rows(kernel: Kernel, rows: Tensor, weight: Tensor, plan: RoutingPlan) -> bool:
    """weight (E, in, out)."""
    device = _device(rows, plan, *weight.shape[1:])
    return (
        device is not None
        and is_faster(kernel, *weight.shape[1:])
        and can_describe_rows(device, rows)
        and _describable_weight(weight, device)
    )


def _takes_wgrad(kernel: Kernel, by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> bool:
    widths = by_token.shape[1], by_row.shape[1]
    device = _device(by_row, plan, *widths)
    return (
        device is not None
        and is_faster(kernel, *widths)
        and has_aligned_rows(by_token)
        and can_describe_rows(device, by_row)
    )


def _device(rows: Tensor, plan: RoutingPlan, *widths: int) -> Device | None:
    """What holds ``rows``, if there are any and these kernels compute in their dtype and widths.

    ValueError where no Hopper kernel runs.
    """
    device = device_of(rows)
    why = configs.why_unsupported(device, triton.__version__)
    if why is not None:
        raise ValueError(f"kernels='hopper': {why}; pass kernels=None or 'triton'")
    if rows.dtype not in _DTYPES or plan.capacity == 0 or any(width % WIDTH_MULTIPLE for width in widths):
        return None
    return device


def _has_small_m(plan: RoutingPlan) -> bool:
    """Whether reading the weights bounds the forward: the portable kernels have tiles for it."""
    return small_m(plan.capacity, plan.num_experts) is not None


def _aligned_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else aligned_rows(bias)


def _describable_weight(weight: Tensor, device: Device) -> bool:
    """Whether TMA can read a weight (E, ..., in, out), whichever of in and out is contiguous."""
    return can_describe(weight, device) or can_describe(weight.transpose(-2, -1), device)
