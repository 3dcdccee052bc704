"""Backend: the interface between the differentiable operators and an implementation of the experts' kernels.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

``x`` (T,d) · ``w1`` (E,w,d) · ``w2`` (E,d,n) · ``b1`` (E,w) · ``b2`` (E,d) · ``h`` (R_max,w) pre-activation ·
``a`` (R_max,n) · ``y`` (R_max,d) · ``s`` scores, flat, in the caller's order · ``o`` (T,d). Gradients prefix ``d``.
A row is one routed (token, expert) pair; rows are sorted by expert. R of the R_max rows are in use. In any (R_max, .)
tensor, rows past R are unspecified and never read.

Forward: up_proj, down_proj, combine. Backward: down_proj_dgrad, down_proj_wgrad, up_proj_dgrad, up_proj_wgrad,
combine_grad. Only y and dx_rows have R_max x d elements. To save memory they may be computed and combined one slice of
d at a time: down_proj takes a slice (E,c,n) of w2, up_proj_dgrad a slice (E,w,c) of w1, and combine and combine_grad
write to columns of a wider tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.fp8 import dense_rows, quantize_rows
from tilemoe.kernels.experts.formats.operand import Format, GemmOperand, Operand, WeightOperand
from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.torch.activations import activation_rows, dact_rows
from tilemoe.plan import RoutingPlan
from tilemoe.shape import MoEShape


class Backend(ABC):
    """One implementation of the eight kernels up_proj to combine_grad and of the bias gradients.

    A class implements one architecture; its precision is a class attribute (see `tilemoe.kernels.experts.table`).
    A backend has no state: there is one instance of each class, which the registry makes. To write one, subclass an
    existing backend and override the methods that you improve.

    Operands and results are tensors of the layer's dtype. A backend that multiplies in a narrower precision quantises
    them to an `Operand` inside its methods. down_proj and up_proj_dgrad read one operand again for each slice of d:
    `rows_operand` and `weight_operand` quantise it once for all slices.

    ValueError: a method may refuse operands; the message names the fix. Shapes and dtypes: the legend of
    `tilemoe.kernels.experts.base` and each method.

    Examples:
        >>> from tilemoe.kernels.experts.torch.backend import TorchBackend
        >>> class Doubled(TorchBackend):
        ...     name = "doubled"
        ...     def combine(self, y, s, plan, o):  # combine
        ...         super().combine(2 * y, s, plan, o)
        >>> issubclass(Doubled, tilemoe.Backend)
        True
    """

    name: ClassVar[str]  # the name that it is registered by
    # The precision of the GEMMs' operands, one of `tilemoe.config.PRECISIONS`. With "fp8", processes also exchange x
    # and do in e4m3, with one scale per token.
    precision: ClassVar[str] = "bf16"
    format: ClassVar[Format | None] = None  # the format that operands are quantised to; None: not quantised
    # Whether a token's o and dx keep the same bits when the other tokens of its batch change (docs/replay.md).
    batch_invariance: ClassVar[str] = "not tested"
    # Name of each format of packed weights that `up_proj`, `down_proj` and `up_proj_dgrad` take -> batch invariance of
    # frozen experts in that format. Used with precision "bf16" only.
    packed: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @abstractmethod
    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        """Why it cannot compute on ``device`` in ``dtype`` with these values of d and n; None if it can."""

    def rows_operand(self, rows: Tensor) -> GemmOperand:
        """dh (R_max, w) in the form that `up_proj_dgrad` reads, made once for all slices of d."""
        return rows if self.format is None else self.format.rows_for("up_proj_dgrad", rows)

    def weight_operand(self, weight: Tensor, contracted: int) -> WeightOperand:
        """A weight (E, p, q) in the form that `down_proj` or `up_proj_dgrad` reads, made once for all slices of d.

        The result is indexed like the weight. contracted: the dimension, 1 or 2, that the GEMM contracts.
        """
        if self.format is None:
            return weight
        return self.format.weight_for("down_proj" if contracted == 2 else "up_proj_dgrad", weight)

    def operands(self, gemm: str, rows: GemmOperand, weight: WeightOperand) -> tuple[GemmOperand, WeightOperand]:
        """Rows and a weight in the backend's format, in the form that ``gemm`` reads."""
        if self.format is None:
            return rows, weight
        return self.format.rows_for(gemm, rows), self.format.weight_for(gemm, weight)

    def whole_scales(self, weight: PackedWeight) -> PackedWeight:
        """A packed weight in the form that `up_proj`, `down_proj` and `up_proj_dgrad` read, its scales not quantised
        themselves. It is made once for all slices of d."""
        return weight.with_whole_scales()

    @abstractmethod
    def up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[GemmOperand, Tensor]:
        """up_proj: gather x by token, ``h = x w1^T + b1``, ``a = act(h)``. Returns (a (R_max, n), h (R_max, w))."""

    def up_proj_act_inference(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> GemmOperand:
        """up_proj without a backward: returns only a (R_max, n), so that h need not be stored."""
        return self.up_proj_act(x, w1, b1, plan, spec)[0]

    def up_proj(
        self, x: Tensor, w1: WeightOperand, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> Tensor:
        """up_proj's GEMM without the activation: h (R_max, w)."""
        assert isinstance(w1, Tensor), "where `packed` has formats, this method is overridden"
        return self.up_proj_act(x, w1, b1, plan, spec)[1]

    def quantize_h(self, h: Tensor) -> Operand:
        """h (R_max, w), w a multiple of 128, as ``save="fp8"`` keeps it: e4m3, an fp32 scale per 1 x 128 block."""
        return quantize_rows(h)

    def dequantize_h(self, h: Operand) -> Tensor:
        """The inverse of `quantize_h`, in the dtype that h had: each value times its scale in fp32, rounded once."""
        return dense_rows(h)

    @abstractmethod
    def down_proj(self, a: GemmOperand, w2: WeightOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """down_proj: ``y = a w2^T + b2`` (R_max, d), or (R_max, c) if w2 (E, c, n) and b2 (E, c) are a slice of d."""

    def down_proj_inference(self, a: GemmOperand, w2: WeightOperand, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """down_proj of `up_proj_act_inference`'s result; both methods may use kernels made for few rows."""
        return self.down_proj(a, w2, b2, plan)

    @abstractmethod
    def combine(self, y: Tensor, s: Tensor, plan: RoutingPlan, o: Tensor) -> None:
        """combine: ``o_t = sum over t's rows r of s_r y_r``, written to o (T, c).

        o has y's dtype and any row stride. s has any float dtype; y (R_max, c) is contiguous. Sums are taken in fp32,
        or in fp64 if s or y is fp64.
        """

    @abstractmethod
    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """down_proj_dgrad: gather do (T, d), ``da' = do w2``, ``ds = <da', a> + <do, b2>``, ``dh = act'(h) s da'``,
        ``a_scaled = s a``. Returns (dh (R_max, w), ds like s, a_scaled (R_max, n)); ds is 0 for a skipped pair.
        """

    def activation(self, h: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> Tensor:
        """``a = act(h)`` (R_max, n), for an h that is a sum of GEMMs: no single GEMM's epilogue can apply it."""
        return activation_rows(h, spec)

    def dact(
        self, da: Tensor, do: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`down_proj_dgrad_dact` without its GEMM, for a da' (R_max, n) that is a sum of GEMMs."""
        return dact_rows(da, do, b2, h, s, plan, spec)

    @abstractmethod
    def down_proj_wgrad(
        self, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """down_proj_wgrad: ``dw2_e = sum over e's rows r of do_t(r)^T a_scaled_r`` (E, d, n); zeros without rows.

        column_major: the result has the strides of `is_column_major`. out: a tensor with these strides, in
        `compute_dtype`; the gradient is added to it and it is returned. Kernels add the gradient unrounded.
        """

    @abstractmethod
    def up_proj_dgrad(self, dh: GemmOperand, w1: WeightOperand, plan: RoutingPlan) -> Tensor:
        """up_proj_dgrad: ``dx_rows = dh w1`` (R_max, d), or (R_max, c) if w1 (E, w, c) is a slice of d."""

    @abstractmethod
    def up_proj_wgrad(
        self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """up_proj_wgrad: ``dw1_e = sum over e's rows r of dh_r^T x_t(r)`` (E, w, d); zeros for an empty expert.

        column_major, out: as for `down_proj_wgrad`.
        """

    @abstractmethod
    def combine_grad(self, dx_rows: Tensor, plan: RoutingPlan, dx: Tensor) -> None:
        """combine_grad: ``dx_t = sum over t's rows r of dx_rows_r``, dx_rows (R_max, c), written to dx (T, c) as
        `combine` writes o."""

    @abstractmethod
    def down_proj_bias_grad(self, do: Tensor, s: Tensor, plan: RoutingPlan) -> Tensor:
        """``db2_e = sum over e's rows r of s_r do_t(r)`` (E, d) in s's dtype.

        It may be a GEMM over all tokens. Then a NaN or infinity in do, even in an unrouted token, reaches every expert.
        """

    @abstractmethod
    def up_proj_bias_grad(self, dh: Tensor, plan: RoutingPlan) -> Tensor:
        """``db1_e = sum over e's rows r of dh_r`` (E, w) in dh's `compute_dtype`."""


def shape_of(like: Tensor, d: int, n: int, plan: RoutingPlan, spec: ActivationSpec, save: str = "full") -> MoEShape:
    """The shape of one call, with ``like``'s bytes per element; its number of rows is that of the buffers, R_max."""
    sizes = (plan.num_tokens, d, n, plan.num_experts, 1)  # K is not used: the rows are given
    return _cached_shape(
        *sizes, spec.is_gated, like.element_size(), plan.token_of_row.shape[0], plan.pair_start_of_token is None, save
    )


_cached_shape = lru_cache(MoEShape)  # every forward needs one: a look-up is faster than MoEShape's checks
