"""The expert MLP with adapters against the reference with the merged weights; what it keeps; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import saved_tensors
from torch import Tensor

from tilemoe import reference
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing import hostile_routings, make_inputs, poisoned_memory, relative_error

D, N, R, SCALE = 16, 24, 4, 0.7
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=16)}
CASES = {
    "swiglu": ("swiglu", "concatenated", False),
    "oai": ("swiglu_oai", "interleaved", True),
    "relu2": ("relu2", "concatenated", True),
}


def given(
    plan: RoutingPlan, case: str, dtype: torch.dtype = torch.float64, d: int = D, n: int = N
) -> tuple[dict[str, Any], Adapters]:
    """Arguments of `moe` and adapters; x, the scores and the adapters want gradients."""
    activation, gate_up, bias = CASES[case]
    found: dict[str, Any] = make_inputs(plan, d, n, activation, dtype=dtype, bias=bias)
    experts, width, _ = found["w1"].shape
    generator = torch.Generator().manual_seed(1)
    shapes = ((experts, R, d), (experts, width, R), (experts, R, n), (experts, d, R))
    low_rank = [(0.3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]
    for name in ("x", "scores"):
        found[name].requires_grad_()
    return {**found, "plan": plan, "activation": activation, "gate_up": gate_up}, Adapters(*low_rank, SCALE)


def merged(arguments: dict[str, Any], adapters: Adapters) -> dict[str, Any]:
    w1 = arguments["w1"] + SCALE * adapters.up_b @ adapters.up_a
    w2 = arguments["w2"] + SCALE * adapters.down_b @ adapters.down_a
    return {**arguments, "w1": w1, "w2": w2}


def gradients(o: Tensor, arguments: dict[str, Any], adapters: Adapters) -> list[Tensor]:
    """Of x, the scores and the four adapters."""
    wanted = [arguments["x"], arguments["scores"], *adapters[:4]]
    do = torch.linspace(-1.0, 1.5, o.numel()).view_as(o).to(o.dtype)
    found = torch.autograd.grad(o, wanted, do, allow_unused=True)
    return [torch.zeros_like(like) if grad is None else grad for grad, like in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_hostile_routings_in_fp64(routing: str, case: str) -> None:
    arguments, adapters = given(ROUTINGS[routing], case)
    expected = reference.moe(**merged(arguments, adapters))
    with poisoned_memory():
        o = moe_lora(**arguments, adapters=adapters)
        found = gradients(o, arguments, adapters)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, gradients(expected, arguments, adapters), rtol=1e-10, atol=1e-10)


def plan_of(tokens: int = 40, experts: int = 5, k: int = 2) -> RoutingPlan:
    return plan_topk(torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :k], experts)


def in_fp64(value: Any) -> Any:
    return value.detach().double().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_errs_little_more_than_merged_weights_do(dtype: torch.dtype) -> None:
    arguments, adapters = given(plan_of(), "swiglu", dtype)
    exact_arguments = {name: in_fp64(value) for name, value in arguments.items()}
    exact_adapters = Adapters(*(in_fp64(adapter) for adapter in adapters[:4]), SCALE)
    exact = reference.moe(**merged(exact_arguments, exact_adapters))
    plain = moe(**merged(arguments, adapters))
    ours = moe_lora(**arguments, adapters=adapters)
    assert ours.dtype == dtype
    assert relative_error(ours.detach(), exact.detach()) < 2 * relative_error(plain.detach(), exact.detach())
    of_merged, of_exact = gradients(plain, arguments, adapters), gradients(exact, exact_arguments, exact_adapters)
    for found, merged_ones, true in zip(gradients(ours, arguments, adapters), of_merged, of_exact, strict=True):
        assert relative_error(found, true) < 2 * relative_error(merged_ones, true) + 1e-7


def test_adapters_of_another_dtype_and_autocast() -> None:
    arguments, adapters = given(plan_of(), "swiglu", torch.bfloat16)
    wide = Adapters(*(t.detach().float().requires_grad_() for t in adapters[:4]), SCALE)
    expected = moe_lora(**arguments, adapters=adapters)
    ours = moe_lora(**arguments, adapters=wide)
    assert torch.equal(ours, expected)
    assert {grad.dtype for grad in gradients(ours, arguments, wide)[2:]} == {torch.float32}
    in_fp32 = {name: t.float() if isinstance(t, Tensor) else t for name, t in arguments.items()}
    with torch.autocast("cpu", torch.bfloat16):
        under = moe_lora(**in_fp32, adapters=wide)
    assert under.dtype == torch.bfloat16
    assert torch.equal(under, expected)


def test_saved_are_x_h_u_the_scores_the_plan_and_what_is_alive_anyway() -> None:
    tokens, k, d, n, r = 64, 4, 128, 8, 4
    plan = plan_of(tokens, 8, k)
    x = torch.randn(tokens, d, dtype=torch.bfloat16, requires_grad=True)
    w1, w2 = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((8, 2 * n, d), (8, d, n)))
    shapes = ((8, r, d), (8, 2 * n, r), (8, r, n), (8, d, r))
    adapters = Adapters(*(torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes), 1.0)
    scores = torch.rand(tokens, k, requires_grad=True)
    with saved_tensors() as kept:
        moe_lora(x, w1, w2, plan, scores, adapters)
    saved = {tensor.untyped_storage().data_ptr(): tensor for tensor in kept}
    alive = {t.untyped_storage().data_ptr() for t in (x, w1, w2, scores, *adapters[:4])}
    held = sum(t.untyped_storage().nbytes() for place, t in saved.items() if place not in alive)
    rows = tokens * k
    index = (plan.token_of_row, plan.pair_of_row, plan.row_of_pair, plan.row_start_of_expert)
    plan_bytes = sum(t.nbytes for t in index)
    assert held == 2 * rows * (2 * n + r) + plan_bytes
    assert held < 2 * rows * d  # the gathered rows alone


BAD = [
    ({"down_a": lambda t: t[:, :2]}, r"down_a must be \(5, 4, 24\) to go with w2 \(5, 16, 24\), got \(5, 2, 24\)"),
    *(
        (
            {name: lambda t: t.clone().requires_grad_()},
            rf"{name} must be frozen under adapters; call {name}.requires_grad_\(F",
        )
        for name in ("w1", "w2", "b1", "b2")
    ),
    ({"plan": lambda p: replace(p, num_tokens=39)}, "plan was made for 39 tokens, but x has 40"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    arguments, adapters = given(plan_of(), "oai", torch.float32)
    for name, change in changes.items():
        if name in adapters._fields:
            adapters = adapters._replace(**{name: change(getattr(adapters, name))})
        else:
            arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        moe_lora(**arguments, adapters=adapters)
