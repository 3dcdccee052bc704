"""The helpers themselves: the comparison refuses what is wrong, the routings are as hostile as they say.

T tokens · E experts · K experts per token
"""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from helpers import assert_all_close_to_reference
from torch import Tensor

from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.testing import (
    ERROR_CAPS,
    assert_close_to_reference,
    assert_moe_matches_reference,
    hostile_routings,
    make_inputs,
    plain_moe,
    poisoned_memory,
    used_pairs,
)

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
EXACT = torch.randn(40, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
EXACT[7] = 0.0


def compare(actual: Tensor, dtype: torch.dtype = torch.float32, exact: Tensor = EXACT) -> None:
    assert_close_to_reference({"o": actual}, {"o": exact.to(dtype)}, {"o": exact}, dtype)


def noisy(exact: Tensor, relative: float, dtype: torch.dtype) -> Tensor:
    noise = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (exact * (1 + relative * noise)).to(dtype)


@pytest.mark.parametrize("dtype", list(ERROR_CAPS), ids=str)
def test_comparison_accepts_a_rounding_and_refuses_more(dtype: torch.dtype) -> None:
    compare(EXACT.to(dtype), dtype)
    with pytest.raises(AssertionError, match="RMS-relative error"):
        compare(noisy(EXACT, max(2 * torch.finfo(dtype).eps, 1e-11), dtype), dtype)


def changed(at: tuple[int, int], by: float) -> Tensor:
    t = EXACT.float()
    t[at] += by
    return t


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (torch.zeros(40, 30), "o: RMS-relative error 1.00e"),
        (changed((3, 4), 1e-3), "o: RMS-relative error"),
        (changed((7, 0), 1e-20), r"o: must be exactly zero at \[7\]"),
        (changed((0, 0), float("nan")), "o: not finite"),
        (changed((0, 0), float("inf")), "o: not finite"),
        (EXACT, "o: dtype torch.float64, expected torch.float32"),
        (EXACT.float()[:39], r"o: shape \(39, 30\), expected \(40, 30\)"),
        (-EXACT.float(), "o: RMS-relative error 2.00e"),
        (2 * EXACT.float(), "o: RMS-relative error 1.00e"),
        (EXACT.float().roll(1, 0), "o: RMS-relative error"),
    ],
    ids=["zeros", "one element", "nonzero", "nan", "inf", "dtype", "shape", "sign", "factor", "shifted"],
)
def test_comparison_refuses(actual: Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        compare(actual)


def test_several_are_compared_as_one() -> None:
    parts = [{"o": EXACT[3 * i : 3 * i + 3, 0]} for i in range(8, 13)]
    right = [{"o": part["o"].float()} for part in parts]
    unlucky = {"o": right[0]["o"] * (1 + 1e-6)}
    found = list(zip(right, right, parts, strict=True))
    with pytest.raises(AssertionError, match="RMS-relative error"):
        assert_all_close_to_reference([(unlucky, right[0], parts[0])], torch.float32)
    assert_all_close_to_reference([(right[0], *found[0][1:]), *found[1:]], torch.float32)
    with pytest.raises(AssertionError, match="RMS-relative error"):
        assert_all_close_to_reference([({"o": one[0]["o"] * (1 + 1e-6)}, *one[1:]) for one in found], torch.float32)


def test_comparison_refuses_a_single_element_that_the_mean_hides() -> None:
    exact = torch.randn(2000, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = exact.bfloat16()
    actual[17, 3] += 0.5  # far below two rounding errors in the RMS of two million elements
    with pytest.raises(AssertionError, match="an element is off by"):
        compare(actual, torch.bfloat16, exact)


@pytest.mark.parametrize(("caps", "is_refused"), [(0.9, False), (1.1, True)])
def test_an_element_far_beyond_the_mean_may_be_off_by_a_cap_of_its_own_size(caps: float, is_refused: bool) -> None:
    exact = torch.randn(2000, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact[17, 3] = 70.0
    actual = exact.clone()
    actual[17, 3] *= 1 + caps * ERROR_CAPS[torch.bfloat16]  # at a cap 2.1, 12 caps of the RMS are 0.36
    with pytest.raises(AssertionError, match="an element is off by") if is_refused else nullcontext():
        compare(actual.bfloat16(), torch.bfloat16, exact)


def test_comparison_refuses_inputs_that_prove_nothing() -> None:
    with pytest.raises(AssertionError, match="badly scaled"):
        compare((1e-6 * EXACT).float(), exact=1e-6 * EXACT)
    with pytest.raises(AssertionError, match="the exact value is not finite"):
        compare(EXACT.float(), exact=EXACT / 0)
    with pytest.raises(AssertionError, match="must be exactly zero, found"):
        compare(torch.full((2, 2), 1e-30), exact=torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="the three must hold the same names"):
        assert_close_to_reference({}, {"o": EXACT}, {"o": EXACT}, torch.float32)


def forget_a_pair(plan: RoutingPlan, scores: Tensor, **rest: Tensor) -> Tensor:
    keep = torch.ones_like(scores)
    keep[3, 1] = 0
    return moe(plan=plan, scores=scores * keep, **rest)


def transpose_gate_and_up(plan: RoutingPlan, w1: Tensor, **rest: Tensor) -> Tensor:
    return moe(plan=plan, w1=torch.cat(w1.chunk(2, dim=1)[::-1], dim=1), **rest)


def drop_a_gradient(plan: RoutingPlan, w2: Tensor, **rest: Tensor) -> Tensor:
    return moe(plan=plan, w2=w2.detach() + 0.5 * (w2 - w2.detach()), **rest)


@pytest.mark.parametrize("wrong", [forget_a_pair, transpose_gate_and_up, drop_a_gradient])
def test_a_wrong_layer_is_caught(wrong: Callable[..., Tensor]) -> None:
    plan = PLANS["random"]
    inputs = make_inputs(plan, 16, 8)
    assert_moe_matches_reference(inputs, plan, plain_moe)
    with pytest.raises(AssertionError, match=r"RMS-relative error|must be exactly zero"):
        assert_moe_matches_reference(inputs, plan, wrong)


def test_routings_cover_what_breaks_kernels() -> None:
    facts = {name: facts_of(plan) for name, plan in PLANS.items()}
    assert len(facts) == len(list(hostile_routings())), "names are unique"
    both = {"T = 0", "T = 1", "E = 1", "R = 0", "P = 0", "an empty expert", "one expert has all", "ragged"}
    both |= {"skipped pairs", "a token without a row", "token 0 without a row"}
    wanted = {True: both | {"K = E"}, False: both | {"a repeated pair", "pairs out of order"}}
    for is_topk, names in wanted.items():
        found = [facts[r.name] for r in hostile_routings() if r.is_topk == is_topk]
        assert names <= set().union(*found), names - set().union(*found)


def facts_of(plan: RoutingPlan) -> set[str]:
    rows = plan.rows_per_expert.tolist()
    used = used_pairs(plan)
    tokens = plan.token_of_row[: sum(rows)].tolist()
    experts = [expert for expert, count in enumerate(rows) for _ in range(count)]
    in_order = plan.pair_of_row[: sum(rows)].tolist()
    per_token = plan.num_pairs // max(plan.num_tokens, 1)
    return {
        name
        for name, holds in {
            "T = 0": plan.num_tokens == 0,
            "T = 1": plan.num_tokens == 1,
            "E = 1": plan.num_experts == 1,
            "R = 0": sum(rows) == 0,
            "P = 0": plan.num_pairs == 0,
            "K = E": plan.num_tokens > 0 and per_token == plan.num_experts > 1,
            "an empty expert": 0 in rows and sum(rows) > 0,
            "one expert has all": plan.num_experts > 1 and max(rows) == sum(rows) > 1,
            "skipped pairs": bool((~used).any()) and bool(used.any()),
            "a token without a row": len(set(tokens)) < plan.num_tokens and sum(rows) > 0,
            "token 0 without a row": 0 not in tokens and plan.num_tokens > 0 and sum(rows) > 0,
            "a repeated pair": len(set(zip(tokens, experts, strict=True))) < len(tokens),
            "pairs out of order": sorted(tokens) != [t for _, t in sorted(zip(in_order, tokens, strict=True))],
            "ragged": any(count % 8 for count in rows),
        }.items()
        if holds
    }


@pytest.mark.parametrize("tile", [4, 16, 128])
def test_ragged_routings_straddle_the_tile(tile: int) -> None:
    plans = {routing.name: routing.plan for routing in hostile_routings(tile)}
    assert plans["ragged tiles"].rows_per_expert.tolist() == [tile - 1, 1, tile, 0, tile + 1]
    for plan in plans.values():
        plan.check()


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_inputs_are_of_order_one_and_what_may_not_be_read_is_nan(activation: str) -> None:
    plan = PLANS["sentinels"]
    inputs = make_inputs(plan, 64, 32, activation, bias=True, dtype=torch.bfloat16)
    assert list(inputs) == ["x", "w1", "w2", "scores", "b1", "b2"]
    assert inputs["scores"].dtype == torch.float32
    assert torch.equal(inputs["scores"].reshape(-1).isnan(), ~used_pairs(plan))
    assert inputs["x"][0].isnan().all()
    assert inputs["x"][1].isfinite().all()
    out = assert_moe_matches_reference(inputs, plan, plain_moe, activation=activation)
    for name, value in out.items():
        rms = float(value.double().square().mean().sqrt())
        assert 0.02 < rms < 50, f"{name} {rms}"
    assert not out["o"][0].any()


def test_poisoned_memory_is_nan_and_leaves_no_trace() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with poisoned_memory():
        assert torch.empty(5).isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
        assert torch.ones(2).new_empty(4).isnan().all()
        assert torch.empty(3, dtype=torch.int32).eq(2**31 - 1).all()
    after = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    assert after == before
    with pytest.raises(ZeroDivisionError), poisoned_memory():
        _ = 1 / 0
    assert torch.are_deterministic_algorithms_enabled() == before[0]
