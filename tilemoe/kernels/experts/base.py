"""Backend: the interface between the differentiable operators and an implementation of the experts' kernels.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

``x`` (T,d) · ``w1`` (E,w,d) · ``w2`` (E,d,n) · ``b1`` (E,w) · ``b2`` (E,d) · ``h`` (R_max,w) pre-activation ·
``a`` (R_max,n) · ``y`` (R_max,d) · ``s`` scores, flat, in the caller's order · ``o`` (T,d). Gradients prefix ``d``.
Rows past R of any (R_max, .) tensor are unspecified and never read.

y and dx_rows, the only buffers of size R_max x d, may be made and combined a slice of d at a time: the kernels that
make them take a slice of the weight, (E,c,n) of w2 or (E,w,c) of w1, and those that combine them write to columns of
a wider tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.plan import RoutingPlan

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of a layer's tensors


@dataclass(frozen=True)
class Operand:
    """What a GEMM reads where elements share scales: ``value = data * scale``, a scale for each block of elements.

    data (..., p, q) · block (bp, bq), of data's last two dimensions · scale (..., ceil(p / bp), ceil(q / bq)), any
    float dtype · dtype: of the tensor that was quantised, and of what is computed from it.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        *batch, p, q = self.data.shape
        blocks = (-(-p // self.block[0]), -(-q // self.block[1]))
        assert self.scale.shape == (*batch, *blocks), "a scale for each block, the ragged ones, too"

    def __getitem__(self, parts: tuple[slice, ...]) -> Operand:
        """As of a tensor, a slice for each leading dimension; of one that has blocks, whole blocks."""
        sizes = (1,) * (self.data.ndim - 2) + self.block
        blocks = tuple(_blocks_of(part, size) for part, size in zip(parts, sizes, strict=False))
        return Operand(self.data[parts], self.scale[blocks], self.block, self.dtype)

    def transposed(self) -> Operand:
        """The last two dimensions exchanged."""
        return Operand(self.data.transpose(-2, -1), self.scale.transpose(-2, -1), self.block[::-1], self.dtype)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in ``dtype``, for a GEMM that takes no scales; multiplied in the scale's dtype, rounded once."""
        p, q = self.data.shape[-2:]
        scale = self.scale.repeat_interleave(self.block[0], -2)[..., :p, :]
        return (self.data.to(scale.dtype) * scale.repeat_interleave(self.block[1], -1)[..., :q]).to(dtype)


def _blocks_of(part: slice, size: int) -> slice:
    start, stop = (None if at is None else -(-at // size) for at in (part.start, part.stop))
    return slice(start, stop)


# What a backend's own method gave and F2 or B3 reads: a tensor, or an `Operand` of a backend that quantises.
Given = Any


class Backend(ABC):
    """One implementation of the eight kernels F1 to B5 and of the bias gradients.

    A backend holds no state: an instance stands for its class, and `register_backend` makes one. Subclass one that
    exists and override what you do better. A method may refuse operands with a ValueError that names the fix.

    Operands and results are tensors of the layer's dtype. A backend that multiplies in a narrower precision makes an
    `Operand` of each inside its methods; what F2 and B3 read a slice of d at a time it may make once for all slices.

    ValueError: a method's, as above. Shapes and dtypes: the legend of `tilemoe.kernels.experts.base` and each method.

    Examples:
        >>> from tilemoe.kernels.experts.torch.backend import TorchBackend
        >>> class Doubled(TorchBackend):
        ...     name = "doubled"
        ...     def combine(self, y, s, plan, o):  # F3
        ...         super().combine(2 * y, s, plan, o)
        >>> issubclass(Doubled, tilemoe.Backend)
        True
    """

    name: ClassVar[str]  # that it is registered by
    # Of `tilemoe.config.PRECISIONS`: what its GEMMs read. "fp8": between processes x and do cross in e4m3, 1 x 128.
    precision: ClassVar[str] = "bf16"
    # Whether `up_proj`, `down_proj` and `up_proj_dgrad` take an `Nf4Weight`; asked of precision "bf16" alone.
    reads_nf4: ClassVar[bool] = False
    # Whether a token's o and dx have the same bits whatever the other tokens of its batch are (docs/replay.md).
    batch_invariance: ClassVar[str] = "not tested"
    nf4_batch_invariance: ClassVar[str] = "not tested"  # the same of experts in NF4 under adapters

    @abstractmethod
    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        """Why it cannot compute here in ``dtype`` with these values of d and n, in a few words; None if it can."""

    def rows_operand(self, rows: Tensor) -> Given:
        """What `up_proj_dgrad` reads of dh (R_max, w)."""
        return rows

    def weight_operand(self, weight: Tensor, contracted: int) -> Given:
        """What `down_proj` and `up_proj_dgrad` read of a weight (E, p, q), to be indexed like it, where they contract
        its dimension ``contracted``.
        """
        return weight

    @abstractmethod
    def up_proj_act(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Given, Tensor]:
        """F1: gather x by token, ``h = x w1^T + b1``, ``a = act(h)``; (a (R_max, n), h (R_max, w))."""

    def up_proj_act_inference(
        self, x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec
    ) -> Given:
        """F1 where nothing will be differentiated: a (R_max, n) alone, h need not reach memory."""
        return self.up_proj_act(x, w1, b1, plan, spec)[0]

    def up_proj(self, x: Tensor, w1: Given, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec) -> Tensor:
        """F1's product alone: h (R_max, w)."""
        return self.up_proj_act(x, w1, b1, plan, spec)[1]

    def quantize_h(self, h: Tensor) -> Operand:
        """What ``save="fp8"`` keeps of h (R_max, w), w a multiple of 128: e4m3, an fp32 scale for 128 of a row."""
        from tilemoe.kernels.experts.quantize import quantize_rows  # here, because it imports this module

        return quantize_rows(h)

    def dequantize_h(self, h: Operand) -> Tensor:
        """h (R_max, w) again, in the dtype that it had: each value times its scale in fp32, rounded once."""
        from tilemoe.kernels.experts.quantize import dense_rows

        return dense_rows(h)

    @abstractmethod
    def down_proj(self, a: Given, w2: Given, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """F2: ``y = a w2^T + b2`` (R_max, d), or (R_max, c) from c of w2's and b2's columns of d."""

    def down_proj_inference(self, a: Given, w2: Given, b2: Tensor | None, plan: RoutingPlan) -> Tensor:
        """F2 of what `up_proj_act_inference` gave: the two may share what suits few rows."""
        return self.down_proj(a, w2, b2, plan)

    @abstractmethod
    def combine(self, y: Tensor, s: Tensor, plan: RoutingPlan, o: Tensor) -> None:
        """F3: ``o_t`` = sum over the token's rows of score times y, in fp32, or fp64 where s or y is. s of any float
        dtype; y (R_max, c) contiguous; o (T, c) of y's dtype, rows of any stride, is written.
        """

    @abstractmethod
    def down_proj_dgrad_dact(
        self, do: Tensor, w2: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """B1: gather do (T, d), ``da' = do w2``; (dh (R_max, w), ds, a_scaled (R_max, n)) with
        ``ds = <da', a> + <do, b2>``, ``dh = dact(h) s da'``, ``a_scaled = s a``. ds has s's shape and dtype, 0 for a
        skipped pair.
        """

    @abstractmethod
    def down_proj_wgrad(
        self, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """B2: ``dw2_e = sum over rows of do_row^T a_scaled_row`` (E, d, n), stored as `is_column_major` says of w2;
        zeros for an empty expert.

        out: stored likewise, of `compute_dtype`: the sum is added to it, unrounded where a kernel does, and it is what
        is returned. The first call of an operator may run twice, where Triton kernels withhold their launches and
        PyTorch's operators do not: add by one or by the other.
        """

    @abstractmethod
    def up_proj_dgrad(self, dh: Given, w1: Given, plan: RoutingPlan) -> Tensor:
        """B3: ``dx_rows = dh w1`` (R_max, d), or (R_max, c) from c of w1's columns of d."""

    @abstractmethod
    def up_proj_wgrad(
        self, x: Tensor, dh: Tensor, plan: RoutingPlan, column_major: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """B4: ``dw1_e = sum over rows of dh_row^T x_row`` (E, w, d), stored as `is_column_major` says of w1; zeros for
        an empty expert. out: as of `down_proj_wgrad`.
        """

    @abstractmethod
    def combine_grad(self, dx_rows: Tensor, plan: RoutingPlan, dx: Tensor) -> None:
        """B5: ``dx_t`` = sum over the token's rows of dx_rows (R_max, c); dx (T, c) is written as by `combine`."""

    @abstractmethod
    def down_proj_bias_grad(self, do: Tensor, s: Tensor, plan: RoutingPlan) -> Tensor:
        """``db2_e = sum over rows of s do`` (E, d) in s's dtype.

        It may be a GEMM over all tokens: what is not finite in do reaches every expert, from unrouted tokens, too.
        """

    @abstractmethod
    def up_proj_bias_grad(self, dh: Tensor, plan: RoutingPlan) -> Tensor:
        """``db1_e = sum over rows of dh`` (E, w) in the compute dtype."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a tensor of ``dtype`` is computed and accumulated in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_column_major(weight: Tensor) -> bool:
    """Whether a weight (E, p, q) is dense with each expert's p contiguous, as a transposed view of (E, q, p) is."""
    return not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def empty_weight_grad(like: Tensor, shape: Sequence[int], column_major: bool) -> Tensor:
    """Uninitialised, dense: of ``shape`` (E, p, q), with p contiguous if ``column_major``, else q."""
    _, p, q = shape
    return like.new_empty_strided(shape, (p * q, 1, p) if column_major else (p * q, q, 1))
