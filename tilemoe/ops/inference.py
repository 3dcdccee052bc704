"""One inference operator that makes the plan from expert ids and runs the experts: less host work per call.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · w = 2n gated, n ungated

For one generated token the GPU takes less time than the host takes to check the operands twice. The checks here, of
shapes, dtypes and devices, depend only on what the launch cache's key contains: they run when a layout is new, and not
when its launches are replayed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.activations import activation_spec
from tilemoe.kernels.choose import choose_experts
from tilemoe.ops.experts import moe_forward
from tilemoe.ops.moe import check_options, check_plan, check_tensors
from tilemoe.ops.out_of_memory import out_of_memory_message
from tilemoe.ops.plan import builder_for, check_topk_ids
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.operator import Operator, is_plain, is_replayable
from tilemoe.runtime.precompile import require_values
from tilemoe.shape import MoEShape


class Activation(NamedTuple):
    """The arguments of `tilemoe.moe` that define the activation."""

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
    """`tilemoe.moe` with ``plan_topk(expert_ids, E)``: (T, d). None: the caller must call these two itself.

    x (T, d), expert_ids and scores (T, K), w1 (E, w, d), w2 (E, d, n), b1 (E, w), b2 (E, d). None is returned unless
    all are plain tensors on the current GPU, gradients and autocast are off, and the call is not traced.

    Raises:
        ValueError: as in `plan_topk` and `tilemoe.moe`.
    """
    args = (x, w1, w2, b1, b2, expert_ids, scores)
    if not is_plain(*args) or torch.is_grad_enabled() or not is_replayable(x):
        return None
    device = x.device
    if torch.is_autocast_enabled(device.type):
        return None
    for arg in args:  # the launch cache's key has neither type nor device
        if arg is not None and (not isinstance(arg, Tensor) or arg.device != device):
            return None
    return _experts(*args, activation)


def _run(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None,
    b2: Tensor | None,
    expert_ids: Tensor,
    scores: Tensor,
    activation: Activation,
) -> Tensor:
    check_topk_ids(expert_ids)
    check_options(activation.gate_up, None)
    spec = activation_spec(*activation)
    check_tensors(x, w1, w2, b1, b2, spec.width_factor)
    num_experts = w2.shape[0]
    build = builder_for(expert_ids, num_experts, is_inference=True).build_in_one
    backend = choose_experts(w2.device, w2.dtype, w2.shape[1:]).impl
    token_of_row, pair_of_row, row_of_pair, row_start, *_ = build(expert_ids, num_experts)
    if backend.name == "torch":  # it indexes by the plan, which is not filled if launches are withheld
        require_values()
    plan = RoutingPlan(
        token_of_row, pair_of_row, row_of_pair, None, row_start, num_experts, expert_ids.shape[0], unchecked=True
    )
    check_plan(x, w1, plan, scores)
    s = scores.reshape(-1).contiguous()
    return moe_forward(x, w1, w2, s, b1, b2, "none", False, plan, spec, backend)[0]


def _advise(name: str, found: str, arguments: dict[str, Any]) -> str:
    x, w2 = arguments["x"], arguments["w2"]
    shape = MoEShape(
        num_tokens=x.shape[0],
        hidden_size=w2.shape[1],
        intermediate_size=w2.shape[2],
        num_experts=w2.shape[0],
        num_experts_per_tok=arguments["expert_ids"].shape[1],
        is_gated=activation_spec(*arguments["activation"]).is_gated,
        element_bytes=x.element_size(),
    )
    return out_of_memory_message(name, found, shape, can_recompute=False)


_experts = Operator("inference", _run, advise=_advise)
