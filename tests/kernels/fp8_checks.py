"""A backend's FP8 GEMMs against the torch backend of the same precision, each by itself, on the same operands.

T tokens · d hidden_size · n intermediate_size · R rows
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from triton_checks import turn

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import is_column_major
from tilemoe.kernels.experts.formats.fp8 import BLOCK, quantize
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.transpose import WgradOperands
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.launch import ceil_div
from tilemoe.testing import make_inputs, relative_error

ROUNDING = 0.03  # of e4m3's three bits: 1 / 16 at most, 2.6% in the square mean


class Fp8Case(NamedTuple):
    activation: str = "swiglu"
    gate_up: str = "concatenated"
    bias: bool = False
    transposed: bool = False
    dtype: torch.dtype = torch.bfloat16
    hidden_size: int = 256
    intermediate_size: int = 128


def assert_gemms_agree(ours: Backend, plan: RoutingPlan, case: Fp8Case, limits: Mapping[torch.dtype, float]) -> None:
    """up_proj, down_proj, down_proj_dgrad and up_proj_dgrad to ``limits``, RMS error over RMS value; what up_proj has
    quantised to e4m3's rounding."""
    spec = activation_spec(case.activation, case.gate_up, None, None)
    widths = (case.hidden_size, case.intermediate_size)
    given = make_inputs(plan, *widths, case.activation, dtype=case.dtype, bias=case.bias)
    x, w1, w2, b1, b2 = given["x"], given["w1"], given["w2"], given.get("b1"), given.get("b2")
    s, do = given["scores"].reshape(-1), torch.randn_like(given["x"])
    w1, w2 = (turn(w1), turn(w2)) if case.transposed else (w1, w2)
    rows = slice(0, int(plan.row_start_of_expert[-1]))
    exact, limit = backend_named("torch_fp8"), limits[case.dtype]

    def compare(name: str, found: Tensor | Operand, expected: Tensor) -> None:
        assert found.shape == expected.shape if isinstance(found, Tensor) else found.data.shape == expected.shape, name
        within = limit if isinstance(found, Tensor) else ROUNDING
        dense = found if isinstance(found, Tensor) else found.dense(torch.float32)
        assert rows.stop == 0 or relative_error(dense[rows], expected[rows]) < within, name

    (a, h), (a_expected, h_expected) = (each.up_proj_act(x, w1, b1, plan, spec) for each in (ours, exact))
    compare("h", h, h_expected)
    compare("a", a, a_expected)
    compare("a of inference", ours.up_proj_act_inference(x, w1, b1, plan, spec), a_expected)
    given_a = a if isinstance(a, Operand) else a_expected.nan_to_num()  # past R, anything
    dense_a = given_a.dense(torch.float32).nan_to_num() if isinstance(given_a, Operand) else given_a  # to be as exact
    compare("y", ours.down_proj(given_a, w2, b2, plan), exact.down_proj(dense_a, w2, b2, plan))
    half = slice(128, 256)
    bias_half = None if b2 is None else b2[:, half]
    y_half = exact.down_proj(dense_a, w2[:, half], bias_half, plan)
    for weight in (w2[:, half], ours.weight_operand(w2, 2)[:, half]):
        compare("columns of y", ours.down_proj_inference(given_a, weight, bias_half, plan), y_half)
    found, expected = (each.down_proj_dgrad_dact(do, w2, b2, h_expected, s, plan, spec) for each in (ours, exact))
    compare("dh", found[0], expected[0])
    compare("a_scaled", found[2], expected[2])
    # ds = <da', a>: a single row's may cancel, and is then as exact as its summands, which are as large as many ds are.
    da = exact.up_proj_dgrad(do[plan.token_of_row.long()], w2, plan)
    summands = (da * expected[2])[rows] / s[plan.pair_of_row[rows].long()][:, None]
    assert rows.stop == 0 or (found[1] - expected[1]).norm() < max(limit, 1e-5) * summands.norm(), "ds"
    dh = expected[0].nan_to_num()
    compare("dx_rows", ours.up_proj_dgrad(dh, w1, plan), exact.up_proj_dgrad(dh, w1, plan))
    operands = ours.rows_operand(dh), ours.weight_operand(w1, 1)[:, :, half]
    compare("columns of dx_rows", ours.up_proj_dgrad(*operands, plan), exact.up_proj_dgrad(dh, w1[:, :, half], plan))


def assert_wgrads_agree(
    ours: Backend, plan: RoutingPlan, d: int, width: int, column_major: bool, dtype: torch.dtype, limit: float
) -> None:
    """down_proj_wgrad and up_proj_wgrad, written and added to what is there, with db1 and without, to ``limit``; all
    in FP8."""
    torch.manual_seed(0)
    by_token = torch.randn(plan.num_tokens, d, device=plan.device).to(dtype)
    by_row = torch.randn(plan.capacity, width, device=plan.device).to(dtype)
    by_token *= torch.rand(plan.num_tokens, 1, device=plan.device).to(dtype)  # scales of tokens differ
    exact = backend_named("torch_fp8")
    expected = exact.down_proj_wgrad(by_token.float(), by_row.float(), plan)
    before = torch.randn_like(expected)
    total = turn(before) if column_major else before.clone()
    dw2 = ours.down_proj_wgrad(by_token, by_row, plan, column_major)
    dw1_beside, db1 = ours.up_proj_wgrad_bias_grad(by_token, by_row, plan, column_major)
    assert ours.down_proj_wgrad(by_token, by_row, plan, column_major, total) is total
    found = {
        "dw2": dw2,
        "dw1": ours.up_proj_wgrad(by_token, by_row, plan, column_major).transpose(1, 2),
        "dw1 beside db1": dw1_beside.transpose(1, 2),
        "dw2, added": total - before,
    }
    for name, value in found.items():
        assert value.shape == expected.shape, name
        assert name == "dw2, added" or is_column_major(value) == (column_major != name.startswith("dw1")), name
        assert not bool(value[plan.rows_per_expert == 0].any()), f"{name} of an expert without rows"
        assert not expected.any() or relative_error(value, expected) < limit, name
    right = exact.up_proj_bias_grad(by_row.float(), plan)
    assert not right.any() or relative_error(db1, right) < 1e-3, "db1"


def transposed_by_torch(by_token: Tensor, by_row: Tensor, plan: RoutingPlan) -> WgradOperands:
    """What `wgrad_operands` makes, in a single slice, expert by expert; zeros where it leaves what was there."""
    tokens, starts = quantize(by_token, (1, by_token.shape[1])), plan.row_start_of_expert.tolist()
    room = (ceil_div(plan.capacity, BLOCK) + plan.num_experts) * BLOCK
    left, right = (torch.zeros(t.shape[1], room, device=t.device) for t in (by_token, by_row))
    scale = torch.ones(plan.num_experts, device=by_row.device)
    for expert, (start, end) in enumerate(pairwise(starts)):
        if end > start:
            token = plan.token_of_row[start:end].long()
            rows = quantize(by_row[start:end].float() * tokens.scale[token], (end - start, by_row.shape[1]))
            first = (start // BLOCK + expert) * BLOCK
            left[:, first : first + end - start] = tokens.data[token].float().T
            right[:, first : first + end - start] = rows.data.float().T
            scale[expert] = rows.scale.squeeze()
    return WgradOperands(0, left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn), scale)
