"""The expert MLP with low-rank adapters on frozen weights, `moe_lora`: no merged weight is made, nothing (R, d) kept.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · r rank · w = 2n gated, n ungated
P pairs · c the adapters' scale

Expert e computes with ``w1_e + c up_b_e up_a_e`` and ``w2_e + c down_b_e down_a_e`` (LoRA, arXiv 2106.09685, one pair
of adapters for each expert and matrix). The low-rank products are GEMMs of their own, over the same rows and by the
same kernels: ``u = x up_a^T`` and ``v = do down_b`` gather inside their loads as F1 and B1 do. Saved: x, h (R_max, w),
u (R_max, r), the scores and the plan: what `tilemoe.moe` saves, and u. Of the weights only the adapters get gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec, activation_grad, activation_spec, activation_value, row_blocks
from tilemoe.kernels.base import KernelSet, compute_dtype, empty_weight_grad, is_column_major
from tilemoe.kernels.select import kernel_set, name_for
from tilemoe.kernels.torch.grouped import expert_of_row
from tilemoe.kernels.torch.mlp import rows_to_pairs
from tilemoe.ops import library
from tilemoe.ops.moe import cast_under_autocast
from tilemoe.perf.memory import backward_slices, forward_slices
from tilemoe.perf.shape import MoEShape
from tilemoe.routing.plan import RoutingPlan

_LINEAR = ActivationSpec("relu")  # for kernels of which only the product before the activation is used


class Adapters(NamedTuple):
    """up_a (E, r, d) and up_b (E, w, r) on w1, down_a (E, r, n) and down_b (E, d, r) on w2; ``scale`` multiplies both.

    Of any float dtype, computed in that of x.
    """

    up_a: Tensor
    up_b: Tensor
    down_a: Tensor
    down_b: Tensor
    scale: float


def moe_lora(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    plan: RoutingPlan,
    scores: Tensor,
    adapters: Adapters,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    kernels: str | None = None,
    activation_limit: float | None = None,
    activation_alpha: float | None = None,
) -> Tensor:
    """`tilemoe.moe` with ``w1 + scale up_b up_a`` and ``w2 + scale down_b down_a`` for weights: (T, d) in x's dtype.

    Differentiable once in x, the scores and the adapters; w1, w2, b1 and b2 must be frozen.

    Raises:
        ValueError: an adapter's shape, dtype or device does not go with the weights, or a frozen tensor is not.
    """
    spec = activation_spec(activation, gate_up, activation_limit, activation_alpha)
    _check_frozen({"w1": w1, "w2": w2, "b1": b1, "b2": b2})
    x, w1, w2, b1, b2 = cast_under_autocast(x, w1, w2, b1, b2)
    low_rank = [adapter.to(x.dtype) for adapter in adapters[:4]]
    _check(x, w1, w2, plan, scores, adapters, spec)
    if kernels is None:
        kernels = name_for(w2.device, w2.dtype, *w2.shape[1:], adapters.up_a.shape[1])
    s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype)))
    tail = library.tail_args(plan, spec, kernel_set(kernels).name)
    return _forward(x, w1, w2, s, *low_rank, b1, b2, adapters.scale, *tail)[0]


def _check_frozen(weights: dict[str, Tensor | None]) -> None:
    for name, weight in weights.items():
        if weight is not None and weight.requires_grad:
            raise ValueError(f"{name} must be frozen under adapters: {name}.requires_grad_(False)")


def _check(
    x: Tensor, w1: Tensor, w2: Tensor, plan: RoutingPlan, scores: Tensor, adapters: Adapters, spec: ActivationSpec
) -> None:
    experts, d, n = w2.shape
    rank, width = adapters.up_a.shape[1], spec.width_factor * n
    wanted = {"up_a": (experts, rank, d), "up_b": (experts, width, rank)}
    wanted |= {"down_a": (experts, rank, n), "down_b": (experts, d, rank)}
    for name, shape in wanted.items():
        adapter = getattr(adapters, name)
        if tuple(adapter.shape) != shape:
            raise ValueError(f"{name} must be {shape} to go with w2 {tuple(w2.shape)}, got {tuple(adapter.shape)}")
        if adapter.device != x.device:
            raise ValueError(f"{name} is on {adapter.device} but x is on {x.device}; move them to one device")
    for name, weight in (("w1", w1), ("w2", w2)):
        if (weight.dtype, weight.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name} is {weight.dtype} on {weight.device} but x is {x.dtype} on {x.device}; make them alike"
            )
    if tuple(w1.shape) != (experts, width, d):
        raise ValueError(f"w1 must be {(experts, width, d)} to go with w2 {tuple(w2.shape)}, got {tuple(w1.shape)}")
    if plan.num_tokens != x.shape[0] or plan.num_experts != experts or plan.num_pairs != scores.numel():
        raise ValueError(
            f"plan is of {plan.num_tokens} tokens, {plan.num_experts} experts and {plan.num_pairs} pairs, which does "
            f"not go with x {tuple(x.shape)}, w2 {tuple(w2.shape)} and scores {tuple(scores.shape)}"
        )


def _shape(w2: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> MoEShape:
    return MoEShape(
        num_tokens=plan.num_tokens,
        hidden_size=w2.shape[1],
        intermediate_size=w2.shape[2],
        num_experts=plan.num_experts,
        num_experts_per_tok=1,  # the rows say how many there are
        is_gated=spec.is_gated,
        element_bytes=w2.element_size(),
        rows=plan.capacity,
        is_topk=plan.pair_start_of_token is None,
    )


def _gathered(ks: KernelSet, x: Tensor, weight: Tensor, plan: RoutingPlan) -> Tensor:
    """``x weight_e^T`` for each row of expert e (R_max, q), x (T, p) gathered by token inside; weight (E, q, p)."""
    return ks.up_proj_act(x, weight, None, plan, _LINEAR)[1]


def _run(
    x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor, down_b: Tensor,
    b1: Tensor | None, b2: Tensor | None, scale: float, *tail: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o (T, d), h (R_max, w), u (R_max, r))."""
    plan, spec, ks = library.unpack(tail)
    u = _gathered(ks, x, up_a, plan)
    h = ks.up_proj_act(x, w1, b1, plan, spec)[1]
    h.add_(ks.down_proj(u, up_b, None, plan), alpha=scale)
    a = h.new_empty(h.shape[0], w2.shape[2])
    for block in row_blocks(h):
        a[block] = activation_value(h[block], spec)
    p = ks.down_proj(a, down_a, None, plan)
    o = x.new_empty(x.shape[0], w2.shape[1])
    for columns in forward_slices(_shape(w2, plan, spec)):
        y = ks.down_proj(a, w2[:, columns], None if b2 is None else b2[:, columns], plan)
        y.add_(ks.down_proj(p, down_b[:, columns], None, plan), alpha=scale)
        ks.combine(y, s, plan, o[:, columns])
        del y
    return o, h, u


def _fake(x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    capacity = rest[-library.NUM_TAIL].shape[0]
    return (
        x.new_empty(x.shape[0], w2.shape[1]),
        x.new_empty(capacity, w1.shape[1]),
        x.new_empty(capacity, up_a.shape[1]),
    )


def _run_grad(
    do: Tensor, x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor,
    down_b: Tensor, b2: Tensor | None, h: Tensor, u: Tensor, scale: float, *tail: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, ds, dup_a, dup_b, ddown_a, ddown_b)."""
    plan, spec, ks = library.unpack(tail)
    rows = _plan_of_rows(plan)
    v = _gathered(ks, do, down_b.transpose(1, 2), plan).mul_(scale)
    da = _gathered(ks, do, w2.transpose(1, 2), plan).add_(ks.down_proj(v, down_a.transpose(1, 2), None, plan))
    s_row = s.index_select(0, plan.pair_of_row)
    a, dh, ds_row = _activation_grads(h, da, s_row, spec)
    s_row = s_row.unsqueeze(1)
    del da
    p = ks.down_proj(a, down_a, None, plan)
    ddown_b = ks.down_proj_weight_grad(do, (p * (scale * s_row)).to(p.dtype), plan, is_column_major(down_b))
    ddown_a = ks.up_proj_weight_grad(a, (v * s_row).to(v.dtype), rows, is_column_major(down_a))
    dup_b = ks.up_proj_weight_grad(u, dh, rows, is_column_major(up_b)).mul_(scale)
    du = ks.down_proj(dh, up_b.transpose(1, 2), None, plan).mul_(scale)
    dup_a = ks.up_proj_weight_grad(x, du, plan, is_column_major(up_a))
    del a, p
    dx = x.new_empty(x.shape)
    for columns in backward_slices(_shape(w2, plan, spec)):
        dx_rows = ks.up_proj_act_grad(dh, w1[:, :, columns], plan)
        dx_rows.add_(ks.up_proj_act_grad(du, up_a[:, :, columns], plan))
        ks.combine_grad(dx_rows, plan, dx[:, columns])
        del dx_rows
    if b2 is not None:
        ds_row = ds_row + _bias_products(do, b2, plan, ds_row.dtype)
    return dx, rows_to_pairs(ds_row, s, plan), dup_a, dup_b, ddown_a, ddown_b


def _activation_grads(h: Tensor, da: Tensor, s_row: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor, Tensor]:
    """a (R_max, n), dh (R_max, w) and <da, a> (R_max), from da (R_max, n) before the scores."""
    a, dh = torch.empty_like(da), torch.empty_like(h)
    ds_row = s_row.new_empty(h.shape[0])
    for block in row_blocks(h):
        da_block = da[block].to(compute_dtype(h.dtype))
        value = activation_grad(h[block], da_block * s_row[block, None], spec, dh[block])
        ds_row[block] = (da_block * value).sum(1)
        a[block] = value
    return a, dh, ds_row


def _plan_of_rows(plan: RoutingPlan) -> RoutingPlan:
    """The same rows, of which each is its own token: for kernels that gather what lies by row already."""
    own = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
    return replace(plan, token_of_row=own, num_tokens=plan.capacity)


def _bias_products(do: Tensor, b2: Tensor, plan: RoutingPlan, dtype: torch.dtype) -> Tensor:
    """<do_t, b2_e> of each row (R_max): one small GEMM instead of a gather of do."""
    return (do.to(dtype) @ b2.to(dtype).t())[plan.token_of_row, expert_of_row(plan)]


def _fake_grad(
    do: Tensor, x: Tensor, w1: Tensor, w2: Tensor, s: Tensor, up_a: Tensor, up_b: Tensor, down_a: Tensor,
    down_b: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    adapters = (empty_weight_grad(t, t.shape, is_column_major(t)) for t in (up_a, up_b, down_a, down_b))
    return (x.new_empty(x.shape), s.new_empty(s.shape), *adapters)


_ADAPTED = "Tensor x, Tensor w1, Tensor w2, Tensor s, Tensor up_a, Tensor up_b, Tensor down_a, Tensor down_b"
_forward = library.define(
    "moe_lora",
    f"{_ADAPTED}, Tensor? b1, Tensor? b2, float scale",
    "(Tensor, Tensor, Tensor)",
    _run,
    _fake,
    lambda given, parts: (given[2].shape[1], given[2].shape[2]),
)
_backward_op = library.define(
    "moe_lora_grad",
    f"Tensor do, {_ADAPTED}, Tensor? b2, Tensor h, Tensor u, float scale",
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_grad,
    _fake_grad,
    lambda given, parts: (given[3].shape[1], given[3].shape[2]),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, _, b2, scale = inputs[: -library.NUM_TAIL]
    tail = inputs[-library.NUM_TAIL :]
    _, h, u = output
    ctx.mark_non_differentiable(h, u)
    ctx.set_materialize_grads(False)
    plan_tensors, ctx.options = tail[: library.NUM_PLAN_TENSORS], tail[library.NUM_PLAN_TENSORS :]
    ctx.scale = scale
    ctx.save_for_backward(*tensors, b2, h, u, *plan_tensors)


def _backward(ctx: Any, do: Tensor | None, _dh: None, _du: None) -> tuple[Tensor | None, ...]:
    rest = (None,) * (3 + library.NUM_TAIL)
    if do is None:
        return (None,) * 8 + rest
    x, w1, w2, s, up_a, up_b, down_a, down_b, b2, h, u, *plan_tensors = ctx.saved_tensors
    tail = (*plan_tensors, *ctx.options)
    given = (do.contiguous(), x, w1, w2, s, up_a, up_b, down_a, down_b, b2, h, u, ctx.scale, *tail)
    dx, ds, *adapters = _backward_op(*given)
    return (dx, None, None, ds, *adapters, *rest)


_forward.register_autograd(_backward, _setup_context)
_backward_op.refuse_autograd(
    "tilemoe's experts with adapters are differentiable once: their backward cannot be differentiated. Take the first "
    "gradient without create_graph=True."
)
