"""Mistakes of a caller of the operator: one line that names the argument and the fix. Each argument with each kind of
wrong tensor: test_fuzz_wrong_calls.py.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from typing import Any

import pytest
import torch
from helpers import raises_one_line
from torch import Tensor

from tilemoe.kernels.choose import select_kernels
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.testing import make_inputs

T, D, N, E, K = 5, 8, 4, 3, 2
PLAN = plan_topk(torch.arange(T * K).view(T, K) % E, E)
PAIRS = plan_pairs(torch.arange(T * K) // K, torch.arange(T * K) % E, T, E)
INPUTS = make_inputs(PLAN, D, N, bias=True)


def ones(*shape: int, device: str = "cpu") -> Tensor:
    return torch.ones(shape, device=device)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": ones(T, 1, D)}, r"x must be \(T, d\), got shape \(5, 1, 8\); flatten the leading dimensions"),
    ({"x": ones(T, D, device="meta")}, "w1 is on cpu but x is on meta; move them to one device"),
    ({"activation": "silu"}, r"w1 must be \(3, 4, 8\) to go with w2"),
    ({"w2": ones(E, N, D)}, r"w2 must be \(E, d, n\) \(3, 8, 4\), got \(3, 4, 8\); pass w2.transpose\(1, 2\)"),
    ({"w1": ones(E, D, 6), "w2": ones(E, 3, D)}, r"w2 must be .*, got \(3, 3, 8\); pass w2.transpose\(1, 2\)"),
    ({"w2": ones(E, D, 0)}, r"w2 \(E, d, n\) must have no empty dimension, got shape \(3, 8, 0\)"),
    ({"plan": PAIRS}, r"scores must be \(P,\) with the plan's 10 pairs, got \(5, 2\)"),
    ({"plan": PAIRS, "scores": ones(T * K - 1)}, r"scores must be \(P,\) with the plan's 10 pairs, got \(9,\)"),
    ({"plan": plan_topk(torch.zeros(T + 2, K, dtype=torch.int64), E)}, "plan was made for 7 tokens, but x has 5"),
    ({"plan": plan_topk(torch.zeros(T, K, dtype=torch.int64), E + 1)}, "plan was made for 4 experts, but w1 has 3"),
    ({"plan": plan_topk(torch.zeros(T, K, dtype=torch.int64, device="meta"), E)}, "plan is on meta but x is on cpu"),
    ({"activation": "swish"}, "activation must be one of geglu, .*; got 'swish'"),
    ({"activation_limit": 7.0}, "activation_limit is .* of activation='swiglu_oai' or 'swiglu_clamped'; leave it None"),
    ({"activation": "swiglu_clamped", "activation_alpha": 1.0}, "activation_alpha is .*'swiglu_oai'; leave it None"),
    ({"activation": "swiglu_oai", "activation_limit": 0}, "activation_limit must be a finite number > 0, got 0"),
    ({"gate_up": "stacked"}, "gate_up must be one of concatenated, interleaved; got 'stacked'"),
    ({"recompute": "all"}, "recompute must be None or 'up_proj', got 'all'"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=[f"{i}-{'-'.join(changes)}" for i, (changes, _) in enumerate(REFUSED)]
)
def test_bad_arguments_are_named_in_one_line(changes: dict[str, Any], message: str) -> None:
    with raises_one_line(message):
        moe(**{**INPUTS, "plan": PLAN, **changes})


def test_the_arguments_they_were_made_from_are_fine() -> None:
    expected = moe(plan=PLAN, **INPUTS)
    assert expected.isfinite().all()
    flat = {**INPUTS, "scores": INPUTS["scores"].reshape(-1)}
    torch.testing.assert_close(moe(plan=PAIRS, **flat), expected)


@pytest.mark.parametrize(
    "kernels",
    ["torch", TorchBackend(), select_kernels("cpu", torch.float32).impl],
    ids=["name", "instance", "selected"],
)
def test_kernels_by_name_by_instance_and_as_selected(kernels: Any) -> None:
    assert torch.equal(moe(plan=PLAN, kernels=kernels, **INPUTS), moe(plan=PLAN, **INPUTS))
