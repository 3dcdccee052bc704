"""Plan builders as torch.library operators: opaque to torch.compile, so that ids on a CPU are checked under it too."""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.kernels.choose import PlanBuilder, choose_inference_plan, choose_plan
from tilemoe.kernels.plan import torch as torch_plan
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.operator import Operator
from tilemoe.runtime.tensors import require_tensors

_INT32_MAX = 2**31 - 1


def check_ids(name: str, ids: Tensor, ndim: int) -> None:
    """ValueError unless ``ids`` is an int32 or int64 tensor of ``ndim`` dimensions, with at most 2^31 - 1 elements."""
    require_tensors({name: ids})
    if ids.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {tuple(ids.shape)}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {ids.dtype}")
    if ids.numel() > _INT32_MAX:
        raise ValueError(f"{name} has {ids.numel()} pairs; row indices are int32, so at most {_INT32_MAX}")


def check_topk_ids(expert_ids: Tensor) -> None:
    """ValueError unless ``expert_ids`` are (T, K) ids with K >= 1."""
    check_ids("expert_ids", expert_ids, ndim=2)
    if expert_ids.shape[1] == 0:
        raise ValueError("expert_ids must be (T, K) with K >= 1, got K = 0")


def _build_topk(expert_ids: Tensor, num_experts: int, is_inference: bool) -> torch_plan.Index:
    """See `tilemoe.kernels.plan.torch.sort_by_expert`. Device, size and ``is_inference`` select the builder.

    is_inference is an argument and not read from autograd's state: the launch cache's key is made of arguments, and
    compiled training runs its forward without autograd.
    """
    return builder_for(expert_ids, num_experts, is_inference).build(expert_ids, num_experts)


def builder_for(expert_ids: Tensor, num_experts: int, is_inference: bool) -> PlanBuilder:
    """The plan builder for these ids on their device."""
    choose = choose_inference_plan if is_inference else choose_plan
    return choose(expert_ids.device, expert_ids.numel(), num_experts).impl


def topk_plan(expert_ids: Tensor, num_experts: int) -> RoutingPlan:
    """`tilemoe.plan_topk` for arguments that have been checked."""
    token_of_row, pair_of_row, row_of_pair, row_start, rows_per_expert, error_bits = build_topk(
        expert_ids, num_experts, not torch.is_grad_enabled()
    )
    tokens = expert_ids.shape[0]
    arrays = (token_of_row, pair_of_row, row_of_pair, None, row_start)
    return RoutingPlan(*arrays, num_experts, tokens, error_bits, counted_rows=rows_per_expert, unchecked=True)


def _build_pairs_fake(token: Tensor, expert: Tensor, num_tokens: int, num_experts: int) -> tuple[Tensor, ...]:
    pairs = token.shape[0]
    shapes = ((pairs,), (pairs,), (pairs,), (num_tokens + 1,), (num_experts + 1,), ())
    return tuple(token.new_empty(shape, dtype=torch.int32) for shape in shapes)


build_topk = Operator(
    "plan_topk",
    _build_topk,
    "(Tensor expert_ids, SymInt num_experts, bool is_inference) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda expert_ids, num_experts, is_inference: torch_plan.new_index(expert_ids, num_experts),
)
build_pairs = Operator(
    "plan_pairs",
    torch_plan.sort_pairs,
    "(Tensor token, Tensor expert, SymInt num_tokens, SymInt num_experts) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _build_pairs_fake,
    repeats=False,
)
