"""The activation and down_proj_dgrad's epilogue as separate kernels, for operands that are a sum of GEMMs.

R_max static row capacity · n intermediate_size · w = 2n gated, n ungated · BM, BN tile

Memory-bound and not persistent. Rows past those in use are neither read nor written.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.triton.activations import gated_value, inner
from tilemoe.kernels.experts.triton.gemm_dgrad_dact import dact_epilogue, load_h
from tilemoe.kernels.experts.triton.host import activation_constants, dact_outputs
from tilemoe.kernels.experts.triton.operands import load_rows, store_rows
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.launch import Launch, ceil_div, launch_of

_TILE = {"BLOCK_M": 32, "BLOCK_N": 64}


def activation_launch(h: Tensor, plan: RoutingPlan, spec: ActivationSpec) -> tuple[Launch, Tensor]:
    """(launch, a (R_max, n)) of h (R_max, w), contiguous."""
    a = h.new_empty(h.shape[0], h.shape[1] // spec.width_factor)
    args = (h, a, plan.row_start_of_expert, plan.num_experts, a.shape[1], spec.limit, spec.alpha)
    constants = {**activation_constants(spec, h.dtype), **_TILE}
    return launch_of(activation_kernel, _grid(a), args, constants), a


def dact_launch(
    da: Tensor, h: Tensor, s: Tensor, plan: RoutingPlan, spec: ActivationSpec
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """(launch, dh (R_max, w), a_scaled (R_max, n), partial (column tiles, R_max) fp32) from da' (R_max, n) and h
    (R_max, w), both contiguous. `host.score_grad_launch` takes partial.
    """
    n = da.shape[1]
    dh, a_scaled, partial = dact_outputs(h, s, plan, n, ceil_div(n, _TILE["BLOCK_N"]))
    outputs = (dh, a_scaled, partial)
    indices = (plan.pair_of_row, plan.row_start_of_expert, plan.num_experts, plan.capacity)
    args = (da, h, s, *outputs, *indices, n, spec.limit, spec.alpha)
    constants = {**activation_constants(spec, h.dtype), **_TILE}
    return launch_of(dact_kernel, _grid(da), args, constants), *outputs


def _grid(rows: Tensor) -> tuple[int, int]:
    return ceil_div(rows.shape[0], _TILE["BLOCK_M"]), ceil_div(rows.shape[1], _TILE["BLOCK_N"])


@triton.jit
def activation_kernel(
    h, a, row_start_of_expert, num_experts, n, limit, alpha,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``a = act(h)``."""
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    end = tl.load(row_start_of_expert + num_experts)
    if row < end:
        gate, up = load_h(h, end, row, col, n, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if GATED:
            value = gated_value(gate, up, limit, alpha, ACTIVATION, PRECISE)
        else:
            value, _slope = inner(gate, ACTIVATION, PRECISE)
        store_rows(a, value, end, row, col, n, False, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["capacity"])
def dact_kernel(
    da, h, s, dh, a_scaled, partial, pair_of_row, row_start_of_expert, num_experts, capacity, n, limit, alpha,
    ACTIVATION: tl.constexpr, PRECISE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``dh = act'(h) s da'``, ``a_scaled = s a``, and partial: each row's <da', a> over the tile's columns."""
    row, col = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    end = tl.load(row_start_of_expert + num_experts)
    if row < end:
        lines = row + tl.arange(0, BLOCK_M)
        score = tl.load(s + tl.load(pair_of_row + tl.minimum(lines, end - 1))).to(tl.float32)
        gate, up = load_h(h, end, row, col, n, GATED, INTERLEAVED, BLOCK_M, BLOCK_N)
        tile = load_rows(da, end, row, col, n, BLOCK_M, BLOCK_N).to(tl.float32)
        products = dact_epilogue(
            tile, gate, up, score, dh, a_scaled, row, end, col, n, limit, alpha,
            ACTIVATION, PRECISE, GATED, INTERLEAVED, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        tl.store(partial + tl.program_id(1).to(tl.int64) * capacity + lines, products, mask=lines < end)
