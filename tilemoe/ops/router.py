"""The router's kernels as torch.library operators: opaque to torch.compile, differentiable once.

T tokens · d hidden_size · E experts · K experts per token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.config import MoEConfig
from tilemoe.kernels.choose import why_not_triton
from tilemoe.kernels.experts.triton.configs import why_unsupported as why_widths_unsupported
from tilemoe.runtime.device import why_no_triton
from tilemoe.runtime.operator import Operator
from tilemoe.runtime.tracing import specialised

_SPEC_SCHEMA = (
    "int experts_per_token, str mode, bool normalize, float scale, int num_groups, int top_groups, bool balance, bool z"
)
Spec = tuple[int, str, bool, float, int, int, bool, bool]
ROUTE_ONCE = (
    "tilemoe.route on a GPU is differentiable once: its backward cannot be differentiated. Use fp64 logits for "
    "higher derivatives, or take the first gradient without create_graph=True."
)


def spec_args(cfg: MoEConfig) -> Spec:
    """``cfg`` as the last arguments of both operators, in the order of `_SPEC_SCHEMA`."""
    router = cfg.router
    mode = "late softmax" if router.softmax_after_topk else router.score
    losses = (bool(router.aux_loss_coef), bool(router.z_loss_coef))
    groups = (router.num_groups, router.top_groups)
    return (cfg.num_experts_per_tok, mode, router.normalize, *specialised(router.scale), *groups, *losses)


def _select(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from tilemoe.kernels.router import triton as router  # not every machine has Triton

    selection_bias, token_mask, *spec = rest
    return router.select(logits, selection_bias, token_mask, router.RouterSpec(*spec))


def _select_fake(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    _, _, experts_per_token, *_, balance, z = rest
    scores = logits.new_empty(num_tokens, experts_per_token)
    ids = torch.empty_like(scores, dtype=torch.int32)
    return scores, ids, logits.new_empty(num_experts if balance else 0), logits.new_empty(() if z else (0,))


def _select_grad(*args: Any) -> Tensor:
    from tilemoe.kernels.router import triton as router

    return router.select_grad(*args[:6], router.RouterSpec(*args[6:]))


select = Operator(
    "select",
    _select,
    f"(Tensor logits, Tensor? selection_bias, Tensor? token_mask, {_SPEC_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    _select_fake,
)
select_grad = Operator(
    "select_grad",
    _select_grad,
    "(Tensor logits, Tensor expert_ids, Tensor? token_mask, Tensor? d_scores, Tensor? d_probability_sums, "
    f"Tensor? d_z_sum, {_SPEC_SCHEMA}) -> Tensor",
    lambda logits, *rest: logits.new_empty(logits.shape),
)


def _save(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, token_mask, *ctx.spec = args
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1], token_mask)


def _backward(
    ctx: Any, d_scores: Tensor | None, _ids: None, d_probability_sums: Tensor | None, d_z_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The logits' gradient from those of scores, probability sums and z sum; one is None if nothing depends on it."""
    _, _, _, _, _, _, balance, z = ctx.spec
    d_probability_sums, d_z_sum = (d_probability_sums if balance else None, d_z_sum if z else None)
    if d_scores is None and d_probability_sums is None and d_z_sum is None:
        return (None,)
    logits, expert_ids, token_mask = ctx.saved_tensors
    return (select_grad(logits, expert_ids, token_mask, d_scores, d_probability_sums, d_z_sum, *ctx.spec),)


def _invariant_logits(x: Tensor, weight: Tensor) -> Tensor:
    why = why_no_triton(x.device) or why_widths_unsupported(x.shape[1])
    if why is None and x.dtype == torch.float64:
        why = f"no Triton kernel computes in {x.dtype}"
    if why is not None:
        raise ValueError(f"invariance='batch': {why}; set it to 'none' in the MoEConfig")
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[0], dtype=torch.float32)
    from tilemoe.kernels.experts.triton.bias_grad import row_products

    return row_products(x, weight)


def _input_grad(d_logits: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    if why_not_triton(dx.device, dx.dtype, dx.shape[1:]) is None:
        from tilemoe.kernels.router import triton_input_grad as router_input

        if router_input.why_unsupported(d_logits, weight, dx) is None:
            return router_input.input_grad(d_logits, weight, dx)
    with torch.autocast(dx.device.type, enabled=False):
        return torch.mm(d_logits, weight).add_(dx)  # addmm would copy dx first, which is slower


invariant_logits = Operator(
    "router_invariant_logits",
    _invariant_logits,
    "(Tensor x, Tensor weight) -> Tensor",
    lambda x, weight: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32),
)
input_grad = Operator(
    "router_input_grad",
    _input_grad,
    "(Tensor d_logits, Tensor weight, Tensor dx) -> Tensor",
    lambda d_logits, weight, dx: dx.new_empty(dx.shape),
)


select.register_autograd(_backward, _save)
select_grad.refuse_autograd(ROUTE_ONCE)
input_grad.refuse_autograd(
    "tilemoe.MoE in 16 bits on a GPU is differentiable once: its backward cannot be differentiated. Use "
    "tilemoe.reference for higher derivatives, or take the first gradient without create_graph=True."
)
