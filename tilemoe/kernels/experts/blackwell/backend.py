"""The Blackwell backend: its own GEMMs for 16-bit operands that TMA can describe, the portable kernels elsewhere.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

Compiled and emulated; never run. So nothing is chosen by speed: a call goes to the portable kernel (`super()`), which
computes the same, only where its operands demand it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.blackwell import configs, host, serves
from tilemoe.kernels.experts.formats.operand import GemmOperand, WeightOperand
from tilemoe.kernels.experts.hopper.backend import DTYPES, describable_weight
from tilemoe.kernels.experts.triton.backend import TritonBackend, score_grad
from tilemoe.kernels.experts.triton.configs import WIDTH_MULTIPLE, Kernel
from tilemoe.kernels.experts.triton.descriptors import aligned_rows, can_describe_rows, has_aligned_rows
from tilemoe.kernels.experts.triton.host import split_parts
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of


class BlackwellBackend(TritonBackend):
    name = "blackwell"
    batch_invariance = "not tested"
    packed = MappingProxyType({"nf4": "not tested", "mxfp4": "not tested"})

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        return super().why_unsupported(device, dtype, widths) or serves.why_unsupported(device)

    def _up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
    ) -> tuple[GemmOperand, Tensor]:
        device = _device(x, plan, x.shape[1], w1.shape[1] // spec.width_factor)
        parts = split_parts(w1, spec).transpose(2, 3)
        if device is None or not (has_aligned_rows(x) and describable_weight(parts, device)):
            return super()._up_proj_act(x, w1, b1, plan, spec, keep_h)
        tiles, bias = listed_tiles(plan, configs.BLOCK_M), None if b1 is None else aligned_rows(b1)
        launch, a, h = host.up_proj_act_launch(x, w1, bias, plan, tiles, spec, keep_h, device)
        launch.run()
        return a, h

    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = _device(do, plan, *w2.shape[1:])
        if device is None or not (
            has_aligned_rows(do) and describable_weight(w2, device) and can_describe_rows(device, h)
        ):
            return super().down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
        tiles = listed_tiles(plan, configs.BLOCK_M)
        launch, dh, a_scaled, partial = host.dgrad_dact_launch(do, w2, h, s, plan, tiles, spec, device)
        launch.run()
        return dh, score_grad(partial, do, b2, s, plan, tiles, configs.BLOCK_M), a_scaled

    def _rows(
        self, kernel: Kernel, rows: GemmOperand, weight: WeightOperand, bias: Tensor | None, plan: RoutingPlan
    ) -> Tensor:
        if not (isinstance(rows, Tensor) and isinstance(weight, Tensor)):
            return super()._rows(kernel, rows, weight, bias, plan)
        device = _device(rows, plan, *weight.shape[1:])
        if device is None or not (can_describe_rows(device, rows) and describable_weight(weight, device)):
            return super()._rows(kernel, rows, weight, bias, plan)
        tiles, bias = listed_tiles(plan, configs.BLOCK_M), None if bias is None else aligned_rows(bias)
        launch, out = host.rows_launch(kernel, rows, weight, bias, plan, tiles, device)
        launch.run()
        return out

    def _sums_beside_grad(self, x: Tensor, dh: Tensor) -> bool:
        return False  # gather4 cannot put the columns of ones beside x's that would sum dh

    def _weight_grad(
        self,
        kernel: Kernel,
        by_token: Tensor,
        by_row: Tensor,
        out: Tensor,
        plan: RoutingPlan,
        adds: bool,
        sums: Tensor | None = None,
    ) -> None:
        device = _device(by_row, plan, by_token.shape[1], by_row.shape[1])
        if device is None or not (
            has_aligned_rows(by_token) and can_describe_rows(device, by_row) and describable_weight(out, device)
        ):
            super()._weight_grad(kernel, by_token, by_row, out, plan, adds, sums)
        else:
            assert sums is None, "`_sums_beside_grad` says that none are made"
            host.wgrad_launch(kernel, by_token, by_row, out, plan, device, adds).run()


def _device(rows: Tensor, plan: RoutingPlan, *widths: int) -> Device | None:
    """The device of ``rows`` if the Blackwell kernels support their dtype and widths, and there are rows; else None.

    ValueError on a GPU, or with a Triton, that the Blackwell kernels do not run on, or where their self-test failed.
    """
    device = device_of(rows)
    if (why := serves.why_not(device, rows.device)) is not None:
        raise ValueError(f"kernels='blackwell': {why}; pass kernels=None or 'triton'")
    if rows.dtype not in DTYPES or plan.capacity == 0 or any(width % WIDTH_MULTIPLE for width in widths):
        return None
    return device
