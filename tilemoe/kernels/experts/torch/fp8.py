"""FP8 emulated in plain PyTorch: operands of F1, F2, B1 and B3 are quantised, dequantised, and multiplied in fp32.

It computes what the FP8 kernels do, but for the order of sums, and is no faster than the layer's own dtype.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

F1, B1 and B3 read operands with one scale for each row of x, do and dh, and one for each output column of the weight;
F2 with one for each 1 x 128 of a and each 128 x 128 of w2 (`kernels.experts.quantize`). Weight gradients (B2, B4) and
bias gradients read x, a, do and dh unquantised, and h is kept unquantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.base import GemmOperand
from tilemoe.kernels.experts.quantize import ROWS, WEIGHTS, quantize, why_not_quantized
from tilemoe.kernels.experts.torch.backend import TorchBackend, rows_dot_bias, rows_to_pairs
from tilemoe.plan import RoutingPlan


class TorchFp8Backend(TorchBackend):
    name = "torch_fp8"
    precision = "fp8"

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        return super().why_unsupported(device, dtype, widths) or why_not_quantized(dtype, *widths)

    def up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor]:
        """F1: (a (R_max, n), h (R_max, w))."""
        a, h = super().up_proj_act(_rows(x), _weight(w1, 2), _fp32(b1), plan, spec)
        return a.to(x.dtype), h.to(x.dtype)

    def down_proj(self, a: Tensor, w2: GemmOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """F2: y (R_max, d), or a slice of d if w2 and b2 are one; its width is a multiple of 128."""
        return super().down_proj(_dense(a, ROWS), _dense(w2, WEIGHTS), _fp32(b2), plan).to(a.dtype)

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
        """B1: (dh (R_max, w), ds like s, a_scaled (R_max, n)); b2's term of ds reads do unquantised."""
        dh, ds, a_scaled = super().down_proj_dgrad_dact(_rows(do), _weight(w2, 1), None, h, s, plan, spec)
        if b2 is not None:
            ds += rows_to_pairs(rows_dot_bias(do, b2, plan).to(s.dtype), s, plan)
        return dh, ds, a_scaled.to(h.dtype)

    def up_proj_dgrad(self, dh: Tensor, w1: GemmOperand, plan: RoutingPlan) -> Tensor:
        """B3: dx_rows (R_max, d), or a slice of d if w1 is one; its width is a multiple of 128."""
        return super().up_proj_dgrad(_rows(dh), _weight(w1, 1), plan).to(dh.dtype)


def _rows(rows: Tensor) -> Tensor:
    """Rows (R, p) after a round trip through FP8 with a scale for each row."""
    return _dense(rows, (1, rows.shape[1]))


def _weight(weight: Tensor, contracted: int) -> Tensor:
    """A weight (E, p, q) after a round trip through FP8 with a scale for each line along dimension ``contracted``."""
    return _dense(weight, (1, weight.shape[2]) if contracted == 2 else (weight.shape[1], 1))


def _dense(values: Tensor, block: tuple[int, int]) -> Tensor:
    """``values`` after a round trip through FP8, in fp32."""
    return quantize(values, block).dense(torch.float32)


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
