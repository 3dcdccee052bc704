"""The expert MLP as operators that run on any backend: one for the forward (up_proj to combine), several for the
backward.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

x, do, dx (T, d) · w1 (E, w, d) · w2 (E, d, n) · b1 (E, w) · b2 (E, d) · s scores, flat · h, dh (R_max, w) ·
a, a_scaled (R_max, n) · o (T, d)

Paper (arXiv 2512.14080), section 3: with ``da' = do w2`` the score's gradient is ``ds = <da', a>``, so neither y nor
the gathered x has to be saved. Saved for backward: x, h, the scores and the plan's indices (and the weights, which
exist anyway). The backward is split into several operators so that h can be freed between them.

Every operator's last arguments are plan, spec and backend. Each call works on a copy of the plan without derived data:
concurrent calls must not share the tile schedulers' counter, and a recorded call must build its own tile lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.base import Backend, shape_of
from tilemoe.kernels.experts.formats.dense import compute_dtype, empty_weight_grad, is_column_major
from tilemoe.kernels.experts.formats.fp8 import BLOCK, ROWS
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.memory import backward_slices, forward_slices, inference_slices
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.ops.accumulation import sum_to_add_to
from tilemoe.ops.out_of_memory import advise
from tilemoe.plan import RoutingPlan, plan_of, with_sums, without_derived
from tilemoe.runtime.operator import Arguments, Operator

_NUM_ARRAYS = 5  # tensors in `RoutingPlan.arrays`
_ROW_OF_PAIR = -5  # index of row_of_pair in the arguments of `RoutedArguments.schema`
_ONCE = (
    "tilemoe.moe is differentiable once: its backward cannot be differentiated. Use tilemoe.reference.moe for "
    "higher derivatives, or take the first gradient without create_graph=True."
)


class RoutedArguments(Arguments):
    """Converts (..., plan, spec, backend) to a schema's arguments and back: the plan to its tensors, spec and backend
    to one string, since PyTorch's work per operator grows with the square of the number of arguments. The plan's peers
    are not converted.
    """

    schema = (
        "Tensor token_of_row, Tensor pair_of_row, Tensor row_of_pair, Tensor? pair_start_of_token, "
        "Tensor row_start_of_expert, SymInt num_tokens, str options"
    )

    def operands(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        plan = args[-3]
        return (*args[:-3], *plan.arrays, plan.sums, plan.num_tokens, *args[-2:])

    def flatten(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        *given, plan, spec, backend = args
        name = type(backend).name  # of the class: a constant for torch.compile
        options = f"{spec.name} {spec.gate_up} {spec.limit!r} {spec.alpha!r} {name}"
        return (*given, *plan.arrays, plan.num_tokens, options)

    def unflatten(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        *given, num_tokens, options = flat
        plan = plan_of(tuple(given[-_NUM_ARRAYS:]), num_tokens)
        spec, name = _parsed(options)
        return (*given[:-_NUM_ARRAYS], plan, spec, backend_named(name))


@lru_cache
def _parsed(options: str) -> tuple[ActivationSpec, str]:
    name, gate_up, limit, alpha, backend = options.split(" ")
    return ActivationSpec(name, gate_up, float(limit), float(alpha)), backend


ROUTED = RoutedArguments()


def routed_operator(
    name: str,
    args: str,
    returns: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
) -> Operator:
    """The operator ``tilemoe::name(args, plan, spec, backend) -> returns``; its OutOfMemoryError says what to do."""
    return Operator(name, run, f"({args}, {ROUTED.schema}) -> {returns}", fake, ROUTED, advise, flops=flops)


def _of_backward(
    args: str, returns: str, fake: Callable[..., Any], flops: Callable[..., int] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """A decorator: turns a function into the `routed_operator` of the same name, which refuses differentiation."""

    def make(run: Callable[..., Any]) -> Operator:
        operator = routed_operator(run.__name__, args, returns, run, fake, flops)
        operator.refuse_autograd(_ONCE)
        return operator

    return make


def _adding(run: Callable[..., Any]) -> Operator:
    """A decorator: turns a function that adds to a leaf's ``.grad`` into the operator of the same name.

    It has no schema, because it is never in a graph. It runs once per call, without an earlier run that only compiles:
    the forward's first call has compiled its kernels.
    """
    return Operator(run.__name__, run, arguments=ROUTED, advise=advise, compiles_first=False)


def gemm_flops(flat: Sequence[Any], *multiply_adds: int) -> int:
    """FLOPs of GEMMs with ``multiply_adds`` per pair of token and expert. Pairs of masked tokens count, too.

    flat: an operator's last arguments, including those of `RoutedArguments.schema`, with shapes in place of tensors.
    """
    (pairs,) = flat[_ROW_OF_PAIR]
    return 2 * pairs * sum(multiply_adds)


def _moe_flops(x: Any, w1: Any, w2: Any, *rest: Any, **_: Any) -> int:
    return gemm_flops(rest, prod(w1[1:]), prod(w2[1:]))


def _rows_weight_flops(rows: Any, weight: Any, *rest: Any, **_: Any) -> int:
    return gemm_flops(rest, prod(weight[1:]))


def _wgrad_flops(by_token: Any, by_row: Any, *rest: Any, **_: Any) -> int:
    return gemm_flops(rest, by_token[1] * by_row[1])


def moe_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    s: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    save: str,
    accumulate: bool,
    plan: RoutingPlan,
    spec: ActivationSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns (o, h, h's scales). The largest transient, y (R_max, d), exists one slice of d at a time.

    save: "full" returns h itself and no scales, "fp8" h quantised with its scales, "none" neither.
    """
    plan = without_derived(plan)
    shape = shape_of(x, w2.shape[1], w2.shape[2], plan, spec, save)
    h: Tensor | None = None
    scale: Tensor | None = None
    if save != "none":  # up_proj
        a, h = backend.up_proj_act(x, w1, b1, plan, spec)
        if save == "fp8":
            kept = backend.quantize_h(h)
            h, scale = kept.data, kept.scale
        down_proj, slices = backend.down_proj, forward_slices(shape)
    else:
        a = backend.up_proj_act_inference(x, w1, b1, plan, spec)
        down_proj, slices = backend.down_proj_inference, inference_slices(shape)
    weight = backend.weight_operand(w2, 2)
    o: Tensor | None = None
    for columns in slices:
        y = down_proj(a, weight[:, columns], None if b2 is None else b2[:, columns], plan)  # down_proj
        if columns is slices[-1]:
            del a  # with a single slice, a is freed before o is allocated
        if o is None:  # `RoutingPlan.sums_like`, without a call
            o = x.new_empty(x.shape) if plan.sums is None else plan.sums
        backend.combine(y, s, plan, o[:, columns])  # combine
        del y  # freed before the next slice is allocated
    assert o is not None, "d is at least 1"
    return o, h, scale


def _moe_fake(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    s: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    save: str,
    accumulate: bool,
    plan: RoutingPlan,
    *_: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    o, rows, w = x.new_empty(x.shape[0], w2.shape[1]), plan.capacity, w1.shape[1]
    if save == "fp8":
        return o, x.new_empty(rows, w, dtype=torch.float8_e4m3fn), x.new_empty(rows, w // BLOCK, dtype=torch.float32)
    return o, x.new_empty(rows, w) if save == "full" else None, None


def _save(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None, Tensor | None]) -> None:
    x, w1, w2, s, b1, b2, save, ctx.accumulate, plan, ctx.spec, ctx.backend = args
    h, scale = output[1:]
    if h is not None:
        ctx.mark_non_differentiable(*((h,) if scale is None else (h, scale)))
    ctx.set_materialize_grads(False)
    ctx.num_tokens, ctx.peers = plan.num_tokens, plan.peers
    kept = (None if save == "none" else h, scale if save == "fp8" else None)
    ctx.save_for_backward(saved_of(x, plan), w1, w2, s, b1, b2, *kept, *plan.arrays)


def saved_of(x: Tensor, plan: RoutingPlan) -> Tensor | None:
    """x (T, d) to be saved for backward, or None if the plan's peers can send it again."""
    return None if plan.peers is not None and plan.peers.keep(x) else x


def moe_backward(ctx: Any, do: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Runs the backward's kernels, each only if its result is needed. h is freed as soon as down_proj_dgrad has read
    it.

    Returns None for a weight gradient that down_proj_wgrad or up_proj_wgrad has accumulated into ``.grad`` itself.
    """
    need_x, need_w1, need_w2, need_s, need_b1, need_b2 = ctx.needs_input_grad[:6]
    if do is None:
        return (None,) * 6
    do = do.contiguous()
    x, w1, w2, s, b1, b2, h, scale, *arrays = ctx.saved_tensors
    if x is None and (need_w1 or h is None or torch.is_grad_enabled()):
        x = ctx.peers.again()
    if torch.is_grad_enabled():  # create_graph=True
        do = _DependentOnInputs.apply(do, x, w1, w2, s, b1, b2)
    plan = plan_of(tuple(arrays), ctx.num_tokens, peers=ctx.peers)
    routed = (plan, ctx.spec, ctx.backend)
    dx = dw1 = dw2 = ds = db1 = db2 = None
    if need_b2:
        db2 = down_proj_bias_grad(do, s, *routed).to(b2.dtype)
    if need_x or need_w1 or need_w2 or need_s or need_b1:
        if h is None:
            h = up_proj(x, w1, b1, *routed)
        elif scale is not None:
            h = dequantize_h(h, scale, do.dtype, *routed)
            del scale
            ctx.maybe_clear_saved_tensors()  # frees the quantised h before dh is allocated
        dh, ds, a_scaled = down_proj_dgrad_dact(do, w2, b2, h, s, *routed)  # down_proj_dgrad
        del h
        ctx.maybe_clear_saved_tensors()  # frees h now; does nothing under retain_graph
        if need_w2:
            dw2 = _wgrad(ctx, 2, w2, down_proj_wgrad, add_down_proj_wgrad, do, a_scaled, *routed)  # down_proj_wgrad
        del a_scaled
        if need_x:  # before dw1 and db1, so that these are not live while dx_rows is
            dx = up_proj_input_grad(dh, w1, with_sums(plan, do), *routed[1:])  # up_proj_dgrad and combine_grad
        if need_b1:
            db1 = up_proj_bias_grad(dh, *routed).to(b1.dtype)
        if need_w1:
            dw1 = _wgrad(ctx, 1, w1, up_proj_wgrad, add_up_proj_wgrad, x, dh, *routed)  # up_proj_wgrad
    return dx, dw1, dw2, ds if need_s else None, db1, db2


def _wgrad(
    ctx: Any,
    index: int,
    weight: Tensor,
    make: Callable[..., Tensor],
    add: Callable[..., None],
    by_token: Tensor,
    by_row: Tensor,
    *routed: Any,
) -> Tensor | None:
    """The gradient of the operator's input ``index``, or None if it was accumulated into the weight's ``.grad``."""
    total = sum_to_add_to(ctx, index, weight) if ctx.accumulate else None
    if total is None:
        return make(by_token, by_row, is_column_major(weight), *routed)
    add(total, by_token, by_row, *routed)
    return None


class _DependentOnInputs(torch.autograd.Function):
    """Identity on the output's gradient that makes it depend on the inputs, and raises when it is differentiated.

    h depends on the inputs but is saved without a graph: with frozen weights, a second derivative would silently treat
    dx as a constant.
    """

    @staticmethod
    def forward(ctx: Any, do: Tensor, *inputs: Tensor | None) -> Tensor:
        return do.view_as(do)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(_ONCE)


@_of_backward(
    "Tensor x, Tensor w1, Tensor? b1",
    "Tensor",
    lambda x, w1, b1, plan, *_: x.new_empty(plan.capacity, w1.shape[1]),
    _rows_weight_flops,
)
def up_proj(
    x: Tensor, w1: Tensor, b1: Tensor | None, plan: RoutingPlan, spec: ActivationSpec, backend: Backend
) -> Tensor:
    """h (R_max, w), recomputed by up_proj."""
    return backend.up_proj_act(x, w1, b1, without_derived(plan), spec)[1]


@_of_backward(
    "Tensor data, Tensor scale, ScalarType dtype",
    "Tensor",
    lambda data, scale, dtype, *_: torch.empty_like(data, dtype=dtype),
)
def dequantize_h(
    data: Tensor, scale: Tensor, dtype: torch.dtype, plan: RoutingPlan, spec: ActivationSpec, backend: Backend
) -> Tensor:
    """h from its quantised form."""
    return backend.dequantize_h(Operand(data, scale, ROWS, dtype))


@_of_backward(
    "Tensor do, Tensor w2, Tensor? b2, Tensor h, Tensor s",
    "(Tensor, Tensor, Tensor)",
    lambda do, w2, b2, h, s, *_: (torch.empty_like(h), torch.empty_like(s), h.new_empty(h.shape[0], w2.shape[2])),
    _rows_weight_flops,
)
def down_proj_dgrad_dact(
    do: Tensor,
    w2: Tensor,
    b2: Tensor | None,
    h: Tensor,
    s: Tensor,
    plan: RoutingPlan,
    spec: ActivationSpec,
    backend: Backend,
) -> tuple[Tensor, Tensor, Tensor]:
    """down_proj_dgrad: (dh, ds, a_scaled)."""
    return backend.down_proj_dgrad_dact(do, w2, b2, h, s, without_derived(plan), spec)


def _down_proj_wgrad_fake(do: Tensor, a_scaled: Tensor, column_major: bool, plan: RoutingPlan, *_: Any) -> Tensor:
    return empty_weight_grad(do, (plan.num_experts, do.shape[1], a_scaled.shape[1]), column_major)


@_of_backward("Tensor do, Tensor a_scaled, bool column_major", "Tensor", _down_proj_wgrad_fake, _wgrad_flops)
def down_proj_wgrad(
    do: Tensor, a_scaled: Tensor, column_major: bool, plan: RoutingPlan, spec: ActivationSpec, backend: Backend
) -> Tensor:
    """down_proj_wgrad: dw2."""
    return backend.down_proj_wgrad(do, a_scaled, without_derived(plan), column_major)


@_adding
def add_down_proj_wgrad(
    total: Tensor, do: Tensor, a_scaled: Tensor, plan: RoutingPlan, spec: ActivationSpec, backend: Backend
) -> tuple[()]:
    """down_proj_wgrad: dw2, accumulated into ``total``."""
    backend.down_proj_wgrad(do, a_scaled, without_derived(plan), is_column_major(total), total)
    return ()


@_of_backward(
    "Tensor dh, Tensor w1",
    "Tensor",
    lambda dh, w1, plan, *_: dh.new_empty(plan.num_tokens, w1.shape[2]),
    _rows_weight_flops,
)
def up_proj_input_grad(dh: Tensor, w1: Tensor, plan: RoutingPlan, spec: ActivationSpec, backend: Backend) -> Tensor:
    """up_proj_dgrad and combine_grad: dx; dx_rows (R_max, d) exists one slice of d at a time."""
    plan = without_derived(plan)
    d, n = w1.shape[2], w1.shape[1] // spec.width_factor
    dx = plan.sums_like(dh, d)
    rows, weight = backend.rows_operand(dh), backend.weight_operand(w1, 1)
    for columns in backward_slices(shape_of(dh, d, n, plan, spec)):
        dx_rows = backend.up_proj_dgrad(rows, weight[:, :, columns], plan)
        backend.combine_grad(dx_rows, plan, dx[:, columns])
        del dx_rows
    return dx


def _up_proj_wgrad_fake(x: Tensor, dh: Tensor, column_major: bool, plan: RoutingPlan, *_: Any) -> Tensor:
    return empty_weight_grad(x, (plan.num_experts, dh.shape[1], x.shape[1]), column_major)


@_of_backward("Tensor x, Tensor dh, bool column_major", "Tensor", _up_proj_wgrad_fake, _wgrad_flops)
def up_proj_wgrad(
    x: Tensor, dh: Tensor, column_major: bool, plan: RoutingPlan, spec: ActivationSpec, backend: Backend
) -> Tensor:
    """up_proj_wgrad: dw1."""
    return backend.up_proj_wgrad(x, dh, without_derived(plan), column_major)


@_adding
def add_up_proj_wgrad(
    total: Tensor, x: Tensor, dh: Tensor, plan: RoutingPlan, spec: ActivationSpec, backend: Backend
) -> tuple[()]:
    """up_proj_wgrad: dw1, accumulated into ``total``."""
    backend.up_proj_wgrad(x, dh, without_derived(plan), is_column_major(total), total)
    return ()


@_of_backward("Tensor do, Tensor s", "Tensor", lambda do, s, plan, *_: s.new_empty(plan.num_experts, do.shape[1]))
def down_proj_bias_grad(do: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec, backend: Backend) -> Tensor:
    """db2 in the scores' dtype."""
    return backend.down_proj_bias_grad(do, s, without_derived(plan))


@_of_backward(
    "Tensor dh",
    "Tensor",
    lambda dh, plan, *_: dh.new_empty(plan.num_experts, dh.shape[1], dtype=compute_dtype(dh.dtype)),
)
def up_proj_bias_grad(dh: Tensor, plan: RoutingPlan, spec: ActivationSpec, backend: Backend) -> Tensor:
    """db1 in the compute dtype."""
    return backend.up_proj_bias_grad(dh, without_derived(plan))


moe = routed_operator(
    "moe",
    "Tensor x, Tensor w1, Tensor w2, Tensor s, Tensor? b1, Tensor? b2, str save, bool accumulate",
    "(Tensor, Tensor, Tensor)",
    moe_forward,
    _moe_fake,
    _moe_flops,
)
moe.register_autograd(moe_backward, _save)
