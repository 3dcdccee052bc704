"""The differentiable expert MLP: `moe`, and its backward, which keeps nothing of size (routed rows x hidden_size).

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs · R_max row capacity

Paper (arXiv 2512.14080), section 3: with ``da' = do w2`` the score's gradient is ``ds = <da', a>``, so neither y nor
the gathered x has to be saved. Saved: x, h, the scores and the plan's indices (and the weights, which are alive
anyway).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec, activation_spec
from tilemoe.config import GATE_UP_LAYOUTS
from tilemoe.kernels.base import KernelSet, compute_dtype, is_column_major
from tilemoe.kernels.select import FLOAT_DTYPES, kernel_set, name_for
from tilemoe.ops import library
from tilemoe.ops.eager import is_differentiable, is_plain
from tilemoe.ops.replayed import is_replayable
from tilemoe.routing.plan import RoutingPlan
from tilemoe.tracing import autocast_dtype, constant_when_traced

_RECOMPUTE = (None, "up_proj")
_ONCE = (
    "tilemoe.moe is differentiable once: its backward cannot be differentiated. Use tilemoe.reference.moe for "
    "higher derivatives, or take the first gradient without create_graph=True."
)


def moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: RoutingPlan,
    scores: Tensor,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    recompute: str | None = None,
    kernels: str | KernelSet | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
) -> Tensor:
    """``o_t = sum over t's experts e of score * (w2_e act(w1_e x_t + b1_e) + b2_e)``: (T, d) in x's dtype.

    x (T, d); w1 (E, 2n, d) for a gated activation, rows [gate; up] or interleaved, else (E, n, d); w2 (E, d, n);
    b1 (E, 2n or n); b2 (E, d); scores (T, K) for a top-K plan, (P,) for a plan of pairs, any float dtype, computed in
    fp32 or better. x, w1, w2, b1, b2 share one float dtype, except under autocast, which casts them to its own.
    Weights may have any strides. ``recompute="up_proj"`` keeps no h and runs the up projection again in backward.
    ``kernels`` names a KernelSet; None chooses by device, dtype and shape.

    ValueError names the argument that is off. Differentiable once in x, w1, w2, scores, b1, b2.
    """
    check_options(gate_up, recompute)
    check_types({"x": x, "w1": w1, "w2": w2, "scores": scores}, {"b1": b1, "b2": b2})
    spec = activation_spec(activation, gate_up, activation_limit, activation_alpha)
    x, w1, w2, b1, b2 = cast_under_autocast(x, w1, w2, b1, b2)
    check_tensors(x, w1, w2, b1, b2, spec.width_factor)
    check_plan(x, w1, plan, scores)
    name = _kernels_name(kernels, w2)
    s = scores.reshape(-1)
    if is_differentiable(x, w1, w2, s, b1, b2):  # otherwise only `combine` reads them, and upcasts as it does
        s = s.to(torch.promote_types(s.dtype, compute_dtype(x.dtype)))
    s = s.contiguous()  # kernels index it by position; of one column, or of an expanded tensor, reshape is a view
    inputs = (x, w1, w2, s, b1, b2)
    keep_h = recompute is None and is_differentiable(*inputs)
    return library.moe(*inputs, keep_h, *library.tail_args(plan, spec, name))[0]


def compile_ahead(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    experts_per_token: int,
    spec: ActivationSpec,
    recompute: str | None = None,
    kernels: str | KernelSet | None = None,
) -> None:
    """Begin to compile what `moe` will launch for these operands, once K experts are chosen for each token.

    Scores of fp32, whose gradient is wanted if any other is. Nothing is done where the operands are not plain tensors
    on the current GPU, will be cast, or somebody watches: then `moe` begins.
    """
    given = (x, w1, w2, b1, b2)
    if not is_plain(*given) or not is_replayable(x) or torch.is_autocast_enabled(x.device.type):
        return
    tokens, experts = x.shape[0], w1.shape[0]

    def index(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device="meta")

    pairs = tokens * experts_per_token
    plan = RoutingPlan(index(pairs), index(pairs), index(pairs), None, index(experts + 1), experts, tokens)
    s = torch.empty(pairs, dtype=torch.float32, device="meta")
    keep_h = recompute is None and is_differentiable(*given)
    tail = library.tail_args(plan, spec, _kernels_name(kernels, w2))
    library.ahead_of_moe(x, w1, w2, s, b1, b2, keep_h, *tail)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w1, w2, s, b1, b2, keep_h, *tail = inputs
    h = output[1]
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    plan_tensors, ctx.options = tail[: library.NUM_PLAN_TENSORS], tail[library.NUM_PLAN_TENSORS :]
    ctx.save_for_backward(x, w1, w2, s, b1, b2, h if keep_h else None, *plan_tensors)


def _backward(ctx: Any, do: Tensor | None, _dh: None) -> tuple[Tensor | None, ...]:
    """B1 to B5, each step only if something asks for its result; h is given back as soon as B1 has read it."""
    need_x, need_w1, need_w2, need_s, need_b1, need_b2 = ctx.needs_input_grad[:6]
    no_grad_of_rest = (None,) * (1 + library.NUM_TAIL)
    if do is None:
        return (None,) * 6 + no_grad_of_rest
    do = do.contiguous()
    x, w1, w2, s, b1, b2, h, *plan_tensors = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph=True
        do = _DependentOnInputs.apply(do, x, w1, w2, s, b1, b2)
    tail = (*plan_tensors, *ctx.options)
    dx = dw1 = dw2 = ds = db1 = db2 = None
    if need_b2:
        db2 = library.down_proj_bias_grad(do, s, *tail).to(b2.dtype)
    if need_x or need_w1 or need_w2 or need_s or need_b1:
        if h is None:
            h = library.up_proj(x, w1, b1, *tail)
        dh, ds, a_scaled = library.down_proj_act_grad(do, w2, b2, h, s, *tail)
        del h
        ctx.maybe_clear_saved_tensors()  # frees h now; does nothing under retain_graph
        if need_w2:
            dw2 = library.down_proj_weight_grad(do, a_scaled, is_column_major(w2), *tail)
        del a_scaled
        if need_b1:
            db1 = library.up_proj_bias_grad(dh, *tail).to(b1.dtype)
        if need_x:  # before dw1: dx_rows is alive beside every gradient made so far
            dx = library.up_proj_input_grad(dh, w1, *tail)
            _announce(ctx, dx, ds if need_s else None)
        if need_w1:
            dw1 = library.up_proj_weight_grad(x, dh, is_column_major(w1), *tail)
    return (dx, dw1, dw2, ds if need_s else None, db1, db2, *no_grad_of_rest)


def _announce(ctx: Any, dx: Tensor, ds: Tensor | None) -> None:
    """Say that the gradients of x and, if it is wanted, of s are made to the node that made x, if it asks: it may send
    them away beside the weights' GEMMs.

    The node gets them from autograd all the same, and something else where they have other uses or a hook.
    """
    node, _ = ctx.next_functions[0]
    are_made = getattr(node, "input_grads_are_made", None)
    if are_made is not None:
        are_made(dx, ds)


class _DependentOnInputs(torch.autograd.Function):
    """The output's gradient, made to depend on the inputs: h, which does, is saved without a graph.

    So no gradient can be differentiated: with frozen weights, dx would pass for a constant in a second derivative.
    """

    @staticmethod
    def forward(ctx: Any, do: Tensor, *inputs: Tensor | None) -> Tensor:
        return do.view_as(do)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(_ONCE)


library.moe.register_autograd(_backward, _setup_context)
for _op in library.BACKWARD_OPS:
    _op.refuse_autograd(_ONCE)


def cast_under_autocast(x: Tensor, *rest: Tensor | None) -> tuple[Any, ...]:
    """Cast to autocast's dtype where it is on, as PyTorch's own GEMMs do; fp64 and integers are left alone."""
    tensors = (x, *rest)
    dtype = autocast_dtype(x.device.type)
    if dtype is None or x.dtype == torch.float64:
        return tensors
    castable = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t if t is None or t.dtype not in castable else t.to(dtype) for t in tensors)


def _kernels_name(kernels: str | KernelSet | None, w2: Tensor) -> str:
    if kernels is None:
        return name_for(w2.device, w2.dtype, *w2.shape[1:])
    if not isinstance(kernels, KernelSet):
        return _known_name(kernels)
    if kernel_set(kernels.name) != kernels.because(""):
        raise ValueError(f"kernels: this KernelSet is not the registered one called {kernels.name!r}; pass its name")
    return kernels.name


@constant_when_traced
def _known_name(kernels: str) -> str:
    return kernel_set(kernels).name


def check_options(gate_up: str, recompute: str | None) -> None:
    """ValueError for a value that `moe` does not know."""
    if gate_up not in GATE_UP_LAYOUTS:
        raise ValueError(f"gate_up must be one of {', '.join(GATE_UP_LAYOUTS)}; got {gate_up!r}")
    if recompute not in _RECOMPUTE:
        raise ValueError(f"recompute must be None or 'up_proj', got {recompute!r}")


def check_types(tensors: dict[str, Any], optional: dict[str, Any]) -> None:
    """ValueError that names what is not a tensor; ``optional`` may be None."""
    for name, value in {**tensors, **optional}.items():
        if not isinstance(value, Tensor) and not (name in optional and value is None):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")


def check_tensors(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, width_factor: int) -> None:
    """ValueError that names the tensor whose shape, dtype or device does not go with the others."""
    if x.ndim != 2:
        raise ValueError(f"x must be (T, d), got shape {tuple(x.shape)}; flatten the leading dimensions")
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be bfloat16, float16, float32 or float64, got {x.dtype}")
    if w2.ndim != 3:
        raise ValueError(f"w2 must be (E, d, n), got shape {tuple(w2.shape)}")
    experts, d, n = w2.shape
    if d == 0 or n == 0 or experts == 0:
        raise ValueError(f"w2 (E, d, n) must have no empty dimension, got shape {tuple(w2.shape)}")
    width = width_factor * n
    expected = {"x": (x, (x.shape[0], d)), "w1": (w1, (experts, width, d))}
    expected |= {} if b1 is None else {"b1": (b1, (experts, width))}
    expected |= {} if b2 is None else {"b2": (b2, (experts, d))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape} to go with w2 {tuple(w2.shape)}, got {tuple(tensor.shape)}")
    for name, (tensor, _) in {**expected, "w2": (w2, ())}.items():
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype} but x is {x.dtype}; cast one of them, or use autocast")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}; move them to one device")


def check_plan(x: Tensor, w1: Tensor, plan: RoutingPlan, scores: Tensor) -> None:
    """ValueError if plan or scores are not for these tokens and experts."""
    if not isinstance(plan, RoutingPlan):
        raise ValueError(
            f"plan must be a RoutingPlan (plan_topk, plan_pairs or route make one), got {type(plan).__name__}"
        )
    if plan.num_tokens != x.shape[0]:
        raise ValueError(f"plan was made for {plan.num_tokens} tokens, but x has {x.shape[0]}")
    if plan.num_experts != w1.shape[0]:
        raise ValueError(f"plan was made for {plan.num_experts} experts, but w1 has {w1.shape[0]}")
    for name, device in (("plan", plan.device), ("scores", scores.device)):
        if device != x.device:
            raise ValueError(f"{name} is on {device} but x is on {x.device}; move them to one device")
    if not scores.dtype.is_floating_point:
        raise ValueError(f"scores must be floating point, got {scores.dtype}")
    ndim = 2 if plan.pair_start_of_token is None else 1
    if scores.ndim != ndim or scores.numel() != plan.num_pairs or (ndim == 2 and scores.shape[0] != x.shape[0]):
        form = "(T, K)" if ndim == 2 else "(P,)"
        raise ValueError(f"scores must be {form} with the plan's {plan.num_pairs} pairs, got {tuple(scores.shape)}")
