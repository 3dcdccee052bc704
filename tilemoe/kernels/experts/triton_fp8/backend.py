"""FP8 in Triton: F1, F2, B1 and B3 with quantised operands, all else as the Triton backend has it.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated

A call quantises what its GEMM reads: x and do once for each token, weights and rows once for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.quantize import why_not_quantized
from tilemoe.kernels.experts.triton import host
from tilemoe.kernels.experts.triton.backend import TritonBackend, aligned_rows, score_grad
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.kernels.experts.triton_fp8 import gemm
from tilemoe.kernels.experts.triton_fp8.quantize import Rows, Weight, rows_launch, weight_launch
from tilemoe.kernels.launching import launch_of
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of, gpu
from tilemoe.runtime.launch import persistent_grid

_MIN_CAPABILITY = 89  # Ada's tensor cores are the first that multiply e4m3
_TILE = (128, 128)  # BM, BN of F2 and B3
_ACT_TILE = (128, 64)  # of F1, whose gate and up are BN columns each, and of B1
_INTERPRETED_ROWS = 16


class TritonFp8Backend(TritonBackend):
    name = "triton_fp8"
    precision = "fp8"

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        return super().why_unsupported(device, dtype, widths) or why_not_quantized(dtype, *widths) or _why_not(device)

    def up_proj_act_inference(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> Tensor:
        return self._up_proj_act(x, w1, b1, plan, spec, keep_h=False)[0]

    def down_proj_inference(self, a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        return self.down_proj(a, w2, b2, plan)

    def down_proj(self, a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        return _rows_times(a, _quantized_weight(w2)[0], b2, plan)

    def up_proj_dgrad(self, dh: Tensor, w1: Tensor, plan: RoutingPlan) -> Tensor:
        return _rows_times(dh, _quantized_weight(w1)[1], None, plan)

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
        operands, strides = _operands(_quantized_rows(do), _quantized_weight(w2)[1])
        indices = (plan.token_of_row, plan.pair_of_row, *tiles)
        sizes = (plan.capacity, d, n, *strides, spec.limit, spec.alpha)
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
    ) -> tuple[Tensor, Tensor]:
        if plan.capacity == 0:
            return super()._up_proj_act(x, w1, b1, plan, spec, keep_h)
        d, n = x.shape[1], w1.shape[1] // spec.width_factor
        device = device_of(x)
        tile_m, tile_n = _tile(_ACT_TILE, device)
        tiles = listed_tiles(plan, tile_m)
        a, h = host.act_outputs(x, plan, spec, n, keep_h)
        operands, strides = _operands(_quantized_rows(aligned_rows(x)), _quantized_weight(w1)[0])
        bias_strides = (0, 0) if b1 is None else b1.stride()
        sizes = (d, n, *strides, *bias_strides, spec.limit, spec.alpha)
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


def _rows_times(rows: Tensor, weight: Weight, bias: Tensor | None, plan: RoutingPlan) -> Tensor:
    """F2 and B3: (R_max, out) of rows (R_max, in) and a weight (E, out, in)."""
    width_out, width_in = weight.data.shape[1:]
    out = rows.new_empty(plan.capacity, width_out)
    if plan.capacity == 0:
        return out
    device = device_of(rows)
    tile_m, tile_n = _tile(_TILE, device)
    tiles = listed_tiles(plan, tile_m)
    operands, strides = _operands(_quantized_rows(rows.contiguous()), weight)
    bias_strides = (0, 0) if bias is None else bias.stride()
    args = (*operands, bias, out, *tiles, width_in, width_out, *strides, *bias_strides)
    constants = {"HAS_BIAS": bias is not None, "BLOCK_M": tile_m, "BLOCK_N": tile_n}
    _launch(gemm.rows_kernel, args, constants, tiles.capacity * (width_out // tile_n), device)
    return out


def _launch(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any], tiles: int, device: Device) -> None:
    launch_of(kernel, persistent_grid(device, tiles), args, constants, num_warps=8, num_stages=3).run()


def _operands(rows: Rows, weight: Weight) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The first arguments of a GEMM, and the strides of the weight's scales."""
    return (*rows, *weight), weight.scale.stride()


def _quantized_rows(values: Tensor) -> Rows:
    launch, rows = rows_launch(values)
    launch.run()
    return rows


def _quantized_weight(weight: Tensor) -> tuple[Weight, Weight]:
    """Of (E, p, q): to be contracted over q, and over p."""
    launch, data, turned = weight_launch(weight)
    launch.run()
    return data, turned


def _tile(tile: tuple[int, int], device: Device) -> tuple[int, int]:
    return (_INTERPRETED_ROWS if device.interpreted else tile[0]), tile[1]


def _why_not(device: torch.device) -> str | None:
    if device.type == "cuda" and gpu(device.index or 0).capability < _MIN_CAPABILITY:
        return f"e4m3 needs compute capability {_MIN_CAPABILITY / 10}"
    return None
