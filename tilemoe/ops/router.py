"""torch.library registration of the router's kernels: opaque to torch.compile, differentiable once.

T tokens · d hidden_size · E experts · K experts per token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilemoe.config import MoEConfig
from tilemoe.kernels.select import problem_of_triton
from tilemoe.ops.ahead import Ahead
from tilemoe.ops.eager import Operator, is_differentiable, is_plain
from tilemoe.ops.replayed import Replayed, is_replayable

_SPEC_SCHEMA = (
    "int experts_per_token, str mode, bool normalize, float scale, int num_groups, int top_groups, bool balance, bool z"
)
Spec = tuple[int, str, bool, float, int, int, bool, bool]


def spec_args(cfg: MoEConfig) -> Spec:
    """The configuration's arguments, in the order that both operators' schemas end with."""
    router = cfg.router
    mode = "late softmax" if router.softmax_after_topk else router.score
    losses = (bool(router.aux_loss_coef), bool(router.z_loss_coef))
    groups = (router.num_groups, router.top_groups)
    return (cfg.num_experts_per_tok, mode, router.normalize, router.scale, *groups, *losses)


def _select(
    logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, *spec: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from tilemoe.kernels.triton import router  # not on every machine

    return router.select(logits, selection_bias, token_mask, router.RouterSpec(*spec))


def _select_fake(
    logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, *spec: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    experts_per_token, *_, balance, z = spec
    scores = logits.new_empty(num_tokens, experts_per_token)
    ids = torch.empty_like(scores, dtype=torch.int32)
    return scores, ids, logits.new_empty(num_experts if balance else 0), logits.new_empty(() if z else (0,))


def _select_grad(
    logits: Tensor,
    expert_ids: Tensor,
    token_mask: Tensor | None,
    d_scores: Tensor | None,
    d_probability_sums: Tensor | None,
    d_z_sum: Tensor | None,
    *spec: Any,
) -> Tensor:
    from tilemoe.kernels.triton import router

    return router.select_grad(
        logits, expert_ids, token_mask, d_scores, d_probability_sums, d_z_sum, router.RouterSpec(*spec)
    )


def _select_grad_fake(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _kind_of_selection(logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, *spec: Any) -> Any:
    """None where the forward alone is to come, which is one kernel."""
    if logits.shape[0] == 0 or not logits.requires_grad:
        return None
    return logits.shape[1], selection_bias is None, token_mask is None, spec


def _selections_launches(*_: Any) -> Callable[..., None]:
    def launch(logits: Tensor, selection_bias: Tensor | None, token_mask: Tensor | None, *spec: Any) -> None:
        scores, ids, probability_sums, z_sum = _select(logits, selection_bias, token_mask, *spec)
        *_, balance, z = spec
        _select_grad(
            logits, ids, token_mask, scores, probability_sums if balance else None, z_sum if z else None, *spec
        )

    return launch


select = Operator(
    "select",
    f"(Tensor logits, Tensor? selection_bias, Tensor? token_mask, {_SPEC_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    Replayed(_select, Ahead(_kind_of_selection, _selections_launches)),
    _select_fake,
)
select_grad = Operator(
    "select_grad",
    "(Tensor logits, Tensor expert_ids, Tensor? token_mask, Tensor? d_scores, Tensor? d_probability_sums, "
    f"Tensor? d_z_sum, {_SPEC_SCHEMA}) -> Tensor",
    Replayed(_select_grad),
    _select_grad_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, token_mask, *ctx.spec = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1], token_mask)


def _backward(
    ctx: Any, d_scores: Tensor | None, _ids: None, d_probability_sums: Tensor | None, d_z_sum: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of scores, probability sums and z sum, each None if nothing depends on it."""
    no_grad_of_rest = (None,) * (2 + len(ctx.spec))
    _, _, _, _, _, _, balance, z = ctx.spec
    d_probability_sums, d_z_sum = (d_probability_sums if balance else None, d_z_sum if z else None)
    if d_scores is None and d_probability_sums is None and d_z_sum is None:
        return (None, *no_grad_of_rest)
    logits, expert_ids, token_mask = ctx.saved_tensors
    d_logits = select_grad(logits, expert_ids, token_mask, d_scores, d_probability_sums, d_z_sum, *ctx.spec)
    return (d_logits, *no_grad_of_rest)


def _input_grad(d_logits: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    if problem_of_triton(dx.device, dx.dtype, dx.shape[1]) is None:
        from tilemoe.kernels.triton import router_input

        if router_input.serves(d_logits, weight, dx):
            return router_input.input_grad(d_logits, weight, dx)
    with torch.autocast(dx.device.type, enabled=False):
        return torch.mm(d_logits, weight).add_(dx)  # addmm copies dx first, and takes longer


def _input_grad_fake(d_logits: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    return dx.new_empty(dx.shape)


input_grad = Operator(
    "router_input_grad",
    "(Tensor d_logits, Tensor weight, Tensor dx) -> Tensor",
    Replayed(_input_grad),
    _input_grad_fake,
)


def _kind_of_input(x: Tensor, weight: Tensor) -> Any:
    problem = problem_of_triton(x.device, x.dtype, x.shape[1])
    return (x.dtype, weight.shape) if x.shape[0] and problem is None else None


def _inputs_launch(*_: Any) -> Callable[..., None]:
    def launch(x: Tensor, weight: Tensor) -> None:
        from tilemoe.kernels.triton import router_input

        d_logits = x.new_empty(x.shape[0], weight.shape[0])
        if router_input.serves(d_logits, weight, x):
            router_input.input_grad(d_logits, weight, x)

    return launch


_ahead_of_input_grad = Ahead(_kind_of_input, _inputs_launch)


def compile_ahead(x: Tensor, weight: Tensor) -> None:
    """Begin to compile `input_grad` for a router's operands, where x needs a gradient and nobody watches."""
    if is_differentiable(x) and is_plain(x, weight) and is_replayable(x):
        _ahead_of_input_grad(x, weight)


select.register_autograd(_backward, _setup_context)
select_grad.refuse_autograd(
    "tilemoe.route on a GPU is differentiable once: its backward cannot be differentiated. Use fp64 logits for "
    "higher derivatives, or take the first gradient without create_graph=True."
)
input_grad.refuse_autograd(
    "tilemoe.MoE in 16 bits on a GPU is differentiable once: its backward cannot be differentiated. Use "
    "tilemoe.reference for higher derivatives, or take the first gradient without create_graph=True."
)
