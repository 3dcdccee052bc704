"""A backend's FP8 GEMMs against the torch backend of the same precision, each by itself, on the same operands.

T tokens · d hidden_size · n intermediate_size · R rows
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from triton_checks import Case, operands_of, turn

from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.dense import is_column_major
from tilemoe.kernels.experts.formats.fp8 import BLOCK, ROWS, quantize
from tilemoe.kernels.experts.formats.operand import Operand
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.formats.transpose import WgradOperands
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.launch import ceil_div
from tilemoe.testing import relative_error

ROUNDING = 0.03  # of e4m3's three bits: 1 / 16 at most, 2.6% in the square mean


def assert_close(where: str, actual: Tensor, exact: Tensor, limit: float, scale: float | None = None) -> None:
    """RMS error over RMS value, or over ``scale``, at most ``limit``; zero throughout where the exact value is."""
    assert actual.shape == exact.shape, where
    assert bool(actual.isfinite().all()), f"{where}: not finite"
    norm, error = float(exact.norm()), float((actual.float() - exact).norm())
    scale = norm if scale is None else scale
    assert error <= limit * scale, f"{where}: RMS-relative error {error / max(scale, 1e-30):.2e}"
    assert bool(actual.any()) == (norm > 0), f"{where}: all zero"


def assert_gemms_agree(ours: Backend, plan: RoutingPlan, case: Case, limit: float) -> list[tuple[Operand, Tensor]]:
    """up_proj, down_proj, down_proj_dgrad and up_proj_dgrad to ``limit`` against the torch backend in fp32, each given
    what the one before it wrote; what up_proj has quantised to e4m3's rounding. Returns that, and its exact values."""
    spec, (x, w1, w2, b1, b2, s) = case.spec, operands_of(case, plan)
    do, exact = torch.randn_like(x), backend_named("torch_fp8")
    rows = slice(0, int(plan.row_start_of_expert[-1]))
    in_use = (rows,)  # of an operand

    def compare(name: str, actual: Tensor, expected: Tensor) -> None:
        assert actual.dtype in (case.dtype, torch.float32), f"{name} of {case}"
        assert_close(f"{name} of {case}", actual[rows], expected[rows], limit)

    a, h = ours.up_proj_act(x, w1, b1, plan, spec)
    exact_a, exact_h = exact.up_proj_act(x.float(), w1.float(), _float(b1), plan, spec)
    compare("h", h, exact_h)
    quantised = [each for each in (a, ours.up_proj_act_inference(x, w1, b1, plan, spec)) if plan.capacity]
    for each in quantised:
        assert_close(f"a of {case}", each[in_use].dense(torch.float32), exact_a[rows], ROUNDING)
    known_a = a.dense(torch.float32) if isinstance(a, Operand) else a.float()
    compare("y", ours.down_proj(a, w2, b2, plan), exact.down_proj(known_a, w2.float(), _float(b2), plan))
    dh, ds, a_scaled = ours.down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
    exact_dh, exact_ds, exact_a_scaled = exact.down_proj_dgrad_dact(
        do.float(), w2.float(), _float(b2), h.float(), s, plan, spec
    )
    compare("dh", dh, exact_dh)
    compare("a_scaled", a_scaled, exact_a_scaled)
    scale = None
    if plan.device.type != "cpu":
        # ds = <da', a>: a single row's may cancel on a GPU, and is then as exact as its summands.
        da = exact.up_proj_dgrad(do.float()[plan.token_of_row.long()], w2.float(), plan)
        scale = float(((da * exact_a_scaled)[rows] / s[plan.pair_of_row[rows].long()][:, None]).norm())
    assert_close(f"ds of {case}", ds, exact_ds, limit, scale)
    compare("dx_rows", ours.up_proj_dgrad(dh, w1, plan), exact.up_proj_dgrad(dh.float(), w1.float(), plan))
    return [(each[in_use], exact_a[rows]) for each in quantised]


def assert_columns_agree(ours: Backend, plan: RoutingPlan, case: Case, columns: slice, limit: float) -> None:
    """down_proj and up_proj_dgrad of a slice of d, of weights that are quantised once for all slices, or there."""
    _, w1, w2, _, bias, _ = operands_of(replace(case, bias=True), plan)
    b2 = bias[:, columns]
    a, dh = (torch.randn(plan.capacity, each, device=w1.device).to(case.dtype) for each in (w2.shape[2], w1.shape[1]))
    exact, rows = backend_named("torch_fp8"), slice(0, int(plan.row_start_of_expert[-1]))
    expected = exact.down_proj(a.float(), w2[:, columns].float(), b2.float(), plan)[rows]
    for weight in (w2[:, columns], ours.weight_operand(w2, 2)[:, columns]):
        y = ours.down_proj_inference(quantize(a, ROWS), weight, b2, plan)
        assert_close(f"columns of y, {case}", y[rows], expected, limit)
    expected = exact.up_proj_dgrad(dh.float(), w1[:, :, columns].float(), plan)[rows]
    dx = ours.up_proj_dgrad(ours.rows_operand(dh), ours.weight_operand(w1, 1)[:, :, columns], plan)
    assert_close(f"columns of dx_rows, {case}", dx[rows], expected, limit)


def _float(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float()


def assert_wgrads_agree(
    ours: Backend, plan: RoutingPlan, d: int, width: int, column_major: bool, dtype: torch.dtype, limit: float
) -> None:
    """down_proj_wgrad and up_proj_wgrad, written and added to what is there, to ``limit``; all in FP8."""
    torch.manual_seed(0)
    by_token = torch.randn(plan.num_tokens, d, device=plan.device).to(dtype)
    by_row = torch.randn(plan.capacity, width, device=plan.device).to(dtype)
    by_token *= torch.rand(plan.num_tokens, 1, device=plan.device).to(dtype)  # scales of tokens differ
    exact = backend_named("torch_fp8")
    expected = exact.down_proj_wgrad(by_token.float(), by_row.float(), plan)
    before = torch.randn_like(expected)
    total = turn(before) if column_major else before.clone()
    dw2 = ours.down_proj_wgrad(by_token, by_row, plan, column_major)
    assert ours.down_proj_wgrad(by_token, by_row, plan, column_major, total) is total
    found = {
        "dw2": dw2,
        "dw1": ours.up_proj_wgrad(by_token, by_row, plan, column_major).transpose(1, 2),
        "dw2, added": total - before,
    }
    for name, value in found.items():
        assert value.shape == expected.shape, name
        assert name == "dw2, added" or is_column_major(value) == (column_major != name.startswith("dw1")), name
        assert not bool(value[plan.rows_per_expert == 0].any()), f"{name} of an expert without rows"
        assert not expected.any() or relative_error(value, expected) < limit, name


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
