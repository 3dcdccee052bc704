"""The Hopper backend: the warp-specialised GEMMs where they apply and are faster, the portable kernels elsewhere.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

16-bit operands: each call is decided by them. fp32, widths for which `is_faster` says no, and strides that TMA cannot
describe go to the portable kernel (`super()`), which computes the same.

FP8 operands: all GEMMs but narrow layers' weight gradients. x and do are quantised once per token (not per row) in each
operator that reads them, a in up_proj's epilogue, dh for up_proj_dgrad and again for up_proj_wgrad; weights are kept
(`formats.fp8.kept`). A weight gradient that TMA cannot describe, a buffer not aligned to 16 bytes, is left to the
portable kernel, which reads unquantised operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.config import quantizes_wgrad
from tilemoe.kernels.experts.formats import fp8
from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand
from tilemoe.kernels.experts.hopper import configs, host, serves
from tilemoe.kernels.experts.hopper.configs import FP8_TILE, TILES, is_faster, tile_of
from tilemoe.kernels.experts.triton.backend import TritonBackend, aligned_rows, has_aligned_rows, score_grad
from tilemoe.kernels.experts.triton.configs import WIDTH_MULTIPLE, Kernel, tile_rows
from tilemoe.kernels.experts.triton.descriptors import can_describe, can_describe_rows
from tilemoe.kernels.experts.triton.host import split_parts
from tilemoe.kernels.experts.triton.quantize import block_weight, quantized_blocks, quantized_rows, row_weight
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.kernels.experts.triton.transpose import wgrad_operands
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of

DTYPES = (torch.bfloat16, torch.float16)


class HopperBackend(TritonBackend):
    name = "hopper"
    batch_invariance = "yes on an H200, bf16 and fp16"
    nf4_batch_invariance = "yes on an H100, bf16"

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        why = super().why_unsupported(device, dtype, widths) or serves.why_unsupported(device)
        if why is not None or not self._is_fp8:
            return why
        return fp8.why_not(dtype, *widths) or _why_not_dtype(dtype)

    def rows_operand(self, rows: Tensor) -> GemmOperand:
        return quantized_rows(rows.contiguous()) if self._is_fp8 else rows

    def weight_operand(self, weight: Tensor, contracted: int) -> WeightOperand:
        if not self._is_fp8:
            return weight
        return block_weight(weight) if contracted == 2 else row_weight(weight, 1)

    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows: GemmOperand = do
        weight: GemmOperand = w2
        device: Device | None
        if self._is_fp8 and plan.capacity:
            device, do, h, tile_m = _fp8_device(do), aligned_rows(do), h.contiguous(), FP8_TILE.block_m
            rows, weight = quantized_rows(do), row_weight(w2, 1)
        else:
            device, tile_m = (
                _device("down_proj_dgrad_dact", do, plan, *w2.shape[1:]),
                TILES["down_proj_dgrad_dact"].block_m,
            )
            if device is None or not (
                has_aligned_rows(do) and describable_weight(w2, device) and can_describe_rows(device, h)
            ):
                return super().down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
        tiles = listed_tiles(plan, tile_m)
        launch, dh, a_scaled, partial = host.dgrad_dact_launch(rows, weight, h, s, plan, tiles, spec, device)
        launch.run()
        return dh, score_grad(partial, do, b2, s, plan, tiles, tile_m), a_scaled

    @property
    def _is_fp8(self) -> bool:
        return self.precision == "fp8"

    def _small_m(self, plan: RoutingPlan) -> int | None:
        return None if self._is_fp8 else super()._small_m(plan)

    def _sums_beside_grad(self, x: Tensor, dh: Tensor) -> bool:
        # What a GEMM with FP8 operands reads of dh is rounded, db1 is not.
        is_rounded = self._is_fp8 and quantizes_wgrad(x.shape[1], dh.shape[1])
        return super()._sums_beside_grad(x, dh) and not is_rounded

    def _up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
    ) -> tuple[GemmOperand, Tensor]:
        rows: GemmOperand = x
        weight: GemmOperand = w1
        device: Device | None
        if self._is_fp8 and plan.capacity:
            device, tile_m = _fp8_device(x), FP8_TILE.block_m
            rows, weight = quantized_rows(aligned_rows(x)), row_weight(w1, 2)
        else:
            d, n = x.shape[1], w1.shape[1] // spec.width_factor
            following = _device("down_proj", x, plan, n, d)
            if following is not None:  # one launch lists the tiles of both projections, whichever kernels they take
                listed_tiles(plan, tile_rows(x.element_size(), following), tile_of("down_proj", n).block_m)
            device, tile_m = _device("up_proj_act", x, plan, d, n), TILES["up_proj_act"].block_m
            parts = split_parts(w1, spec).transpose(2, 3)
            if device is None or not (has_aligned_rows(x) and describable_weight(parts, device)):
                return super()._up_proj_act(x, w1, b1, plan, spec, keep_h)
        tiles = listed_tiles(plan, tile_m)
        launch, a, h = host.up_proj_act_launch(rows, weight, _aligned_bias(b1), plan, tiles, spec, keep_h, device)
        launch.run()
        return a, h

    def _rows(
        self, kernel: Kernel, rows: GemmOperand, weight: WeightOperand, bias: Tensor | None, plan: RoutingPlan
    ) -> Tensor:
        device: Device | None
        if self._is_fp8:
            rows, weight = _quantized(kernel, rows, weight)
            assert rows.block[1] == weight.block[0], "as many scales along the contraction"
            if plan.capacity == 0:
                return weight.scale.new_empty(0, weight.data.shape[2], dtype=weight.dtype)
            device = device_of(weight.data)
        elif isinstance(weight, Tensor) and isinstance(rows, Tensor):
            device = _device(kernel, rows, plan, *weight.shape[1:])
            if device is None or not (can_describe_rows(device, rows) and describable_weight(weight, device)):
                return super()._rows(kernel, rows, weight, bias, plan)
        else:
            return super()._rows(kernel, rows, weight, bias, plan)
        tiles = listed_tiles(plan, host.rows_tile(kernel, weight).block_m)
        launch, out = host.rows_launch(kernel, rows, weight, _aligned_bias(bias), plan, tiles, device)
        launch.run()
        return out

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
        widths = by_token.shape[1], by_row.shape[1]
        if self._is_fp8 and plan.capacity and quantizes_wgrad(*widths) and describable_weight(out, device_of(out)):
            assert sums is None, "`_sums_beside_grad` says that none are made"
            for operands in wgrad_operands(aligned_rows(by_token), by_row.contiguous(), plan):
                host.fp8_wgrad_launch(operands, out, plan, device_of(out), adds).run()
            return
        device = _device(kernel, by_row, plan, *widths)
        if device is None or not (
            has_aligned_rows(by_token) and can_describe_rows(device, by_row) and describable_weight(out, device)
        ):
            super()._weight_grad(kernel, by_token, by_row, out, plan, adds, sums)
        else:
            host.wgrad_launch(kernel, by_token, by_row, out, plan, device, adds, sums).run()


def _device(kernel: Kernel, rows: Tensor, plan: RoutingPlan, width_in: int, width_out: int) -> Device | None:
    """The device of ``rows`` if the Hopper kernel supports their dtype and widths, is faster and has rows; else None.

    ValueError on a GPU, or with a Triton, that the Hopper kernels do not run on.
    """
    device = device_of(rows)
    why = configs.why_unsupported(device, triton.__version__)
    if why is not None:
        raise ValueError(f"kernels='hopper': {why}; pass kernels=None or 'triton'")
    if rows.dtype not in DTYPES or plan.capacity == 0 or width_in % WIDTH_MULTIPLE or width_out % WIDTH_MULTIPLE:
        return None
    return device if is_faster(kernel, width_in, width_out) else None


def _quantized(kernel: Kernel, rows: GemmOperand, weight: WeightOperand) -> tuple[Operand, Operand]:
    """Rows (R_max, p) and weight (E, p, q) of down_proj and up_proj_dgrad, contiguous along p."""
    assert isinstance(weight, Tensor | Operand), "weights in NF4 are for precision bf16"
    if kernel == "down_proj":
        rows = rows if isinstance(rows, Operand) else quantized_blocks(rows.contiguous(), fp8.BLOCK)
        return rows, block_weight(weight.transpose(1, 2)).transpose(1, 2)
    rows = rows if isinstance(rows, Operand) else quantized_rows(rows.contiguous())
    return rows, row_weight(weight, 1)


def _fp8_device(rows: Tensor) -> Device:
    """The device of ``rows``. ValueError if the FP8 kernels do not support the device or the dtype."""
    device = device_of(rows)
    why = configs.why_unsupported(device, triton.__version__) or _why_not_dtype(rows.dtype)
    if why is not None:
        raise ValueError(f"kernels='hopper_fp8': {why}; pass kernels=None")
    return device


def _why_not_dtype(dtype: torch.dtype) -> str | None:
    return None if dtype in DTYPES else f"the FP8 kernels for Hopper give bfloat16 and float16, not {dtype}"


def _aligned_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else aligned_rows(bias)


def describable_weight(weight: Tensor, device: Device) -> bool:
    """Whether a TMA descriptor can be made of a weight (E, ..., in, out), with in or out contiguous."""
    return can_describe(weight, device) or can_describe(weight.transpose(-2, -1), device)
