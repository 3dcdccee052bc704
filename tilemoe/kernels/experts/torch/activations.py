"""Values and gradients of the registry's activations for rows of a stored pre-activation, in fp32 (fp64 for fp64), and
down_proj_dgrad's epilogue, which uses both.

R routed rows · R_max static row capacity · n intermediate_size · w = 2n gated, n ungated · T tokens · E experts
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.activations import REGISTRY, ActivationSpec
from tilemoe.kernels.experts.formats.dense import compute_dtype, row_blocks
from tilemoe.kernels.experts.torch.grouped import expert_of_row
from tilemoe.plan import RoutingPlan


def split_gate_up(h: Tensor, spec: ActivationSpec) -> tuple[Tensor, Tensor]:
    """Views of the gate and up columns, (R, n) each, of h (R, 2n) of a gated activation."""
    if spec.gate_up == "interleaved":
        return h[:, 0::2], h[:, 1::2]
    n = h.shape[1] // 2
    return h[:, :n], h[:, n:]


def activation_rows(h: Tensor, spec: ActivationSpec) -> Tensor:
    """``a = act(h)`` (R, n) of h (R, w), in h's dtype, computed in fp32 or better."""
    a = h.new_empty(h.shape[0], h.shape[1] // spec.width_factor)
    work, value = torch.promote_types(h.dtype, torch.float32), REGISTRY[spec.name].value
    for block in row_blocks(h):
        if spec.is_gated:
            gate, up = split_gate_up(h[block], spec)
            a[block] = value(gate.to(work), up.to(work), spec)
        else:
            a[block] = value(h[block].to(work), spec)
    return a


def activation_grad(h: Tensor, da: Tensor, spec: ActivationSpec, dh: Tensor) -> Tensor:
    """Recompute ``a`` from ``h`` and write ``dh = da * d(act)/dh`` (rounded to its dtype) into ``dh``, shaped like h.

    ``da`` (R, n) in the compute dtype. Returns ``a`` (R, n) in the compute dtype.
    """
    work = torch.promote_types(h.dtype, torch.float32)
    if not spec.is_gated:
        a, dz = REGISTRY[spec.name].grad(h.to(work), da, spec)
        dh.copy_(dz)
        return a
    gate, up = split_gate_up(h, spec)
    a, *grads = REGISTRY[spec.name].grad(gate.to(work), up.to(work), da, spec)
    for out, grad in zip(split_gate_up(dh, spec), grads, strict=True):
        out.copy_(grad)
    return a


def dact_rows(
    da: Tensor, do: Tensor, b2: Tensor | None, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, ds, a_scaled) as in `Backend.down_proj_dgrad_dact`, computed from ``da' = do w2`` (R_max, n)."""
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
    """``<do_t, b2_e>`` of each row (R_max) in the compute dtype, by a small dense GEMM instead of a gather of do."""
    work = compute_dtype(do.dtype)
    return (do.to(work) @ b2.to(work).t())[plan.token_of_row, expert_of_row(plan)]


def _rows_to_pairs(value_of_row: Tensor, like: Tensor, plan: RoutingPlan) -> Tensor:
    """Scatter one value per row to its pair's position in the caller's order; 0 where a pair has no row."""
    spare = like.shape[0]  # all rows past R write to one extra slot, which is dropped
    index = torch.where(in_use(plan), plan.pair_of_row, spare).long()
    return like.new_zeros(spare + 1).scatter_(0, index, value_of_row)[:spare]


def in_use(plan: RoutingPlan) -> Tensor:
    rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
    return rows < plan.row_start_of_expert[-1]
