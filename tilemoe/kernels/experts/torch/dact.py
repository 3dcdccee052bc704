"""The activation, and the epilogue of down_proj_dgrad, on rows that a GEMM has made: what kernels fuse into the GEMM.

R_max static row capacity · n intermediate_size · w = 2n gated, n ungated · d hidden_size · T tokens · E experts
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.formats.dense import compute_dtype, row_blocks
from tilemoe.kernels.experts.torch.activations import activation_grad, activation_value
from tilemoe.kernels.experts.torch.grouped import expert_of_row
from tilemoe.plan import RoutingPlan


def activation_rows(h: Tensor, spec: ActivationSpec) -> Tensor:
    """``a = act(h)`` (R_max, n) of h (R_max, w), in h's dtype."""
    a = h.new_empty(h.shape[0], h.shape[1] // spec.width_factor)
    for block in row_blocks(h):
        a[block] = activation_value(h[block], spec)
    return a


def dact_rows(
    da: Tensor, do: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, ds, a_scaled) as `Backend.down_proj_dgrad_dact` gives them, from ``da' = do w2`` (R_max, n)."""
    dh, a_scaled = torch.empty_like(h), torch.empty_like(da)
    s_row = s.index_select(0, plan.pair_of_row).unsqueeze(1)
    ds_row = s.new_empty(plan.capacity)
    work = compute_dtype(h.dtype)
    for block in row_blocks(h):
        da_block = da[block].to(work)
        a = activation_grad(h[block], da_block * s_row[block], spec, dh[block])
        ds_row[block] = (da_block * a).sum(1)
        a_scaled[block] = a * s_row[block]
    if b2 is not None:
        ds_row += _rows_dot_bias(do, b2, plan)
    return dh, _rows_to_pairs(ds_row, s, plan), a_scaled


def _rows_dot_bias(do: Tensor, b2: Tensor, plan: RoutingPlan) -> Tensor:
    """``<do_t, b2_e>`` of each row (R_max) in the compute dtype, from a small dense GEMM instead of a gather of do."""
    work = compute_dtype(do.dtype)
    return (do.to(work) @ b2.to(work).t())[plan.token_of_row, expert_of_row(plan)]


def _rows_to_pairs(value_of_row: Tensor, like: Tensor, plan: RoutingPlan) -> Tensor:
    """Scatter one value per row to its pair's position in the caller's order; 0 where a pair has no row."""
    spare = like.shape[0]  # rows past R all write to one extra slot, which is dropped
    index = torch.where(in_use(plan), plan.pair_of_row, spare).long()
    return like.new_zeros(spare + 1).scatter_(0, index, value_of_row)[:spare]


def in_use(plan: RoutingPlan) -> Tensor:
    rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
    return rows < plan.row_start_of_expert[-1]
