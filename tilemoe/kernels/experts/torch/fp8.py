"""The eight kernels with FP8 operands in plain PyTorch: quantised, multiplied back, and multiplied in fp32.

What it computes is what FP8 kernels compute, but for the order of sums; it is no faster than the layer's own dtype.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

F1, F2, B1 and B3 read x, a, do and dh in blocks of 1 x 128 and the weights of 128 x 128 (`kernels.experts.quantize`).
The weight gradients B2 and B4 read x, a, do and dh as they are, as do the bias gradients; h is kept as it is, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.base import Given
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
        a, h = super().up_proj_act(_rows(x), _weight(w1), _fp32(b1), plan, spec)
        return a.to(x.dtype), h.to(x.dtype)

    def down_proj(self, a: Tensor, w2: Given, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """F2: y (R_max, d), or the columns of d that w2 and b2 have: a multiple of 128 of them."""
        return super().down_proj(_rows(a), _weight(w2), _fp32(b2), plan).to(a.dtype)

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
        """B1: (dh (R_max, w), ds like s, a_scaled (R_max, n)); b2's term of ds is of do as it is."""
        dh, ds, a_scaled = super().down_proj_dgrad_dact(_rows(do), _weight(w2), None, h, s, plan, spec)
        if b2 is not None:
            ds += rows_to_pairs(rows_dot_bias(do, b2, plan).to(s.dtype), s, plan)
        return dh, ds, a_scaled.to(h.dtype)

    def up_proj_dgrad(self, dh: Tensor, w1: Given, plan: RoutingPlan) -> Tensor:
        """B3: dx_rows (R_max, d), or the columns of d that w1 has: a multiple of 128 of them."""
        return super().up_proj_dgrad(_rows(dh), _weight(w1), plan).to(dh.dtype)


def _rows(t: Tensor) -> Tensor:
    """What FP8 keeps of rows, (., p) in fp32, which holds it exactly."""
    return quantize(t, ROWS).dense(torch.float32)


def _weight(t: Tensor) -> Tensor:
    """What FP8 keeps of a weight (E, p, q), in fp32."""
    return quantize(t, WEIGHTS).dense(torch.float32)


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
