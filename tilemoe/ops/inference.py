"""The experts of tokens whose experts are given by id, where nothing is differentiated: plan and layer in one call.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · w = 2n gated, n ungated

One generated token takes the GPU less time than the host takes to look at its operands twice. What is checked here,
shapes, dtypes and devices, is what a recording is found by: it is checked when a layout is new, and not again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.kernels.base import KernelSet
from tilemoe.kernels.select import BY_TRITON, kernel_set, name_for
from tilemoe.kernels.select_plan import PlanTopK
from tilemoe.kernels.tiling import few_rows
from tilemoe.ops import library
from tilemoe.ops.ahead import Ahead
from tilemoe.ops.eager import is_plain
from tilemoe.ops.errors import with_advice
from tilemoe.ops.moe import check_options, check_plan, check_tensors
from tilemoe.ops.plan import builder_for, check_topk_ids
from tilemoe.ops.replayed import Replayed, is_replayable
from tilemoe.perf.shape import MoEShape
from tilemoe.routing.plan import RoutingPlan


class Activation(NamedTuple):
    """The arguments of `tilemoe.moe` that say what is between the two projections."""

    name: str
    gate_up: str
    limit: float | None
    alpha: float | None


def experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    expert_ids: Tensor,
    scores: Tensor,
    activation: Activation,
) -> Tensor | None:
    """What `tilemoe.moe` gives of ``plan_topk(expert_ids, E)``: (T, d). None where these are to be called themselves.

    x (T, d), expert_ids and scores (T, K), w1 (E, w, d), w2 (E, d, n), b1 (E, w), b2 (E, d). None is returned unless
    all are plain tensors on the current GPU, gradients are off, nothing is cast, and nobody watches.

    Raises:
        ValueError: as `plan_topk` and `tilemoe.moe`.
    """
    args = (x, w1, w2, b1, b2, expert_ids, scores)
    if not is_plain(*args) or torch.is_grad_enabled() or not is_replayable(x):
        return None
    device = x.device
    if torch.is_autocast_enabled(device.type):
        return None
    for arg in args:  # neither is part of what a recording is found by
        if arg is not None and (not isinstance(arg, Tensor) or arg.device != device):
            return None
    out: Tensor = _experts(*args, activation)
    return out


def _choose(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    expert_ids: Tensor,
    scores: Tensor,
    activation: Activation,
) -> tuple[PlanTopK, KernelSet]:
    """What plans and computes such operands, once they are checked."""
    check_topk_ids(expert_ids)
    check_options(activation.gate_up, None)
    check_tensors(x, w1, w2, b1, b2, activation_spec(*activation).width_factor)
    build = builder_for(expert_ids, w2.shape[0], is_inference=True).build_in_one
    return build, kernel_set(name_for(w2.device, w2.dtype, *w2.shape[1:]))


def _compute(
    build: PlanTopK,
    kernels: KernelSet,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    expert_ids: Tensor,
    scores: Tensor,
    activation: Activation,
) -> Tensor:
    token_of_row, pair_of_row, row_of_pair, row_start, *_ = build(expert_ids, w2.shape[0])
    plan = RoutingPlan(token_of_row, pair_of_row, row_of_pair, None, row_start, w2.shape[0], expert_ids.shape[0])
    check_plan(x, w1, plan, scores)
    s = scores.reshape(-1).contiguous()
    return library.infer(x, w1, w2, s, b1, b2, plan, activation_spec(*activation), kernels)


def _run(*args: Any) -> Tensor:
    return _compute(*_choose(*args), *args)


def _rehearsed(*args: Any) -> Callable[..., Tensor]:
    return partial(_compute, *_choose(*args))


def _kind(*args: Any) -> Hashable:
    """What decides the kernels; None where they are not Triton's, or there are no rows."""
    build, kernels = _choose(*args)
    x, w1, w2, b1, b2, expert_ids, scores, activation = args
    if expert_ids.numel() == 0 or kernels.name not in BY_TRITON:
        return None
    rows = few_rows(expert_ids.numel(), w2.shape[0])
    weights = [None if w is None else (w.shape, w.stride(), w.data_ptr() % 16 == 0) for w in (w1, w2, b1, b2)]
    return x.dtype, x.stride(), *weights, expert_ids.dtype, expert_ids.shape[1], scores.dtype, build, rows, activation


def _shape(
    x: Tensor, w1: Tensor, w2: Tensor, b1: Any, b2: Any, expert_ids: Tensor, scores: Tensor, activation: Activation
) -> MoEShape:
    return MoEShape(
        num_tokens=x.shape[0],
        hidden_size=w2.shape[1],
        intermediate_size=w2.shape[2],
        num_experts=w2.shape[0],
        num_experts_per_tok=expert_ids.shape[1],
        is_gated=activation_spec(*activation).is_gated,
        element_bytes=x.element_size(),
    )


_experts = with_advice("inference", Replayed(_run, Ahead(_kind, _rehearsed)), _shape)
