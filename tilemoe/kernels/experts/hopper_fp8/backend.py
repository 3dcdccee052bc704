"""FP8 on Hopper: up_proj, down_proj, down_proj_dgrad, up_proj_dgrad, and down_proj_wgrad and up_proj_wgrad of wide
layers, read e4m3 operands; the rest is the Hopper backend's.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

x and do are quantised once per token (not per row) in each operator that reads them, a in up_proj's epilogue, dh for
up_proj_dgrad and again for up_proj_wgrad; weights are quantised and cached by `triton.quantize`. A weight gradient
that TMA cannot describe, a buffer not aligned to 16 bytes, is left to the portable kernel, which reads unquantised
operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.config import quantizes_wgrad
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.fp8 import BLOCK, why_not_quantized
from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand
from tilemoe.kernels.experts.hopper import configs, host
from tilemoe.kernels.experts.hopper.backend import DTYPES, HopperBackend, describable_weight
from tilemoe.kernels.experts.triton.backend import aligned_rows, score_grad
from tilemoe.kernels.experts.triton.configs import Kernel
from tilemoe.kernels.experts.triton.quantize import block_weight, quantized_blocks, quantized_rows, row_weight
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.kernels.experts.triton.transpose import wgrad_operands
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of


class HopperFp8Backend(HopperBackend):
    name = "hopper_fp8"
    batch_invariance = "yes on an H100, bf16"
    precision = "fp8"

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        why = super().why_unsupported(device, dtype, widths) or why_not_quantized(dtype, *widths)
        return why or _why_not_dtype(dtype)

    def rows_operand(self, rows: Tensor) -> Operand:
        return quantized_rows(rows.contiguous())

    def weight_operand(self, weight: Tensor, contracted: int) -> Operand:
        return block_weight(weight) if contracted == 2 else row_weight(weight, 1)

    def up_proj_act_inference(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> GemmOperand:
        return self._up_proj_act(x, w1, b1, plan, spec, keep_h=False)[0]

    def down_proj(self, a: GemmOperand, w2: GemmOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        rows = a if isinstance(a, Operand) else quantized_blocks(a.contiguous(), BLOCK)
        return self._rows_times("down_proj", rows, block_weight(w2).transposed(), b2, plan)

    def down_proj_inference(self, a: GemmOperand, w2: GemmOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        return self.down_proj(a, w2, b2, plan)

    def up_proj_dgrad(self, dh: GemmOperand, w1: GemmOperand, plan: RoutingPlan) -> Tensor:
        rows = dh if isinstance(dh, Operand) else quantized_rows(dh.contiguous())
        return self._rows_times("up_proj_dgrad", rows, row_weight(w1, 1), None, plan)

    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        if plan.capacity == 0:
            return super().down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
        device = _device(do)
        tiles = listed_tiles(plan, configs.FP8_TILE.block_m)
        do, weight = aligned_rows(do), row_weight(w2, 1)
        launch, dh, a_scaled, partial = host.dgrad_dact_launch(
            quantized_rows(do), weight, h.contiguous(), s, plan, tiles, spec, device
        )
        launch.run()
        return dh, score_grad(partial, do, b2, s, plan, tiles, configs.FP8_TILE.block_m), a_scaled

    def up_proj_wgrad_bias_grad(
        self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if quantizes_wgrad(x.shape[1], dh.shape[1]):  # what up_proj_wgrad reads of dh is rounded, db1 is not
            return Backend.up_proj_wgrad_bias_grad(self, x, dh, plan, column_major, out)
        return super().up_proj_wgrad_bias_grad(x, dh, plan, column_major, out)

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
        device, is_wide = device_of(out), quantizes_wgrad(by_token.shape[1], by_row.shape[1])
        if plan.capacity == 0 or not (is_wide and describable_weight(out, device)):
            super()._weight_grad(kernel, by_token, by_row, out, plan, adds, sums)
            return
        assert sums is None, "`up_proj_wgrad_bias_grad` asks for none"
        for operands in wgrad_operands(aligned_rows(by_token), by_row.contiguous(), plan):
            host.fp8_wgrad_launch(operands, out, plan, device, adds).run()

    def _up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
    ) -> tuple[GemmOperand, Tensor]:
        if plan.capacity == 0:
            return super()._up_proj_act(x, w1, b1, plan, spec, keep_h)
        device = _device(x)
        tiles = listed_tiles(plan, configs.FP8_TILE.block_m)
        operands = (quantized_rows(aligned_rows(x)), row_weight(w1, 2))
        bias = None if b1 is None else aligned_rows(b1)
        launch, a, h = host.up_proj_act_launch(*operands, bias, plan, tiles, spec, keep_h, device)
        launch.run()
        return a, h

    def _rows_times(
        self, kernel: Kernel, rows: Operand, weight: Operand, bias: Tensor | None, plan: RoutingPlan
    ) -> Tensor:
        """down_proj and up_proj_dgrad: out (R_max, q), rows (R_max, p) times weight (E, p, q), contiguous along p."""
        if plan.capacity == 0:
            return weight.scale.new_empty(0, weight.data.shape[2], dtype=weight.dtype)
        tiles, device = listed_tiles(plan, host.rows_tile(kernel, weight).block_m), device_of(weight.data)
        assert rows.block[1] == weight.block[0], "as many scales along the contraction"
        bias = None if bias is None else aligned_rows(bias)
        launch, out = host.rows_launch(kernel, rows, weight, bias, plan, tiles, device)
        launch.run()
        return out


def _device(rows: Tensor) -> Device:
    """The device of ``rows``. ValueError if these kernels do not support the device or the dtype."""
    device = device_of(rows)
    why = configs.why_unsupported(device, triton.__version__) or _why_not_dtype(rows.dtype)
    if why is not None:
        raise ValueError(f"kernels='hopper_fp8': {why}; pass kernels=None")
    return device


def _why_not_dtype(dtype: torch.dtype) -> str | None:
    return None if dtype in DTYPES else f"the FP8 kernels for Hopper give bfloat16 and float16, not {dtype}"
