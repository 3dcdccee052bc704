"""FP8 in Triton: F1, F2, B1, B3, and B2 and B4 of wide layers, read e4m3 operands; the rest is the Triton backend's.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

x and do are quantised once per token (not per row) in each operator that reads them, a in every call of F2 (one for
each slice of d), dh for B3 and again for B4; weights are quantised and cached by `operands`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.config import quantizes_wgrad
from tilemoe.kernels.experts.base import Backend, GemmOperand, Operand
from tilemoe.kernels.experts.quantize import BLOCK, why_not_quantized
from tilemoe.kernels.experts.triton import host
from tilemoe.kernels.experts.triton.backend import TritonBackend, aligned_rows, score_grad
from tilemoe.kernels.experts.triton.configs import Kernel
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.kernels.experts.triton_fp8 import gemm
from tilemoe.kernels.experts.triton_fp8.operands import (
    block_weight,
    quantized_blocks,
    quantized_rows,
    row_weight,
    scales_of,
    why_no_e4m3,
)
from tilemoe.kernels.experts.triton_fp8.wgrad import WgradOperands, wgrad_launch, wgrad_operands
from tilemoe.kernels.launching import launch_of
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of
from tilemoe.runtime.launch import Launch, persistent_grid

_TILE = (128, 128)  # BM, BN of F2 and B3
_ACT_TILE = (128, 64)  # BM, BN of F1, where gate and up have BN columns each, and of B1
_INTERPRETED_ROWS = 16  # BM in Triton's interpreter


class WideWeightGrads(TritonBackend):
    """Weight gradients with FP8 operands where `quantizes_wgrad`, elsewhere those of the next class."""

    def up_proj_wgrad_bias_grad(
        self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if quantizes_wgrad(x.shape[1], dh.shape[1]):  # what B4 reads of dh is rounded, db1 is not
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
        if plan.capacity == 0 or not quantizes_wgrad(by_token.shape[1], by_row.shape[1]):
            super()._weight_grad(kernel, by_token, by_row, out, plan, adds, sums)
            return
        assert sums is None, "`up_proj_wgrad_bias_grad` asks for none"
        for operands in wgrad_operands(aligned_rows(by_token), by_row.contiguous(), plan):
            self._wgrad_launch(operands, out, plan, adds).run()

    def _wgrad_launch(self, operands: WgradOperands, out: Tensor, plan: RoutingPlan, adds: bool) -> Launch:
        """The GEMM of one slice, as `wgrad_launch`."""
        return wgrad_launch(operands, out, plan, device_of(out), adds)


class TritonFp8Backend(WideWeightGrads):
    name = "triton_fp8"
    batch_invariance = "yes, in Triton's interpreter and on an H100"
    precision = "fp8"

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        return (
            super().why_unsupported(device, dtype, widths) or why_not_quantized(dtype, *widths) or why_no_e4m3(device)
        )

    def rows_operand(self, rows: Tensor) -> Operand:
        return quantized_rows(rows.contiguous())

    def weight_operand(self, weight: Tensor, contracted: int) -> Operand:
        return block_weight(weight) if contracted == 2 else row_weight(weight, 1)

    def up_proj_act_inference(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> GemmOperand:
        return self._up_proj_act(x, w1, b1, plan, spec, keep_h=False)[0]

    def down_proj_inference(self, a: GemmOperand, w2: GemmOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        return self.down_proj(a, w2, b2, plan)

    def down_proj(self, a: GemmOperand, w2: GemmOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        rows = a if isinstance(a, Operand) else quantized_blocks(a, BLOCK)
        return _rows_times(rows, block_weight(w2), b2, plan)

    def up_proj_dgrad(self, dh: GemmOperand, w1: GemmOperand, plan: RoutingPlan) -> Tensor:
        return _rows_times(quantized_rows(dh), row_weight(w1, 1).transposed(), None, plan)

    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        if plan.capacity == 0:
            return super().down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
        d, n = w2.shape[1:]
        device = device_of(do)
        do, h, (tile_m, tile_n) = aligned_rows(do), h.contiguous(), _tile(_ACT_TILE, device)
        tiles = listed_tiles(plan, tile_m)
        dh, a_scaled, partial = host.dact_outputs(h, s, plan, n, n // tile_n)
        operands, strides = _operands(quantized_rows(do), row_weight(w2, 1).transposed())
        indices = (plan.token_of_row, plan.pair_of_row, *tiles)
        sizes = (plan.capacity, d, n, *strides[:4], spec.limit, spec.alpha)
        constants = {**host.activation_constants(spec, do.dtype), "BLOCK_M": tile_m, "BLOCK_N": tile_n}
        _launch(
            gemm.dgrad_dact_kernel,
            (*operands, h, s, dh, a_scaled, partial, *indices, *sizes),
            constants,
            tiles.capacity * (n // tile_n),
            device,
        )
        return dh, score_grad(partial, do, b2, s, plan, tiles, tile_m), a_scaled

    def _up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
    ) -> tuple[GemmOperand, Tensor]:
        if plan.capacity == 0:
            return super()._up_proj_act(x, w1, b1, plan, spec, keep_h)
        d, n = x.shape[1], w1.shape[1] // spec.width_factor
        device = device_of(x)
        tile_m, tile_n = _tile(_ACT_TILE, device)
        tiles = listed_tiles(plan, tile_m)
        a, h = host.act_outputs(x, plan, spec, n, keep_h)
        operands, strides = _operands(quantized_rows(aligned_rows(x)), row_weight(w1, 2))
        bias_strides = (0, 0) if b1 is None else b1.stride()
        sizes = (d, n, *strides[:4], *bias_strides, spec.limit, spec.alpha)
        constants = {
            **host.activation_constants(spec, x.dtype),
            "HAS_BIAS": b1 is not None,
            "KEEP_H": keep_h,
            "BLOCK_M": tile_m,
            "BLOCK_N": tile_n,
        }
        _launch(
            gemm.up_proj_act_kernel,
            (*operands, b1, a, h if keep_h else None, plan.token_of_row, *tiles, *sizes),
            constants,
            tiles.capacity * (n // tile_n),
            device,
        )
        return a, h


def _rows_times(rows: Operand, weight: Operand, bias: Tensor | None, plan: RoutingPlan) -> Tensor:
    """F2 and B3: out (R_max, width_out) = rows (R_max, width_in) times weight (E, width_out, width_in) transposed."""
    width_out, width_in = weight.data.shape[1:]
    out = weight.scale.new_empty(plan.capacity, width_out, dtype=weight.dtype)
    if plan.capacity == 0:
        return out
    assert rows.block[1] == weight.block[1], "as many scales along the contraction"
    device = device_of(out)
    tile_m, tile_n = _tile(_TILE, device)
    tiles = listed_tiles(plan, tile_m)
    operands, strides = _operands(rows, weight)
    bias_strides = (0, 0) if bias is None else bias.stride()
    args = (*operands, bias, out, *tiles, width_in, width_out, *strides, *bias_strides)
    constants = {
        "SCALES": scales_of(weight),
        "HAS_BIAS": bias is not None,
        "BLOCK_M": tile_m,
        "BLOCK_N": tile_n,
    }
    _launch(gemm.rows_kernel, args, constants, tiles.capacity * (width_out // tile_n), device)
    return out


def _launch(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], tiles: int, device: Device) -> None:
    launch_of(kernel, persistent_grid(device, tiles), args, constants, num_warps=8, num_stages=3).run()


def _operands(rows: Operand, weight: Operand) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """(data and scales, the first arguments of each GEMM; strides of the weight's data and scales)."""
    args = (rows.data, rows.scale, weight.data, weight.scale)
    return args, (*weight.data.stride()[:2], *weight.scale.stride())


def _tile(tile: tuple[int, int], device: Device) -> tuple[int, int]:
    return (_INTERPRETED_ROWS if device.interpreted else tile[0]), tile[1]
