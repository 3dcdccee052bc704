"""The dense two-layer MLP of a dense block or of an MoE layer's shared expert.

T tokens · d hidden_size · n intermediate_size · w = 2n gated, n ungated
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.dense import row_blocks
from tilemoe.kernels.experts.torch.activations import activation_grad, activation_rows
from tilemoe.runtime.random import normal_


class _Activation(torch.autograd.Function):
    """An activation that saves only ``h`` for backward; autograd would save several tensors in fp32."""

    @staticmethod
    def forward(h: Tensor, spec: ActivationSpec) -> Tensor:
        return activation_rows(h, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ActivationSpec], output: Tensor) -> None:
        h, ctx.spec = inputs
        ctx.save_for_backward(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        dh = torch.empty_like(h)
        work = torch.promote_types(da.dtype, torch.float32)
        for rows in row_blocks(h):
            activation_grad(h[rows], da[rows].to(work), ctx.spec, dh[rows])
        return dh, None


def activate(h: Tensor, spec: ActivationSpec) -> Tensor:
    """The activation ``a`` (..., n) of ``h`` (..., w), in h's dtype, computed in fp32 or fp64. Differentiable once."""
    width = h.shape[-1]
    a = _Activation.apply(h.reshape(-1, width), spec)
    return a.view(*h.shape[:-1], width // spec.width_factor)


class MLP(nn.Module):
    """``w2 act(w1 x)``; w1 (w, d) has the experts' gate and up layout, w2 is (d, n); no biases.

    x (..., d) -> (..., d) in x's dtype, or autocast's under autocast.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        spec: ActivationSpec,
        initializer_range: float,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.initializer_range = initializer_range
        width = spec.width_factor * intermediate_size
        self.w1 = nn.Parameter(torch.empty(width, hidden_size, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(hidden_size, intermediate_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for weight in (self.w1, self.w2):
            normal_(weight, self.initializer_range, generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(activate(F.linear(x, self.w1), self.spec), self.w2)

    def extra_repr(self) -> str:
        return f"{self.w1.shape[1]} -> {self.w2.shape[1]}, {self.spec.name}, {self.spec.gate_up}"
