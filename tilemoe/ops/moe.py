"""`moe`, the public differentiable expert MLP, and the checks of its arguments. `ops.experts` computes it.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.checks import require_bool, require_choice, shown
from tilemoe.config import GATE_UP_LAYOUTS, PRECISIONS, SAVES, require_save
from tilemoe.kernels.choose import choose_experts
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats import fp8
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.kernels.experts.registry import backend_of
from tilemoe.ops import experts as expert_ops
from tilemoe.plan import RoutingPlan, with_sums
from tilemoe.runtime.operator import is_differentiable
from tilemoe.runtime.tensors import require_tensors
from tilemoe.runtime.tracing import autocast_dtype, warn_once


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
    kernels: str | Backend | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
    precision: str = "bf16",
    accumulate: bool = False,
    save: str = "full",
) -> Tensor:
    """``o_t = sum over t's experts e of score * (w2_e act(w1_e x_t + b1_e) + b2_e)``: (T, d) in x's dtype.

    x (T, d); w1 (E, 2n, d) for a gated activation, rows [gate; up] or interleaved, else (E, n, d); w2 (E, d, n);
    b1 (E, 2n or n); b2 (E, d); scores (T, K) for a top-K plan, (P,) for a plan of pairs, any float dtype, computed in
    fp32 or better. x, w1, w2, b1, b2 share one float dtype, except under autocast, which casts them to its own.
    Weights may have any strides. ``recompute="up_proj"`` keeps no h and runs the up projection again in backward.
    ``kernels``: a `Backend`, or the name that one is registered by; None chooses by device, dtype and shape.
    ``precision="fp8"`` quantises to e4m3 the operands of the up and down projections, of their dgrads (up_proj,
    down_proj, down_proj_dgrad, up_proj_dgrad) and of wide layers' weight gradients (down_proj_wgrad, up_proj_wgrad),
    where a backend can (see `select_kernels`). Where none can, the operands stay as with "bf16" and a warning says so
    once; a backend given as ``kernels`` raises ValueError instead. ``save="fp8"`` keeps h, the pre-activation (rows, 2n
    or n), in e4m3 between forward and backward, with one scale per 128 elements of a row; h's width must be a multiple
    of 128. o has the same bits; the gradients are those of the quantised h. It cannot be used with ``recompute``, in
    fp64, or on a GPU below compute capability 8.9.

    ``accumulate=True`` is for several backwards per step. If w1 and w2 are leaves, the kernels add their gradients to
    ``.grad`` in fp32 (fp64 for fp64), which becomes the leaves' ``grad_dtype``, and autograd adds nothing. With a
    tensor hook, ``create_graph=True``, autograd.grad, anomaly detection or compiled autograd, in a graph of
    torch.compile or if ``.grad`` has another dtype, autograd accumulates as usual.

    ValueError names the argument that is wrong. Differentiable once in x, w1, w2, scores, b1, b2.

    Examples:
        >>> x, w1, w2 = torch.randn(5, 16), torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)
        >>> scores, expert_ids = torch.randn(5, 4).softmax(-1).topk(2)
        >>> plan = tilemoe.plan_topk(expert_ids, num_experts=4)
        >>> o = tilemoe.moe(x, w1, w2, plan, scores)
        >>> torch.allclose(o, tilemoe.reference.moe(x, w1, w2, plan, scores), rtol=1e-4, atol=1e-4)
        True
    """
    check_options(gate_up, recompute, precision, save, accumulate)
    require_tensors({"x": x, "w1": w1, "w2": w2, "scores": scores}, {"b1": b1, "b2": b2})
    spec = activation_spec(activation, gate_up, activation_limit, activation_alpha)
    accumulate = accumulate and w1.is_leaf and w2.is_leaf
    x, w1, w2, b1, b2 = cast_under_autocast(x, w1, w2, b1, b2)
    check_tensors(x, w1, w2, b1, b2, spec.width_factor)
    check_plan(x, w1, plan, scores)
    if save == "fp8":
        _check_fp8_save(x.dtype, w1.shape[1])
    backend = backend_for(kernels, w2, w2.shape[1:], precision)
    s = scores.reshape(-1)
    is_recorded = is_differentiable(x, w1, w2, s, b1, b2)
    if is_recorded:  # else only `combine` reads the scores, and converts them itself
        s = s.to(torch.promote_types(torch.promote_types(s.dtype, x.dtype), torch.float32))
    s = s.contiguous()  # kernels index it by position, and reshape may have returned a strided view
    kept = save if recompute is None and is_recorded else "none"
    if plan.peers is not None:
        plan = with_sums(plan, x)
    o: Tensor = expert_ops.moe(x, w1, w2, s, b1, b2, kept, accumulate, plan, spec, backend)[0]
    return o


def cast_under_autocast(x: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The tensors, cast to autocast's dtype if autocast is on, as in PyTorch's GEMMs; fp64, integers and packed weights
    stay as they are, and if x is fp64, all tensors do."""
    tensors = (x, *rest)
    dtype = autocast_dtype(x.device.type)
    if dtype is None or x.dtype == torch.float64:
        return tensors
    castable = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(t if not isinstance(t, Tensor) or t.dtype not in castable else t.to(dtype) for t in tensors)


def backend_for(kernels: str | Backend | None, like: Tensor, widths: Sequence[int], precision: str = "bf16") -> Backend:
    """The backend that ``kernels`` names; None: one chosen by ``like``'s device and dtype, the layer's ``widths``
    (d, n) and the precision.

    ValueError: the named backend computes in another precision, or cannot compute in FP8 for these operands.
    """
    if kernels is None:
        chosen = choose_experts(like.device, like.dtype, widths, precision)
        if precision != "bf16" and (type(chosen.impl).precision != precision or like.device.type == "cpu"):
            # No backend serves FP8 here, or a CPU emulates it.
            warn_once(f"precision={precision!r}: experts in {like.dtype} use kernels={chosen.name!r}, {chosen.reason}")
        return chosen.impl
    backend = backend_of(kernels)
    computes_in = type(backend).precision  # of the class, a constant for torch.compile
    if computes_in != precision:
        raise ValueError(
            f"kernels={backend.name!r} computes in {computes_in}, but precision is {precision!r}: change one, or "
            "leave kernels out"
        )
    operands = type(backend).format
    why = None if operands is None else operands.why_not(like.dtype, *widths)
    if why is not None:
        raise ValueError(f"kernels={backend.name!r} cannot serve precision={precision!r}: {why}; leave one of them out")
    return backend


def check_options(
    gate_up: Any, recompute: Any, precision: Any = "bf16", save: Any = "full", accumulate: Any = False
) -> None:
    """ValueError if `moe` does not know an option, or two options contradict each other."""
    choices = ("gate_up", gate_up, GATE_UP_LAYOUTS), ("precision", precision, PRECISIONS), ("save", save, SAVES)
    for name, value, known in choices:
        if not isinstance(value, str) or value not in known:  # inline, because every forward runs this
            require_choice(name, value, known)
    if not isinstance(accumulate, bool):
        require_bool("accumulate", accumulate)
    if recompute is not None and not (isinstance(recompute, str) and recompute == "up_proj"):
        raise ValueError(f"recompute must be None or 'up_proj', got {shown(recompute)}")
    if recompute is not None and save != "full":
        raise ValueError(f"save={save!r} needs h, which recompute={recompute!r} drops; leave one of them out")


def _check_fp8_save(dtype: torch.dtype, width: int) -> None:
    """ValueError if h (R_max, ``width``) of this dtype cannot be saved in FP8."""
    require_save("fp8", width)
    why = fp8.why_not(dtype)
    if why is not None:
        raise ValueError(f"save='fp8': {why}; use save='full', or another dtype")


def check_tensors(x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, width_factor: int) -> None:
    """ValueError that names the tensor whose shape, dtype or device does not match the others."""
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
    fitting = (width_factor * d, n)  # w1's last dimensions if w2 was passed transposed
    if x.shape[1] == n != d and tuple(w1.shape) in ((experts, *fitting), (experts, *reversed(fitting))):
        raise ValueError(f"w2 must be (E, d, n) {(experts, n, d)}, got {tuple(w2.shape)}; pass w2.transpose(1, 2)")
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
    if scores.dtype not in FLOAT_DTYPES:
        raise ValueError(f"scores must be bfloat16, float16, float32 or float64, got {scores.dtype}")
    ndim = 2 if plan.pair_start_of_token is None else 1
    if scores.ndim != ndim or scores.numel() != plan.num_pairs or (ndim == 2 and scores.shape[0] != x.shape[0]):
        form = "(T, K)" if ndim == 2 else "(P,)"
        raise ValueError(f"scores must be {form} with the plan's {plan.num_pairs} pairs, got {tuple(scores.shape)}")
