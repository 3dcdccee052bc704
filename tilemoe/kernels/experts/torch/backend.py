"""The backend in plain PyTorch; `Backend` documents the methods.

If a GEMM is a loop over experts, its operand is gathered one expert at a time. If it is `F.grouped_mm`, the gathered
operand is materialised, one transient (R_max, d) buffer at a time.

In FP8, operands are quantised, dequantised, and multiplied in fp32. This gives the FP8 kernels' results except for the
order of sums, and is no faster than the layer's own dtype. `kernels.experts.formats.fp8` says which operands are
quantised; the bias gradients and b2's term of ds read operands that are not.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES, compute_dtype, row_blocks
from tilemoe.kernels.experts.formats.operand import GemmOperand, Operand, WeightOperand
from tilemoe.kernels.experts.torch.activations import activation_rows, dact_rows, in_use
from tilemoe.kernels.experts.torch.grouped import expert_of_row, outer_per_expert, rows_times_experts
from tilemoe.kernels.experts.triton.configs import Kernel
from tilemoe.plan import RoutingPlan

_AS_GIVEN = "in this precision operands are tensors, and frozen weights may be packed"


class TorchBackend(Backend):
    name = "torch"
    batch_invariance = "no, PyTorch's matrix products add in an order that depends on the number of rows"
    packed = MappingProxyType({"nf4": batch_invariance, "mxfp4": batch_invariance})

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        if dtype not in FLOAT_DTYPES:
            return f"no kernel computes in {dtype}"
        return None if self.format is None else self.format.why_not(dtype, *widths)

    def up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor]:
        rows, weight, bias = x, w1, b1
        if self.format is not None:  # checked here to save the time of a call
            rows, weight, bias = self._read("up_proj_act", x, w1, b1)
        h = rows_times_experts(rows, weight.transpose(1, 2), bias, plan, index=plan.token_of_row)
        return activation_rows(h, spec).to(x.dtype), h.to(x.dtype)

    def up_proj(
        self, x: Tensor, w1: WeightOperand, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> Tensor:
        if isinstance(w1, Tensor):
            return super().up_proj(x, w1, b1, plan, spec)
        assert not isinstance(w1, Operand), _AS_GIVEN
        return rows_times_experts(x, w1.transpose(1, 2), b1, plan, index=plan.token_of_row)

    def down_proj(self, a: GemmOperand, w2: WeightOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        if self.format is not None:
            rows, weight, bias = self._read("down_proj", a, w2, b2)
            return rows_times_experts(rows, weight.transpose(1, 2), bias, plan).to(a.dtype)
        assert isinstance(a, Tensor), _AS_GIVEN
        assert not isinstance(w2, Operand), _AS_GIVEN
        return rows_times_experts(a, w2.transpose(1, 2), b2, plan)

    def combine(self, y: Tensor, s: Tensor, plan: RoutingPlan, o: Tensor) -> None:
        if plan.capacity == 0:
            o.zero_()
        else:
            work = torch.promote_types(torch.promote_types(s.dtype, y.dtype), torch.float32)
            _sum_rows_of_token(y, s.index_select(0, plan.pair_of_row).to(work), plan, o)

    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, weight = do, w2
        if self.format is not None:
            rows, weight, _ = self._read("down_proj_dgrad_dact", do, w2, None)
        da_unscaled = rows_times_experts(rows, weight, None, plan, index=plan.token_of_row)
        dh, ds, a_scaled = dact_rows(da_unscaled, do, b2, h, s, plan, spec)
        return dh, ds, a_scaled.to(h.dtype)

    def down_proj_wgrad(
        self, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        return self._weight_grad(do, a_scaled, plan, column_major, out)

    def up_proj_dgrad(self, dh: GemmOperand, w1: WeightOperand, plan: RoutingPlan) -> Tensor:
        if self.format is not None:
            rows, weight, _ = self._read("up_proj_dgrad", dh, w1, None)
            return rows_times_experts(rows, weight, None, plan).to(dh.dtype)
        assert isinstance(dh, Tensor), _AS_GIVEN
        assert not isinstance(w1, Operand), _AS_GIVEN
        return rows_times_experts(dh, w1, None, plan)

    def up_proj_wgrad(
        self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        transposed = None if out is None else out.transpose(1, 2)
        return self._weight_grad(x, dh, plan, not column_major, transposed).transpose(1, 2)

    def combine_grad(self, dx_rows: Tensor, plan: RoutingPlan, dx: Tensor) -> None:
        ones = dx_rows.new_ones(plan.capacity, dtype=compute_dtype(dx_rows.dtype))
        _sum_rows_of_token(dx_rows, ones, plan, dx)

    def down_proj_bias_grad(self, do: Tensor, s: Tensor, plan: RoutingPlan) -> Tensor:
        """db2 (E, d) as ``S^T do``, where S (T, E) has the scores as a dense matrix, so that do is not gathered."""
        # `where` instead of a product with a mask: rows past R read the score of pair 0, which may be NaN if skipped.
        s_row = torch.where(in_use(plan), s.index_select(0, plan.pair_of_row), 0)
        dense = s.new_zeros(plan.num_tokens, plan.num_experts)
        place = plan.token_of_row.long() * plan.num_experts + expert_of_row(plan)
        # A (token, expert) pair may occur several times: each device uses the function that adds in a fixed order.
        if dense.device.type == "cpu":
            dense.view(-1).scatter_add_(0, place, s_row)
        else:
            dense.view(-1).index_put_((place,), s_row, accumulate=True)
        return dense.t() @ do.to(s.dtype)

    def up_proj_bias_grad(self, dh: Tensor, plan: RoutingPlan) -> Tensor:
        rows = dh.to(compute_dtype(dh.dtype))  # the offsets end at R, so rows past R are in no segment
        return torch.segment_reduce(rows, "sum", offsets=plan.row_start_of_expert, axis=0, unsafe=True, initial=0)

    def _weight_grad(
        self, by_token: Tensor, by_row: Tensor, plan: RoutingPlan, column_major: bool, out: Tensor | None
    ) -> Tensor:
        """The gradient (E, p, q) from by_token (T, p), gathered, and by_row (R_max, q), or ``out`` with it added."""
        left, right = by_token, by_row
        if self.format is not None:
            left, right = self.format.wgrad_operands(by_token, by_row, plan)
        if column_major:  # compute the transposed product, row-major
            to = None if out is None else out.transpose(1, 2)
            grad = outer_per_expert(right, left, plan, right_index=plan.token_of_row, out=to).transpose(1, 2)
        else:
            grad = outer_per_expert(left, right, plan, left_index=plan.token_of_row, out=out)
        return grad if out is not None else grad.to(by_token.dtype)

    def _read(
        self, gemm: Kernel, rows: GemmOperand, weight: WeightOperand, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(rows, weight, bias) as the GEMM uses them in fp32: quantised to the backend's format, then dequantised."""
        rows, weight = self.operands(gemm, rows, weight)
        assert isinstance(rows, Operand), "what a format makes"
        assert isinstance(weight, Operand), "what a format makes"
        return rows.dense(torch.float32), weight.dense(torch.float32), None if bias is None else bias.float()


def _sum_rows_of_token(rows: Tensor, weight: Tensor, plan: RoutingPlan, out: Tensor) -> None:
    """``out_t = sum over t's rows r of weight_r rows_r`` (T, c), summed in the weight's dtype, in a fixed order."""
    if plan.pair_start_of_token is not None:
        taken, weights = _take(rows, weight, plan.row_of_pair)
        taken = taken.to(weight.dtype).mul_(weights)
        sums = torch.segment_reduce(taken, "sum", offsets=plan.pair_start_of_token, axis=0, unsafe=True, initial=0)
        out.copy_(sums)
        return
    row_of_pair = plan.row_of_pair.view(plan.num_tokens, -1) if plan.num_tokens else plan.row_of_pair[:, None]
    for tokens in row_blocks(out):
        total = weight.new_zeros(tokens.stop - tokens.start, rows.shape[1])
        for row_of_token in row_of_pair[tokens].unbind(1):
            total.addcmul_(*_take(rows, weight, row_of_token))
        out[tokens] = total


def _take(rows: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``rows[index]`` and ``weight[index, None]``; 0 where the index is -1, even if row 0, read instead, is NaN."""
    found, skipped = index.clamp(min=0), (index < 0).unsqueeze(1)
    weights = weight.index_select(0, found).unsqueeze(1)
    return rows.index_select(0, found).masked_fill_(skipped, 0), weights.masked_fill_(skipped, 0)
