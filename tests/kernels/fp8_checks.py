"""A backend's FP8 GEMMs against the torch backend of the same precision, each by itself, on the same operands.

T tokens · d hidden_size · n intermediate_size · R rows
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from triton_checks import turn

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.base import Backend, Operand
from tilemoe.kernels.experts.torch.fp8 import TorchFp8Backend
from tilemoe.plan import RoutingPlan
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
    """F1, F2, B1 and B3 to ``limits``, RMS error over RMS value; what F1 has quantised to e4m3's rounding."""
    spec = activation_spec(case.activation, case.gate_up, None, None)
    widths = (case.hidden_size, case.intermediate_size)
    given = make_inputs(plan, *widths, case.activation, dtype=case.dtype, bias=case.bias)
    x, w1, w2, b1, b2 = given["x"], given["w1"], given["w2"], given.get("b1"), given.get("b2")
    s, do = given["scores"].reshape(-1), torch.randn_like(given["x"])
    w1, w2 = (turn(w1), turn(w2)) if case.transposed else (w1, w2)
    rows = slice(0, int(plan.row_start_of_expert[-1]))
    exact, limit = TorchFp8Backend(), limits[case.dtype]

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
    assert rows.stop == 0 or relative_error(found[1], expected[1]) < max(limit, 1e-5), "ds"
    compare("a_scaled", found[2], expected[2])
    dh = expected[0].nan_to_num()
    compare("dx_rows", ours.up_proj_dgrad(dh, w1, plan), exact.up_proj_dgrad(dh, w1, plan))
    operands = ours.rows_operand(dh), ours.weight_operand(w1, 1)[:, :, half]
    compare("columns of dx_rows", ours.up_proj_dgrad(*operands, plan), exact.up_proj_dgrad(dh, w1[:, :, half], plan))
