"""FP8 emulated in plain PyTorch: operands of GEMMs are quantised, dequantised, and multiplied in fp32.

It computes what the FP8 kernels do, but for the order of sums, and is no faster than the layer's own dtype.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

up_proj, down_proj_dgrad and up_proj_dgrad read operands with one scale for each row of x, do and dh, and one for each
output column of the weight; down_proj with one for each 1 x 128 of a and each 128 x 128 of w2
(`kernels.experts.quantize`). Of wide layers down_proj_wgrad and up_proj_wgrad read the quantised x and do, and dh and
a_scaled with one scale per expert; other weight gradients and the bias gradients read x, a, do and dh unquantised, and
h is kept unquantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.config import quantizes_wgrad
from tilemoe.kernels.experts.formats.fp8 import LARGEST, ROWS, SMALLEST_SCALE, WEIGHTS, quantize, why_not_quantized
from tilemoe.kernels.experts.formats.operand import GemmOperand
from tilemoe.kernels.experts.torch.backend import TorchBackend, rows_dot_bias, rows_to_pairs
from tilemoe.kernels.experts.torch.grouped import expert_of_row
from tilemoe.plan import RoutingPlan


class TorchFp8Backend(TorchBackend):
    name = "torch_fp8"
    precision = "fp8"

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        return super().why_unsupported(device, dtype, widths) or why_not_quantized(dtype, *widths)

    def up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor]:
        """up_proj: (a (R_max, n), h (R_max, w))."""
        a, h = super().up_proj_act(_rows(x), _weight(w1, 2), _fp32(b1), plan, spec)
        return a.to(x.dtype), h.to(x.dtype)

    def down_proj(self, a: Tensor, w2: GemmOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """down_proj: y (R_max, d), or a slice of d if w2 and b2 are one; its width is a multiple of 128."""
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
        """down_proj_dgrad: (dh (R_max, w), ds like s, a_scaled (R_max, n)); b2's term of ds reads do unquantised."""
        dh, ds, a_scaled = super().down_proj_dgrad_dact(_rows(do), _weight(w2, 1), None, h, s, plan, spec)
        if b2 is not None:
            ds += rows_to_pairs(rows_dot_bias(do, b2, plan).to(s.dtype), s, plan)
        return dh, ds, a_scaled.to(h.dtype)

    def up_proj_dgrad(self, dh: Tensor, w1: GemmOperand, plan: RoutingPlan) -> Tensor:
        """up_proj_dgrad: dx_rows (R_max, d), or a slice of d if w1 is one; its width is a multiple of 128."""
        return super().up_proj_dgrad(_rows(dh), _weight(w1, 1), plan).to(dh.dtype)

    def down_proj_wgrad(
        self, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """down_proj_wgrad: dw2 (E, d, n), or ``out``."""
        operands = _wgrad_operands(do, a_scaled, plan)
        dw2 = super().down_proj_wgrad(*operands, plan, column_major, out)
        return dw2 if out is not None else dw2.to(do.dtype)

    def up_proj_wgrad(
        self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """up_proj_wgrad: dw1 (E, w, d), or ``out``."""
        operands = _wgrad_operands(x, dh, plan)
        dw1 = super().up_proj_wgrad(*operands, plan, column_major, out)
        return dw1 if out is not None else dw1.to(x.dtype)


def _rows(rows: Tensor) -> Tensor:
    """Rows (R, p) after a round trip through FP8 with a scale for each row."""
    return _dense(rows, (1, rows.shape[1]))


def _weight(weight: Tensor, contracted: int) -> Tensor:
    """A weight (E, p, q) after a round trip through FP8 with a scale for each line along dimension ``contracted``."""
    return _dense(weight, (1, weight.shape[2]) if contracted == 2 else (weight.shape[1], 1))


def _dense(values: Tensor, block: tuple[int, int]) -> Tensor:
    """``values`` after a round trip through FP8, in fp32."""
    return quantize(values, block).dense(torch.float32)


def _wgrad_operands(by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> tuple[Tensor, Tensor]:
    """(x or do (T, p), dh or a_scaled (R_max, q)) as down_proj_wgrad and up_proj_wgrad multiply them: unchanged, or
    after quantising, in fp32.

    A token's scale is not multiplied back into its row but into its rows of the other operand, which are quantised
    after that, with one scale for each expert.
    """
    if not quantizes_wgrad(by_token.shape[1], by_row.shape[1]):
        return by_token, by_row
    tokens = quantize(by_token, (1, by_token.shape[1]))
    rows = by_row.float() * tokens.scale.index_select(0, plan.token_of_row)
    rows[torch.arange(plan.capacity, device=rows.device) >= plan.row_start_of_expert[-1]] = 0  # of no expert
    expert = expert_of_row(plan).long()
    largest = rows.new_zeros(plan.num_experts).scatter_reduce_(0, expert, rows.abs().amax(1), "amax")
    scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE))[expert].unsqueeze(1)
    data = (rows * (1 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return tokens.data.float(), data.float() * scale


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
