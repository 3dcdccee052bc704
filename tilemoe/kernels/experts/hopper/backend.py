"""The Hopper backend: the warp-specialised GEMMs where they apply and are faster, the portable kernels elsewhere.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

16-bit operands: each call looks at its operands. fp32, widths for which `why_slower` has a reason, and strides that TMA
cannot describe go to the portable kernel (`super()`), which computes the same.

FP8 operands: all GEMMs except narrow layers' weight gradients. x and do are quantised once per token (not per row) in
each operator that reads them, a in up_proj's epilogue, dh for up_proj_dgrad and again for up_proj_wgrad. Quantised
weights are cached (`formats.fp8.kept`). If TMA cannot describe a weight gradient, because its buffer is not aligned to
16 bytes, the GEMM reads unquantised operands.

A subclass for another architecture sets `HopperBackend._host` to the module with its launches of 16-bit operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType, ModuleType
from typing import ClassVar

import torch
import triton
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand
from tilemoe.kernels.experts.hopper import configs, host
from tilemoe.kernels.experts.triton.backend import TritonBackend, score_grad
from tilemoe.kernels.experts.triton.configs import WIDTH_MULTIPLE, Kernel, tile_rows
from tilemoe.kernels.experts.triton.descriptors import aligned_rows, can_describe, can_describe_rows, has_aligned_rows
from tilemoe.kernels.experts.triton.host import WeightGrad, split_parts
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of, gpu_of

DTYPES = (torch.bfloat16, torch.float16)


class HopperBackend(TritonBackend):
    name = "hopper"
    batch_invariance = "yes on an H200, bf16 and fp16"
    packed = MappingProxyType({"nf4": "yes on an H100, bf16", "mxfp4": "yes on an H200, bf16"})
    _host: ClassVar[ModuleType] = host  # the module with the launches

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        why = super().why_unsupported(device, dtype, widths) or self._why_not_device(device, gpu_of(device))
        if why is not None or self.format is None:
            return why
        return self.format.why_not(dtype, *widths) or _why_not_dtype(dtype)

    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows: GemmOperand = do
        weight: GemmOperand = w2
        device: Device | None
        form = "dense"
        if self.format is not None and plan.capacity:
            device, do, h = self._quantized_device(do), aligned_rows(do), h.contiguous()
            rows = self.format.rows_for("down_proj_dgrad_dact", do)
            weight, form = self.format.weight_for("down_proj_dgrad_dact", w2), "fp8"
        else:
            device = self._device("down_proj_dgrad_dact", do, plan, *w2.shape[1:])
            if device is None or not (
                has_aligned_rows(do) and describable_weight(w2, device) and can_describe_rows(device, h)
            ):
                return super().down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
        launch, dh, a_scaled, partial = self._host.dgrad_dact_launch(rows, weight, h, s, plan, spec, device)
        launch.run()
        tile_m = self._host.tile_of("down_proj_dgrad_dact", w2.shape[1], form).block_m
        return dh, score_grad(partial, do, b2, s, plan, tile_m), a_scaled

    def _up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
    ) -> tuple[GemmOperand, Tensor]:
        rows: GemmOperand = x
        weight: GemmOperand = w1
        device: Device | None
        if self.format is not None and plan.capacity:
            device = self._quantized_device(x)
            rows, weight = self.format.rows_for("up_proj_act", x), self.format.weight_for("up_proj_act", w1)
        else:
            d, n = x.shape[1], w1.shape[1] // spec.width_factor
            following = self._device("down_proj", x, plan, n, d)
            if following is not None:  # one launch lists the tiles of both projections, whichever kernels they use
                listed_tiles(plan, tile_rows(x.element_size(), following), self._host.tile_of("down_proj", n).block_m)
            device = self._device("up_proj_act", x, plan, d, n)
            parts = split_parts(w1, spec).transpose(2, 3)
            if device is None or not (has_aligned_rows(x) and describable_weight(parts, device)):
                return super()._up_proj_act(x, w1, b1, plan, spec, keep_h)
        bias = None if b1 is None else aligned_rows(b1)
        launch, a, h = self._host.up_proj_act_launch(rows, weight, bias, plan, spec, keep_h, device)
        launch.run()
        return a, h

    def _rows(
        self, kernel: Kernel, rows: GemmOperand, weight: WeightOperand, bias: Tensor | None, plan: RoutingPlan
    ) -> Tensor:
        device: Device | None
        if isinstance(rows, Operand) and isinstance(weight, Operand):
            assert rows.block[1] == weight.block[0], "as many scales along the contraction"
            if plan.capacity == 0:
                return weight.scale.new_empty(0, weight.data.shape[2], dtype=weight.dtype)
            device = device_of(weight.data)
        elif isinstance(weight, Tensor) and isinstance(rows, Tensor):
            device = self._device(kernel, rows, plan, *weight.shape[1:])
            if device is None or not (can_describe_rows(device, rows) and describable_weight(weight, device)):
                return super()._rows(kernel, rows, weight, bias, plan)
        else:
            return super()._rows(kernel, rows, weight, bias, plan)
        bias = None if bias is None else aligned_rows(bias)
        launch, out = self._host.rows_launch(kernel, rows, weight, bias, plan, device)
        launch.run()
        return out

    def _weight_grad(self, grad: WeightGrad, plan: RoutingPlan) -> None:
        kernel, by_token, by_row, out, adds = grad
        widths = by_token.shape[1], by_row.shape[1]
        is_read = self.format is not None and self.format.quantizes_wgrad(*widths)
        if self.format is not None and is_read and plan.capacity and describable_weight(out, device_of(out)):
            for operands in self.format.wgrad_operands(by_token, by_row, plan):
                host.fp8_wgrad_launch(operands, out, plan, device_of(out), adds).run()
            return
        device = self._device(kernel, by_row, plan, *widths)
        if device is None or not (
            has_aligned_rows(by_token) and can_describe_rows(device, by_row) and describable_weight(out, device)
        ):
            super()._weight_grad(grad, plan)
        else:
            self._host.wgrad_launch(grad, plan, device).run()

    def _device(self, kernel: Kernel, rows: Tensor, plan: RoutingPlan, width_in: int, width_out: int) -> Device | None:
        """The device of ``rows`` if this backend's kernel supports their dtype and widths and is not slower than the
        portable one, and there are rows; else None.

        ValueError: these kernels do not run on this GPU, or with this release of Triton.
        """
        device = self._supported_device(rows)
        if rows.dtype not in DTYPES or plan.capacity == 0 or width_in % WIDTH_MULTIPLE or width_out % WIDTH_MULTIPLE:
            return None
        return None if self._is_slower(kernel, width_in, width_out) else device

    def _quantized_device(self, rows: Tensor) -> Device:
        """The device of ``rows``. ValueError: the kernels with quantised operands do not support it or the dtype."""
        return self._supported_device(rows, _why_not_dtype(rows.dtype))

    def _supported_device(self, rows: Tensor, why_not_rows: str | None = None) -> Device:
        device = device_of(rows)
        if (why := self._why_not_device(rows.device, device) or why_not_rows) is not None:
            instead = "None or 'triton'" if self.format is None else "None"
            raise ValueError(f"kernels={self.name!r}: {why}; pass kernels={instead}")
        return device

    def _why_not_device(self, device: torch.device, found: Device) -> str | None:
        """Why these kernels do not run on ``device``, described by ``found``; None if they do."""
        return configs.why_unsupported(found, triton.__version__)

    def _is_slower(self, kernel: Kernel, width_in: int, width_out: int) -> bool:
        return configs.why_slower(kernel, width_in, width_out) is not None


def _why_not_dtype(dtype: torch.dtype) -> str | None:
    return None if dtype in DTYPES else f"the FP8 kernels for Hopper give bfloat16 and float16, not {dtype}"


def describable_weight(weight: Tensor, device: Device) -> bool:
    """Whether TMA can describe a weight (E, ..., in, out): in or out is contiguous, and the strides are aligned."""
    return can_describe(weight, device) or can_describe(weight.transpose(-2, -1), device)
