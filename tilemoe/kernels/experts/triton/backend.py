"""The Triton backend, for any GPU that Triton compiles for. `Backend` documents the methods, which launch kernels.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import empty_weight_grad
from tilemoe.kernels.experts.formats.fp8 import BLOCK
from tilemoe.kernels.experts.formats.nf4 import Nf4Weight
from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand
from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.triton import bias_grad, dact, gemm_packed, host
from tilemoe.kernels.experts.triton import small_m as small_m_kernels
from tilemoe.kernels.experts.triton.combine import combine
from tilemoe.kernels.experts.triton.configs import Kernel, small_m, tile_rows, why_unsupported
from tilemoe.kernels.experts.triton.descriptors import aligned_rows
from tilemoe.kernels.experts.triton.formats.packed import with_whole_scales
from tilemoe.kernels.experts.triton.formats.quantize import dequantized_rows, quantized_blocks, why_no_e4m3
from tilemoe.kernels.experts.triton.host import WeightGrad
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of, why_no_triton

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DENSE = "the portable kernels read dense rows, and weights that are dense or packed"


class TritonBackend(Backend):
    name = "triton"
    batch_invariance = "yes, in Triton's interpreter and on an H200"
    packed = MappingProxyType(
        {"nf4": "yes, in Triton's interpreter and on an H100", "mxfp4": "yes, in Triton's interpreter and on an H200"}
    )

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        return why_no_triton(device) or _why_unsupported(dtype, *widths)

    def up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[GemmOperand, Tensor]:
        return self._up_proj_act(x, w1, b1, plan, spec, keep_h=True)

    def up_proj_act_inference(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> GemmOperand:
        block_m = self._small_m(plan)
        if block_m is None or plan.capacity == 0:
            return self._up_proj_act(x, w1, b1, plan, spec, keep_h=False)[0]
        device = _check(x, x.shape[1], w1.shape[1] // spec.width_factor)
        launch, a = small_m_kernels.up_proj_act_launch(aligned_rows(x), w1, b1, plan, spec, block_m, device)
        launch.run()
        return a

    def up_proj(
        self, x: Tensor, w1: WeightOperand, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> Tensor:
        if isinstance(w1, Tensor):
            return super().up_proj(x, w1, b1, plan, spec)
        return _times_packed(aligned_rows(x), plan.token_of_row, w1.transpose(1, 2), b1, plan)

    def whole_scales(self, weight: PackedWeight) -> PackedWeight:
        return with_whole_scales(weight) if isinstance(weight, Nf4Weight) else super().whole_scales(weight)

    def quantize_h(self, h: Tensor) -> Operand:
        why = why_no_e4m3(h.device)
        if why is not None:
            raise ValueError(f"save='fp8': {why}; use save='full', or recompute='up_proj', which keeps no h")
        return quantized_blocks(h, BLOCK)

    def dequantize_h(self, h: Operand) -> Tensor:
        return dequantized_rows(h)

    def down_proj(self, a: GemmOperand, w2: WeightOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        rows, weight = self.operands("down_proj", a, w2)
        return self._rows("down_proj", rows, weight.transpose(1, 2), b2, plan)

    def down_proj_inference(self, a: GemmOperand, w2: WeightOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        block_m = self._small_m(plan)
        if block_m is None or plan.capacity == 0:
            return self.down_proj(a, w2, b2, plan)
        assert isinstance(a, Tensor), _DENSE
        assert isinstance(w2, Tensor), _DENSE
        device = _check(a, *w2.shape[1:])
        launch, y = small_m_kernels.down_proj_launch(a.contiguous(), w2, b2, plan, block_m, device)
        launch.run()
        return y

    def combine(self, y: Tensor, s: Tensor, plan: RoutingPlan, o: Tensor) -> None:
        combine(y, s, plan, o)

    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = _check(do, *w2.shape[1:])
        if plan.capacity == 0:
            return torch.empty_like(h), torch.zeros_like(s), h.new_empty(0, w2.shape[2])
        tile_m = tile_rows(do.element_size(), device)
        do = aligned_rows(do)
        launch, dh, a_scaled, partial = host.dgrad_dact_launch(do, w2, h.contiguous(), s, plan, spec, device)
        launch.run()
        return dh, score_grad(partial, do, b2, s, plan, tile_m), a_scaled

    def activation(self, h: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> Tensor:
        launch, a = dact.activation_launch(h.contiguous(), plan, spec)
        if plan.capacity:
            launch.run()
        return a

    def dact(
        self, da: Tensor, do: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        if plan.capacity == 0:
            return torch.empty_like(h), torch.zeros_like(s), torch.empty_like(da)
        tile_m = tile_rows(do.element_size(), device_of(do))
        launch, dh, a_scaled, partial = dact.dact_launch(da.contiguous(), h.contiguous(), s, plan, spec)
        launch.run()
        return dh, score_grad(partial, aligned_rows(do), b2, s, plan, tile_m), a_scaled

    def down_proj_wgrad(
        self, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        shape = (plan.num_experts, do.shape[1], a_scaled.shape[1])
        dw2 = empty_weight_grad(do, shape, column_major) if out is None else out
        self._weight_grad(WeightGrad("down_proj_wgrad", do, a_scaled, dw2, adds=out is not None), plan)
        return dw2

    def up_proj_dgrad(self, dh: GemmOperand, w1: WeightOperand, plan: RoutingPlan) -> Tensor:
        return self._rows("up_proj_dgrad", *self.operands("up_proj_dgrad", dh, w1), None, plan)

    def up_proj_wgrad(
        self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        shape = (plan.num_experts, dh.shape[1], x.shape[1])
        dw1 = empty_weight_grad(x, shape, column_major) if out is None else out
        transposed = dw1.transpose(1, 2)  # the gathered operand's width comes first
        self._weight_grad(WeightGrad("up_proj_wgrad", x, dh, transposed, adds=out is not None), plan)
        return dw1

    def combine_grad(self, dx_rows: Tensor, plan: RoutingPlan, dx: Tensor) -> None:
        combine(dx_rows, None, plan, dx)

    def down_proj_bias_grad(self, do: Tensor, s: Tensor, plan: RoutingPlan) -> Tensor:
        device = _check(do, do.shape[1])
        if plan.capacity == 0:
            return s.new_zeros(plan.num_experts, do.shape[1])
        return bias_grad.down_proj_bias_grad(aligned_rows(do), s, plan, device).to(s.dtype)

    def up_proj_bias_grad(self, dh: Tensor, plan: RoutingPlan) -> Tensor:
        device = _check(dh, dh.shape[1])
        if plan.capacity == 0:
            return dh.new_zeros(plan.num_experts, dh.shape[1], dtype=torch.float32)
        return bias_grad.up_proj_bias_grad(dh.contiguous(), plan, device)

    def _small_m(self, plan: RoutingPlan) -> int | None:
        """The tile height of the kernels for inference with few rows, which need dense operands; None: not used."""
        return small_m(plan.capacity, plan.num_experts) if self.format is None else None

    def _up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, keep_h: bool
    ) -> tuple[GemmOperand, Tensor]:
        """up_proj: (a (R_max, n), h (R_max, w)); without ``keep_h`` h is (0, w)."""
        n = w1.shape[1] // spec.width_factor
        device = _check(x, x.shape[1], n)
        if plan.capacity == 0:
            return x.new_empty(0, n), x.new_empty(0, w1.shape[1])
        launch, a, h = host.up_proj_act_launch(aligned_rows(x), w1, b1, plan, spec, keep_h, device)
        launch.run()
        return a, h

    def _rows(
        self, kernel: Kernel, rows: GemmOperand, weight: WeightOperand, bias: Tensor | None, plan: RoutingPlan
    ) -> Tensor:
        """down_proj and up_proj_dgrad: rows (R_max, in) times their expert's weight (E, in, out), plus bias (E,
        out)."""
        assert isinstance(rows, Tensor), _DENSE
        if not isinstance(weight, Tensor):
            return _times_packed(rows.contiguous(), None, weight, bias, plan)
        device = _check(rows, *weight.shape[1:])
        if plan.capacity == 0:
            return rows.new_empty(0, weight.shape[2])
        launch, out = host.rows_launch(kernel, rows.contiguous(), weight, bias, plan, device)
        launch.run()
        return out

    def _weight_grad(self, grad: WeightGrad, plan: RoutingPlan) -> None:
        """down_proj_wgrad and up_proj_wgrad."""
        device = _check(grad.by_token, grad.by_token.shape[1], grad.by_row.shape[1])
        if plan.capacity:
            grad = grad._replace(by_token=aligned_rows(grad.by_token), by_row=grad.by_row.contiguous())
            host.wgrad_launch(grad, plan, device).run()
        elif not grad.adds:
            grad.out.zero_()


def _times_packed(
    rows: Tensor, index: Tensor | None, weight: WeightOperand, bias: Tensor | None, plan: RoutingPlan
) -> Tensor:
    """Rows (R_max, in), or rows[index] gathered, times their expert's weight (E, in, out), plus bias (E, out)."""
    assert not isinstance(weight, Tensor | Operand), _DENSE
    device = _check(rows, *weight.shape[1:])
    if plan.capacity == 0:
        return rows.new_empty(0, weight.shape[2])
    launch, out = gemm_packed.packed_launch(rows, index, weight, bias, plan, device)
    launch.run()
    return out


def score_grad(partial: Tensor, do: Tensor, b2: Tensor | None, s: Tensor, plan: RoutingPlan, tile_m: int) -> Tensor:
    """ds, shaped like s, from down_proj_dgrad's ``partial`` (column tiles, R_max) and, with b2, from do (T, d) with
    aligned rows.

    tile_m: the height of the row tiles that the kernel walks.
    """
    products = None
    if b2 is not None:
        launch, products = bias_grad.products_launch(do, aligned_rows(b2), device_of(do))
        launch.run()
    launch, ds = host.score_grad_launch(partial, products, s, plan, tile_m)
    launch.run()
    return ds


def _why_unsupported(dtype: torch.dtype, *widths: int) -> str | None:
    return why_unsupported(*widths) if dtype in DTYPES else f"no Triton kernel computes in {dtype}"


def _check(rows: Tensor, *widths: int) -> Device:
    """The device of ``rows``. ValueError if the Triton kernels do not support the dtype or the widths."""
    why = _why_unsupported(rows.dtype, *widths)
    if why is not None:
        raise ValueError(f"kernels='triton': {why}; pass kernels=None or 'torch'")
    return device_of(rows)
