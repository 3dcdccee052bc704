"""`moe_lora`, the expert MLP with low-rank adapters on frozen weights: merges no weight, saves nothing of size (R, d).

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · r rank
w = 2n gated, n ungated · P pairs · c the adapters' scale

Expert e computes with ``w1_e + c up_b_e up_a_e`` and ``w2_e + c down_b_e down_a_e`` (LoRA, arXiv 2106.09685, one pair
of adapters for each expert and matrix). The low-rank products are separate GEMMs over the same rows, by the same
kernels: ``u = x up_a^T`` and ``v = do down_b`` gather inside their loads, as up_proj and down_proj_dgrad do.
Saved for backward: u (R_max, r) and what `tilemoe.moe` saves: x, h (R_max, w), the scores and the plan. The adapters
get gradients; the weights do not. w1 and w2 may be packed in 4 bits per value: kernels decode each tile before they
multiply it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec, activation_spec
from tilemoe.checks import require_type
from tilemoe.kernels.experts.base import Backend, shape_of
from tilemoe.kernels.experts.formats.dense import (
    FLOAT_DTYPES,
    compute_dtype,
    empty_weight_grad,
    is_column_major,
)
from tilemoe.kernels.experts.formats.packed import PackedWeight, Weight
from tilemoe.kernels.experts.memory import backward_slices, forward_slices
from tilemoe.kernels.experts.table import PACKED
from tilemoe.ops.experts import gemm_flops, routed_operator, saved_of
from tilemoe.ops.moe import backend_for, cast_under_autocast, check_options, check_plan, check_tensors
from tilemoe.plan import PLAN_ARRAYS, RoutingPlan, plan_of, with_sums, without_derived
from tilemoe.runtime.tensors import require_tensors

_DENSE = "dense"
_PARTS = 3  # the most tensors that a weight consists of
_UP_A, _NUM_ADAPTED = 4, 8  # up_a's index, and the count, of x, w1, w2, the scores and the adapters
_LINEAR = ActivationSpec("relu")  # any ungated activation: `Backend.up_proj` returns pre-activations


class Adapters(NamedTuple):
    """up_a (E, r, d) and up_b (E, w, r) on w1, down_a (E, r, n) and down_b (E, d, r) on w2; ``scale`` multiplies both.

    Adapters may have any float dtype; they are cast to x's.
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    scale: float


def moe_lora(
    x: Tensor,
    w1: Weight,
    w2: Weight,
    plan: RoutingPlan,
    scores: Tensor,
    adapters: Adapters,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    kernels: str | Backend | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
) -> Tensor:
    """`tilemoe.moe` with the weights ``w1 + scale up_b up_a`` and ``w2 + scale down_b down_a``: (T, d) in x's dtype.

    Differentiable once in x, the scores and the adapters; w1, w2, b1 and b2 must be frozen. w1 and w2 may each be
    a `PackedWeight` (`tilemoe.kernels.experts.formats`), which is multiplied in x's dtype.

    Raises:
        ValueError: an adapter's shape, dtype or device does not match the weights, a weight or bias requires a
            gradient, or the backend ``kernels`` cannot read a packed weight's format.
    """
    check_options(gate_up, recompute=None)
    require_type("adapters", adapters, Adapters)
    named = dict(zip(Adapters._fields[:4], adapters[:4], strict=True))
    frozen = _named_tensors("w1", w1) | _named_tensors("w2", w2)
    require_tensors({"x": x, **frozen, "scores": scores, **named}, {"b1": b1, "b2": b2})
    spec = activation_spec(activation, gate_up, activation_limit, activation_alpha)
    _check_frozen({**frozen, "b1": b1, "b2": b2})
    x, w1, w2, b1, b2 = cast_under_autocast(x, w1, w2, b1, b2)
    like1, like2 = _like(w1, x.dtype), _like(w2, x.dtype)
    check_tensors(x, like1, like2, b1, b2, spec.width_factor)
    check_plan(x, like1, plan, scores)
    _check(x, like2, adapters, spec)
    low_rank = [adapter.to(x.dtype) for adapter in adapters[:4]]
    backend = backend_for(kernels, like2, (*like2.shape[1:], adapters.up_a.shape[1]))
    for weight in (w1, w2):
        if isinstance(weight, PackedWeight):
            _check_packed(weight, backend, *like2.shape[1:])
    s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype))).contiguous()
    (data1, *scales1), (data2, *scales2) = _parts(w1), _parts(w2)
    tensors = (x, data1, data2, s, *low_rank, b1, b2, *scales1, *scales2)
    plan = with_sums(plan, x)
    return _forward(*tensors, f"{_format(w1)} {_format(w2)}", adapters.scale, plan, spec, backend)[0]


def _named_tensors(name: str, weight: Weight) -> dict[str, Any]:
    """The tensors of a weight, by the names that error messages use."""
    if not isinstance(weight, PackedWeight):
        return {name: weight}
    return {name if part == "codes" else f"{name}.{part}": tensor for part, tensor in weight.tensors.items()}


def _parts(weight: Weight) -> tuple[Tensor | None, ...]:
    """A weight as operators take it: its data, scales and scales of scales; None for those that it lacks."""
    tensors = tuple(weight.tensors.values()) if isinstance(weight, PackedWeight) else (weight,)
    return (*tensors, *[None] * (_PARTS - len(tensors)))


def _format(weight: Weight) -> str:
    return weight.name if isinstance(weight, PackedWeight) else _DENSE


def _read(formats: str, parts: Sequence[tuple[Tensor | None, ...]], backend: Backend) -> list[Weight]:
    """The weights that `_parts` and `_format` describe, in the form that the backend's GEMMs read."""
    found: list[Weight] = []
    for name, (data, *scales) in zip(formats.split(" "), parts, strict=True):
        assert data is not None, "a weight has data"
        given = [part for part in scales if part is not None]
        found.append(data if name == _DENSE else backend.whole_scales(PACKED[name](data, *given)))
    return found


def _like(weight: Weight, dtype: torch.dtype) -> Tensor:
    """A tensor of the weight's shape, for checks: the weight, or if it is packed an expanded scalar of ``dtype``."""
    if not isinstance(weight, PackedWeight):
        return weight
    return weight.codes.new_empty((), dtype=dtype).expand(weight.shape)


def _check_packed(weight: PackedWeight, backend: Backend, d: int, n: int) -> None:
    why = type(weight).why_not(d, n)
    if why is not None:
        raise ValueError(why)
    if weight.name not in type(backend).packed:  # of the class, a constant for torch.compile
        raise ValueError(
            f"kernels={backend.name!r} cannot read weights in {weight.name.upper()}; leave kernels out, or pass 'torch'"
        )


def _check_frozen(weights: dict[str, Tensor | None]) -> None:
    """ValueError that names a weight, or the scales of a packed one, that requires a gradient."""
    for name, weight in weights.items():
        if weight is not None and weight.requires_grad:
            raise ValueError(f"{name} must be frozen under adapters; call {name}.requires_grad_(False)")


def _check(x: Tensor, w2: Tensor, adapters: Adapters, spec: ActivationSpec) -> None:
    """ValueError that names the adapter whose shape, dtype or device does not match the weights."""
    (experts, d, n), width = w2.shape, spec.width_factor * w2.shape[2]
    if adapters.up_a.ndim != 3 or adapters.up_a.shape[1] == 0:
        raise ValueError(f"up_a must be (E, r, d) with r >= 1, got shape {tuple(adapters.up_a.shape)}")
    rank = adapters.up_a.shape[1]
    wanted = {"up_a": (experts, rank, d), "up_b": (experts, width, rank)}
    wanted |= {"down_a": (experts, rank, n), "down_b": (experts, d, rank)}
    for name, shape in wanted.items():
        adapter = getattr(adapters, name)
        if tuple(adapter.shape) != shape:
            raise ValueError(f"{name} must be {shape} to go with w2 {tuple(w2.shape)}, got {tuple(adapter.shape)}")
        if adapter.device != x.device:
            raise ValueError(f"{name} is on {adapter.device} but x is on {x.device}; move them to one device")
        if adapter.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {adapter.dtype}")


def _gathered(backend: Backend, x: Tensor, weight: Weight, plan: RoutingPlan) -> Tensor:
    """(R_max, q): ``x weight_e^T`` for each row of expert e; the kernel gathers x (T, p) by token; weight (E, q, p)."""
    return backend.up_proj(x, weight, None, plan, _LINEAR)


def _run(
    x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor,
    b1: Tensor | None, b2: Tensor | None, scales1: Tensor | None, nested1: Tensor | None, scales2: Tensor | None,
    nested2: Tensor | None, formats: str, scale: float, plan: RoutingPlan, spec: ActivationSpec, backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o (T, d), h (R_max, w), u (R_max, r))."""
    plan = without_derived(plan)
    frozen1, frozen2 = _read(formats, ((w1, scales1, nested1), (w2, scales2, nested2)), backend)
    d, n = frozen2.shape[1:]
    u = _gathered(backend, x, up_a, plan)
    h = backend.up_proj(x, frozen1, b1, plan, spec)
    h.add_(backend.down_proj(u, up_b, None, plan), alpha=scale)
    a = backend.activation(h, plan, spec)
    p = backend.down_proj(a, down_a, None, plan)
    o = plan.sums_like(x, d)
    for columns in forward_slices(shape_of(x, d, n, plan, spec)):
        y = backend.down_proj(a, frozen2[:, columns], None if b2 is None else b2[:, columns], plan)
        y.add_(backend.down_proj(p, down_b[:, columns], None, plan), alpha=scale)
        backend.combine(y, s, plan, o[:, columns])
        del y
    return o, h, u


def _fake(
    x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, up_b: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, plan, _, _ = rest
    (_, width, rank), capacity = up_b.shape, plan.capacity
    return x.new_empty(x.shape), x.new_empty(capacity, width), x.new_empty(capacity, rank)


def _run_grad(
    do: Tensor, x: Tensor | None, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor,
    down_b: Tensor, b2: Tensor | None, scales1: Tensor | None, nested1: Tensor | None, scales2: Tensor | None,
    nested2: Tensor | None, h: Tensor, u: Tensor, formats: str, scale: float, plan: RoutingPlan, spec: ActivationSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, ds, dup_a, dup_b, ddown_a, ddown_b); dup_a is None if x is."""
    plan = without_derived(plan)
    frozen1, frozen2 = _read(formats, ((w1, scales1, nested1), (w2, scales2, nested2)), backend)
    d, n = frozen2.shape[1:]
    rows = _plan_of_rows(plan)
    v = _gathered(backend, do, down_b.transpose(1, 2), plan).mul_(scale)
    da = _gathered(backend, do, frozen2.transpose(1, 2), plan).add_(
        backend.down_proj(v, down_a.transpose(1, 2), None, plan)
    )
    dh, ds, a_scaled = backend.dact(da, do, b2, h, s, plan, spec)
    del da
    p = backend.down_proj(a_scaled, down_a, None, plan).mul_(scale)
    ddown_b = backend.down_proj_wgrad(do, p, plan, is_column_major(down_b))
    ddown_a = backend.up_proj_wgrad(a_scaled, v, rows, is_column_major(down_a))
    del a_scaled, p
    dup_b = backend.up_proj_wgrad(u, dh, rows, is_column_major(up_b)).mul_(scale)
    du = backend.down_proj(dh, up_b.transpose(1, 2), None, plan).mul_(scale)
    dup_a = None if x is None else backend.up_proj_wgrad(x, du, plan, is_column_major(up_a))
    dx = plan.sums_like(do, d)
    for columns in backward_slices(shape_of(do, d, n, plan, spec)):
        dx_rows = backend.up_proj_dgrad(dh, frozen1[:, :, columns], plan)
        dx_rows.add_(backend.up_proj_dgrad(du, up_a[:, :, columns], plan))
        backend.combine_grad(dx_rows, plan, dx[:, columns])
        del dx_rows
    return dx, ds, dup_a, dup_b, ddown_a, ddown_b


def _plan_of_rows(plan: RoutingPlan) -> RoutingPlan:
    """A plan whose rows are tokens of their own: wgrads then read a (R_max, .) tensor as their gathered operand."""
    own = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
    return replace(plan, token_of_row=own, num_tokens=plan.capacity, unchecked=True)


def _fake_grad(
    do: Tensor, x: Tensor | None, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor,
    down_b: Tensor, *rest: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dup_a, *others = (empty_weight_grad(t, t.shape, is_column_major(t)) for t in (up_a, up_b, down_a, down_b))
    return (do.new_empty(do.shape), s.new_empty(s.shape), None if x is None else dup_a, *others)


def _flops(x: Any, w1: Any, w2: Any, s: Any, up_a: Any, up_b: Any, down_a: Any, *rest: Any, **_: Any) -> int:
    d, w, n, r = up_a[2], up_b[1], down_a[2], up_a[1]  # not read from w1 and w2, which may be codes
    return gemm_flops(rest, d * w, n * d, r * (d + w), r * (n + d))


def _grad_flops(
    do: Any, x: Any, w1: Any, w2: Any, s: Any, up_a: Any, up_b: Any, down_a: Any, *rest: Any, **_: Any
) -> int:
    d, w, n, r = up_a[2], up_b[1], down_a[2], up_a[1]
    return gemm_flops(rest, d * w, n * d, 2 * r * (d + w), 2 * r * (n + d), r * n)  # the last: ``a down_a^T`` again


_ADAPTED = "x, Tensor w1, Tensor w2, Tensor s, Tensor up_a, Tensor up_b, Tensor down_a, Tensor down_b"
_SCALES = "Tensor? scales1, Tensor? nested1, Tensor? scales2, Tensor? nested2"
_forward = routed_operator(
    "moe_lora",
    f"Tensor {_ADAPTED}, Tensor? b1, Tensor? b2, {_SCALES}, str formats, float scale",
    "(Tensor, Tensor, Tensor)",
    _run,
    _fake,
    _flops,
)
_backward_op = routed_operator(
    "moe_lora_grad",
    f"Tensor do, Tensor? {_ADAPTED}, Tensor? b2, {_SCALES}, Tensor h, Tensor u, str formats, float scale",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_grad,
    _fake_grad,
    _grad_flops,
)


def _save(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.formats, ctx.scale, plan, ctx.spec, ctx.backend = args
    (x, *adapted), (_, *rest) = tensors[:_NUM_ADAPTED], tensors[_NUM_ADAPTED:]  # without b1
    _, h, u = output
    ctx.mark_non_differentiable(h, u)
    ctx.set_materialize_grads(False)
    ctx.num_tokens, ctx.peers = plan.num_tokens, plan.peers
    ctx.save_for_backward(saved_of(x, plan), *adapted, *rest, h, u, *plan.arrays)


def _backward(ctx: Any, do: Tensor | None, _dh: None, _du: None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * _NUM_ADAPTED
    x, *saved = ctx.saved_tensors  # read only once: under checkpointing each read recomputes
    if x is None and (ctx.needs_input_grad[_UP_A] or torch.is_grad_enabled()):
        x = ctx.peers.again()
    given, arrays = saved[: -len(PLAN_ARRAYS)], tuple(saved[-len(PLAN_ARRAYS) :])
    plan = with_sums(plan_of(arrays, ctx.num_tokens, peers=ctx.peers), do)
    routed = (plan, ctx.spec, ctx.backend)
    dx, ds, *adapters = _backward_op(do.contiguous(), x, *given, ctx.formats, ctx.scale, *routed)
    return (dx, None, None, ds, *adapters)


_forward.register_autograd(_backward, _save)
_backward_op.refuse_autograd(
    "tilemoe's experts with adapters are differentiable once: their backward cannot be differentiated. Take the first "
    "gradient without create_graph=True."
)
