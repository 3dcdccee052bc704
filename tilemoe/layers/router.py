"""The linear router, which computes logits, and the checks of a custom router's output. `tilemoe.route` makes plans.

T tokens · d hidden_size · E experts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilemoe.checks import require_type
from tilemoe.config import Invariance, MoEConfig
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.ops import router as ops
from tilemoe.routing.topk import Routing
from tilemoe.runtime.operator import refuse_transforms
from tilemoe.runtime.random import normal_
from tilemoe.runtime.tensors import require_factory, require_tensors
from tilemoe.runtime.tracing import constant_when_traced, without_autocast

_HIGH_BITS = -1 << 16  # of an fp32 number's bits, those of a bf16 number


class _UpcastLinear(torch.autograd.Function):
    """``x weight^T + bias`` in ``dtype``. It saves the operands in their own dtype; autograd would save upcast copies.

    An fp32 copy of a 16-bit x has twice its bytes: as many as the pre-activations of fine-grained experts.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, invariance: Invariance
    ) -> Tensor:
        ctx.dtype, ctx.bias_dtype = dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        with without_autocast(x.device.type):
            if invariance == "batch":
                logits = ops.invariant_logits(x.to(dtype), weight.to(dtype))
                return logits if bias is None else logits + bias
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        with without_autocast(x.device.type):
            dx = (d_logits @ weight.to(ctx.dtype)).to(x.dtype) if need_x else None
            d_weight = (d_logits.t() @ x.to(ctx.dtype)).to(weight.dtype) if need_weight else None
            d_bias = d_logits.sum(0).to(ctx.bias_dtype) if need_bias else None
        return dx, d_weight, d_bias, None, None


def _bf16_parts(matrix: Tensor) -> Tensor:
    """Three bf16 matrices (3M, N) whose sum is the fp32 ``matrix`` (M, N): each has 8 of its 24 significant bits.

    Of finite numbers; those below 2^-109 lose bits.
    """
    high = (matrix.view(torch.int32) & _HIGH_BITS).view(torch.float32)  # no cast there and back, which compilers elide
    rest = matrix - high
    middle = (rest.view(torch.int32) & _HIGH_BITS).view(torch.float32)
    return torch.cat([high, middle, rest - middle]).to(torch.bfloat16)


def _logits_of_halves(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T (T, E) fp32 for x (T, d) in 16 bits and a weight in x's dtype or, beside bf16, in fp32."""
    if weight.dtype == x.dtype:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x, _bf16_parts(weight).t(), out_dtype=torch.float32).unflatten(1, (3, -1)).sum(1)


def _weight_grad(d_logits: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """d_logits^T x (E, d) in ``dtype``, the weight's: x's, to which d_logits (T, E) is rounded, or fp32 beside bf16.

    The GEMM's output is fp32: one that is split over the tokens then also keeps its partial sums in fp32.
    """
    if dtype == x.dtype:
        return torch.mm(d_logits.to(dtype).t(), x, out_dtype=torch.float32).to(dtype)
    return torch.mm(_bf16_parts(d_logits.t()), x, out_dtype=torch.float32).unflatten(0, (3, -1)).sum(0)


class _HalfLinear(torch.autograd.Function):
    """`_UpcastLinear` in fp32 for a 16-bit x, on a GPU's 16-bit tensor cores. Returns logits and x.

    fp32 holds the product of two bf16 or two fp16 numbers exactly, and tensor cores accumulate in fp32. The logits are
    therefore those of the upcast operands, except for the order of the sums, in a tenth of the time. Gradients in 16
    bits are computed from d_logits in 16 bits, as autograd does for any 16-bit linear layer.

    The experts read the second output, x. Its gradient is added in the GEMM that computes the router's share of dx:
    autograd's own sum would read both shares and write a third tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, invariance: Invariance
    ) -> tuple[Tensor, Tensor]:
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        with without_autocast(x.device.type):
            logits = ops.invariant_logits(x, weight) if invariance == "batch" else _logits_of_halves(x, weight)
            # Not in place: torch.compile would lose the gradient.
            return logits if bias is None else logits + bias, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor | None, dx_of_rest: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_logits is None:
            return dx_of_rest, None, None, None
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        with without_autocast(x.device.type):
            dx = None
            if need_x:
                rounded, half = d_logits.to(x.dtype), weight.to(x.dtype)
                dx = torch.mm(rounded, half) if dx_of_rest is None else ops.input_grad(rounded, half, dx_of_rest)
            d_weight = _weight_grad(d_logits, x, weight.dtype) if need_weight else None
            d_bias = d_logits.sum(0).to(ctx.bias_dtype) if need_bias else None
        return dx, d_weight, d_bias, None


@constant_when_traced
def has_exact_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies matrices of ``dtype`` on ``device`` with fp32 accumulation and fp32 results.

    Only CUDA does, and for fp16 only without ``allow_fp16_accumulation``.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return dtype == torch.bfloat16 or (
        dtype == torch.float16 and not torch.backends.cuda.matmul.allow_fp16_accumulation
    )


class RouterOutput(NamedTuple):
    """logits (T, E) fp32 or fp64 · x (T, d): the input. The experts must read this x, so that the router's backward can
    add their dx to its own; it shares the input's memory and must not be written.
    """

    logits: Tensor
    x: Tensor


def checked_output(
    out: Any, x: Tensor, cfg: MoEConfig, token_mask: Tensor | None, expert_ids: Tensor | None
) -> RouterOutput | Routing:
    """A custom router's output ``out`` for x (T, d), with plain logits wrapped in a `RouterOutput`. ValueError: it does
    not fit ``cfg`` or the arguments of the layer's forward.
    """
    tokens, experts = x.shape[0], cfg.num_experts
    if isinstance(out, Tensor):
        if out.ndim != 2 or out.shape[0] != tokens or out.shape[1] != experts:
            raise ValueError(
                f"router must give logits (T, E) = ({tokens}, {experts}) for x (T, d), got shape {tuple(out.shape)}; "
                "let it give one row for each token and one column for each of cfg.num_experts"
            )
        return RouterOutput(out, x)
    if not isinstance(out, Routing):
        raise ValueError(
            f"router must give logits (T, E) or a Routing, got {type(out).__name__}; return a tensor or tilemoe.Routing"
        )
    if out.plan.num_tokens != tokens or out.plan.num_experts != experts:
        raise ValueError(
            f"router gave a Routing of {out.plan.num_tokens} tokens and {out.plan.num_experts} experts, not "
            f"{tokens} and {experts}; make its plan for x's tokens and cfg.num_experts"
        )
    if token_mask is not None:
        raise ValueError(
            "token_mask needs a router that gives logits; let one that gives a Routing leave them out of its plan"
        )
    if expert_ids is not None:
        raise ValueError(
            "expert_ids needs a router that gives logits, which score them; let one that gives a Routing replay them"
        )
    if cfg.rounding is not None:
        raise ValueError("cfg.rounding needs a router that gives logits; set it to None for one that gives a Routing")
    return out


class Router(nn.Module):
    """``logits = x weight^T + bias``, in fp32 (fp64 for fp64 x or weights), regardless of autocast.

    weight (E, d) · bias (E,) or None · selection_bias (E,) fp32 buffer or None, part of the state dict
    """

    selection_bias: Tensor | None

    def __init__(
        self, cfg: MoEConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        require_type("cfg", cfg, MoEConfig)
        require_factory(device, dtype, FLOAT_DTYPES)
        self.initializer_range, self.invariance = cfg.initializer_range, cfg.invariance
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(cfg.num_experts, device=device, dtype=dtype)) if cfg.router.bias else None
        selection_bias = None
        if cfg.router.selection_bias:
            selection_bias = torch.empty(cfg.num_experts, device=device, dtype=torch.float32)
        self.register_buffer("selection_bias", selection_bias)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        normal_(self.weight, self.initializer_range, generator)
        for bias in (self.bias, self.selection_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> RouterOutput:
        """x (T, d) -> `RouterOutput`. ValueError: x's shape or dtype is wrong, it is not on the weights' device, or no
        kernel for that device computes logits with ``cfg.invariance``.
        """
        require_tensors({"x": x})
        refuse_transforms("tilemoe.MoE", x, self.weight)
        if x.ndim != 2 or x.shape[1] != self.weight.shape[1]:
            raise ValueError(f"x must be (T, d) with d = {self.weight.shape[1]}, got shape {tuple(x.shape)}")
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"x must be bfloat16, float16, float32 or float64, got {x.dtype}")
        if x.device != self.weight.device:
            raise ValueError(f"x is on {x.device} but the weights are on {self.weight.device}; move them to one device")
        is_split = (x.dtype, self.weight.dtype, self.invariance) == (torch.bfloat16, torch.float32, "none")
        if (is_split or x.dtype == self.weight.dtype) and has_exact_products(x.device, x.dtype):
            logits, handed_on = _HalfLinear.apply(x, self.weight, self.bias, self.invariance)
            return RouterOutput(logits, handed_on if x.requires_grad else x)  # x: or the experts would compute dx
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        return RouterOutput(_UpcastLinear.apply(x, self.weight, self.bias, dtype, self.invariance), x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keep the selection bias in fp32 through ``module.to(torch.bfloat16)``: bf16 would lose its small steps."""
        before = self.selection_bias
        super()._apply(fn, recurse)
        after = self.selection_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            self.selection_bias = before.to(after.device)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        if self.selection_bias is not None:  # with assign=True it has the state's dtype
            self.selection_bias = self.selection_bias.float()

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}, bias={self.bias is not None}"
