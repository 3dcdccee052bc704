"""KernelSet: the interface between the autograd op and an implementation of the eight kernels.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated

``x`` (T,d) · ``w1`` (E,w,d) · ``w2`` (E,d,n) · ``b1`` (E,w) · ``b2`` (E,d) · ``h`` (R_max,w) pre-activation ·
``a`` (R_max,n) · ``y`` (R_max,d) · ``s`` scores, flat, in the caller's order · ``o`` (T,d). Gradients prefix ``d``.
Rows past R of any (R_max, .) tensor are unspecified and never read.

y and dx_rows, the only buffers of size R_max x d, may be made and combined a slice of d at a time: the kernels that
make them take a slice of the weight, (E,c,n) of w2 or (E,w,c) of w1, and those that combine them write to columns of
a wider tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.routing.plan import RoutingPlan


class UpProjAct(Protocol):
    def __call__(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor]:
        """F1: gather x by token, ``h = x w1^T + b1``, ``a = act(h)``; returns (a, h)."""
        ...


class UpProjActInference(Protocol):
    def __call__(self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec) -> Tensor:
        """F1 where nothing will be differentiated: a alone, h need not reach memory."""
        ...


class DownProj(Protocol):
    def __call__(self, a: Tensor, w2: Tensor, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """F2: ``y = a w2^T + b2`` (R_max, d), or (R_max, c) from c of w2's and b2's columns of d."""
        ...


class Combine(Protocol):
    def __call__(self, y: Tensor, s: Tensor, plan: RoutingPlan, o: Tensor) -> None:
        """F3: ``o_t`` = sum over the token's rows of score times y, in fp32, or fp64 where s or y is. s of any float
        dtype; y (R_max, c) contiguous; o (T, c) of y's dtype, rows of any stride, is written.
        """
        ...


class DownProjActGrad(Protocol):
    def __call__(
        self,
        do: Tensor,
        w2: Tensor,
        b2: Tensor | None,
        h: Tensor,
        s: Tensor,
        plan: RoutingPlan,
        spec: ActivationSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """B1: gather do, ``da' = do w2``; (dh, ds, a_scaled) with ``ds = <da', a> + <do, b2>``, ``dh = dact(h) s da'``,
        ``a_scaled = s a``. ds has s's shape and dtype, 0 for a skipped pair.
        """
        ...


class DownProjWeightGrad(Protocol):
    def __call__(self, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
        """B2: ``dw2_e = sum over rows of do_row^T a_scaled_row`` (E, d, n), stored as `is_column_major` says of w2;
        zeros for an empty expert.
        """
        ...


class UpProjActGrad(Protocol):
    def __call__(self, dh: Tensor, w1: Tensor, plan: RoutingPlan) -> Tensor:
        """B3: ``dx_rows = dh w1`` (R_max, d), or (R_max, c) from c of w1's columns of d."""
        ...


class UpProjWeightGrad(Protocol):
    def __call__(self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False) -> Tensor:
        """B4: ``dw1_e = sum over rows of dh_row^T x_row`` (E, w, d), stored as `is_column_major` says of w1; zeros for
        an empty expert.
        """
        ...


class CombineGrad(Protocol):
    def __call__(self, dx_rows: Tensor, plan: RoutingPlan, dx: Tensor) -> None:
        """B5: ``dx_t`` = sum over the token's rows of dx_rows (R_max, c); dx (T, c) is written as by `Combine`."""
        ...


class DownProjBiasGrad(Protocol):
    def __call__(self, do: Tensor, s: Tensor, plan: RoutingPlan) -> Tensor:
        """``db2_e = sum over rows of s do`` (E, d) in s's dtype.

        It may be a GEMM over all tokens: what is not finite in do reaches every expert, from unrouted tokens, too.
        """
        ...


class UpProjBiasGrad(Protocol):
    def __call__(self, dh: Tensor, plan: RoutingPlan) -> Tensor:
        """``db1_e = sum over rows of dh`` (E, w) in the compute dtype."""
        ...


@dataclass(frozen=True)
class KernelSet:
    """One implementation of the eight kernels (F1 and F2 in two forms) and of the bias gradients.

    ``down_proj_inference`` is F2 for what `UpProjActInference` gave: the two may share what suits few rows.

    ``reason`` says in one line why it was chosen.
    """

    name: str
    up_proj_act: UpProjAct
    up_proj_act_inference: UpProjActInference
    down_proj: DownProj
    down_proj_inference: DownProj
    combine: Combine
    down_proj_act_grad: DownProjActGrad
    down_proj_weight_grad: DownProjWeightGrad
    up_proj_act_grad: UpProjActGrad
    up_proj_weight_grad: UpProjWeightGrad
    combine_grad: CombineGrad
    down_proj_bias_grad: DownProjBiasGrad
    up_proj_bias_grad: UpProjBiasGrad
    reason: str = ""

    def because(self, reason: str) -> KernelSet:
        return replace(self, reason=reason)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a tensor of ``dtype`` is computed and accumulated in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_column_major(weight: Tensor) -> bool:
    """Whether a weight (E, p, q) is dense with each expert's p contiguous, as a transposed view of (E, q, p) is."""
    return weight.transpose(1, 2).is_contiguous() and not weight.is_contiguous()


def empty_weight_grad(like: Tensor, shape: Sequence[int], column_major: bool) -> Tensor:
    """Uninitialised, dense: of ``shape`` (E, p, q), with p contiguous if ``column_major``, else q."""
    _, p, q = shape
    return like.new_empty_strided(shape, (p * q, 1, p) if column_major else (p * q, q, 1))
