"""Builders of `RoutingPlan` from expert ids. They check shapes and dtypes; the kernels check the ids they read.

T tokens · E experts · K experts per token · P pairs · R rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.ops import plan as plan_ops
from tilemoe.plan import RoutingPlan, check_count


def plan_topk(expert_ids: Tensor, num_experts: int) -> RoutingPlan:
    """The `RoutingPlan` of K experts per token. expert_ids (T, K) int32 or int64; the scores of such a plan are (T, K).

    An id >= num_experts is a sentinel: its pair is skipped. The capacity is R_max = T*K. There is no host sync.

    ValueError: an argument's shape or dtype is wrong, or an id is negative (on a GPU, only ``plan.check()`` raises it).

    Examples:
        >>> tilemoe.plan_topk(torch.tensor([[0, 1], [0, 3]]), num_experts=3).rows_per_expert.tolist()  # 3 is skipped
        [2, 1, 0]
    """
    plan_ops.check_topk_ids(expert_ids)
    check_count("num_experts", num_experts, minimum=1)
    return plan_ops.topk_plan(expert_ids, num_experts)


def plan_pairs(token: Tensor, expert: Tensor, num_tokens: int, num_experts: int) -> RoutingPlan:
    """The `RoutingPlan` of (token, expert) pairs, in any order and any number per token; its scores are (P,).

    token, expert (P,) int32 or int64, on one device. A repeated pair counts twice. An expert id >= num_experts is a
    sentinel: its pair is skipped.

    ValueError: an argument's shape, dtype or device is wrong, an expert id is negative, or a token is outside
    [0, num_tokens) (on a GPU, only ``plan.check()`` raises the latter two).

    Examples:
        >>> token, expert = torch.tensor([4, 0, 0]), torch.tensor([1, 1, 0])
        >>> tilemoe.plan_pairs(token, expert, num_tokens=5, num_experts=2).token_of_row.tolist()
        [0, 0, 4]
    """
    plan_ops.check_ids("token", token, ndim=1)
    plan_ops.check_ids("expert", expert, ndim=1)
    check_count("num_tokens", num_tokens, minimum=0)
    check_count("num_experts", num_experts, minimum=1)
    if token.shape != expert.shape:
        raise ValueError(f"token {tuple(token.shape)} and expert {tuple(expert.shape)} must have the same length")
    if token.device != expert.device:
        raise ValueError(f"token is on {token.device} but expert is on {expert.device}; move them to one device")
    token_of_row, pair_of_row, row_of_pair, pair_start, row_start, error_bits = plan_ops.build_pairs(
        token, expert, num_tokens, num_experts
    )
    arrays = (token_of_row, pair_of_row, row_of_pair, pair_start, row_start)
    return RoutingPlan(*arrays, num_experts, num_tokens, error_bits, unchecked=True)


def plan_rows(rows_per_expert: Tensor, num_rows: int) -> RoutingPlan:
    """The plan of R rows already sorted by expert, each of them a token with one expert; its scores are (R, 1).

    rows_per_expert (E) integers; rows past their sum, which pad a buffer, give 0. There is no host sync.
    """
    ends = rows_per_expert.cumsum(0, dtype=torch.int32)
    rows = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    row_of_pair, row_start = torch.where(rows < ends[-1], rows, -1), torch.cat([ends.new_zeros(1), ends])
    # A copy: the launch cache does not replay launches whose operands share memory.
    return RoutingPlan(rows, rows.clone(), row_of_pair, None, row_start, ends.shape[0], num_rows, unchecked=True)
