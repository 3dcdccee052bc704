"""Differentiation: mixes of inputs that require grad, reuse of the graph, what is refused; autocast.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from helpers import saved_tensors
from torch import Tensor

from tilemoe import reference
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.testing import assert_equal, forward_and_grads, hostile_routings, make_inputs
from tilemoe.testing.inputs import output_grad

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
NAMES = ("x", "w1", "w2", "scores", "b1", "b2")


def leaves(plan: RoutingPlan, *size: int, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.requires_grad_() for name, tensor in make_inputs(plan, *size, **options).items()}


@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_every_mix_of_inputs_that_require_grad(recompute: str | None) -> None:
    """All 63 subsets: the same gradients as with all six, none for the others."""
    plan = PLANS["sentinels"]

    inputs = make_inputs(plan, 8, 8, bias=True)
    full = forward_and_grads(moe, inputs, plan)
    do = output_grad(full["o"])
    for size in range(1, len(NAMES) + 1):
        for chosen in combinations(NAMES, size):
            given = {key: tensor.detach().requires_grad_(key in chosen) for key, tensor in inputs.items()}
            o = moe(plan=plan, recompute=recompute, **given)
            assert torch.equal(o, full["o"])
            o.backward(do)
            found = {key: tensor.grad for key, tensor in given.items() if tensor.grad is not None}
            assert_equal(found, {key: full[f"d{key}"] for key in chosen}, chosen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sentinels", "pairs, repeated", "no tokens", "pairs, none"])
def test_recomputing_is_bit_equal(name: str, dtype: torch.dtype) -> None:
    plan = PLANS[name]
    for size, activation in (((16, 8), "swiglu"), ((5, 3), "gelu_tanh"), ((8, 5), "swiglu_oai")):
        inputs = make_inputs(plan, *size, activation, dtype=dtype, bias=True)
        kept = forward_and_grads(moe, inputs, plan, activation=activation)
        again = forward_and_grads(moe, inputs, plan, activation=activation, recompute="up_proj")
        assert_equal(kept, again)


@pytest.mark.parametrize("recompute", [None, "up_proj"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_double_use_of_the_graph(dtype: torch.dtype, recompute: str | None) -> None:
    plan = PLANS["random"]
    inputs = leaves(plan, 16, 8, dtype=dtype, bias=True)
    o = moe(plan=plan, recompute=recompute, **inputs)
    targets, loss = list(inputs.values()), o.square().sum()
    first = torch.autograd.grad(loss, targets, retain_graph=True)
    assert_equal(torch.autograd.grad(loss, targets, retain_graph=True), first)
    assert_equal(torch.autograd.grad(loss, targets), first)
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        torch.autograd.grad(o.sum(), targets)


def test_the_same_weights_in_two_layers_of_one_graph() -> None:
    plan = PLANS["K = E"]
    inputs = make_inputs(plan, 8, 8, dtype=torch.float64)

    def twice(layer: Any, plan: RoutingPlan, x: Tensor, **rest: Tensor) -> Tensor:
        return layer(x=layer(x=x, plan=plan, **rest), plan=plan, **rest)

    got = forward_and_grads(lambda **given: twice(moe, **given), inputs, plan)
    expected = forward_and_grads(lambda **given: twice(reference.moe, **given), inputs, plan)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused_by_name(name: str) -> None:
    plan = PLANS["random"]
    inputs = leaves(plan, 3, 2, dtype=torch.float64, bias=True)
    (grad,) = torch.autograd.grad(moe(plan=plan, **inputs).square().sum(), inputs[name], create_graph=True)
    with pytest.raises(RuntimeError, match=r"tilemoe.moe is differentiable once.*tilemoe.reference.moe"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(reference.moe(plan=plan, **inputs).square().sum(), inputs[name], create_graph=True)
    grad.sum().backward()  # what the message recommends works


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_kept(mode: Any) -> None:
    plan = PLANS["sentinels"]
    inputs = leaves(plan, 16, 8, bias=True)
    expected = moe(plan=plan, **inputs)
    with saved_tensors() as packed:
        with mode():
            o = moe(plan=plan, **inputs)
        frozen = moe(plan=plan, **{name: tensor.detach() for name, tensor in inputs.items()})
    assert not packed
    assert o.grad_fn is None
    assert frozen.grad_fn is None
    assert not frozen.requires_grad
    assert torch.equal(o, expected)
    assert torch.equal(frozen, expected)


def test_an_input_changed_in_place_is_noticed() -> None:
    plan = PLANS["random"]
    inputs = leaves(plan, 16, 8)
    for name in ("x", "w1", "w2"):
        o = moe(plan=plan, **inputs)
        with torch.no_grad():
            inputs[name].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_output_has_autocasts_dtype_and_gradients_the_parameters(dtype: torch.dtype, recompute: str | None) -> None:
    plan, inputs = PLANS["sentinels"], leaves(PLANS["sentinels"], 16, 8, bias=True)
    with torch.autocast("cpu", dtype=dtype):
        o = moe(plan=plan, recompute=recompute, **inputs)
    assert o.dtype == dtype
    o.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in inputs.values())
    cast = {n: t.detach().to(torch.float32 if n == "scores" else dtype).requires_grad_() for n, t in inputs.items()}
    by_hand = moe(plan=plan, recompute=recompute, **cast)
    assert torch.equal(o, by_hand)
    by_hand.sum().backward()
    grads, wanted = ([tensor.grad.float() for tensor in each.values()] for each in (inputs, cast))
    assert_equal(grads, wanted)


def test_scores_are_not_lowered() -> None:
    plan, inputs = PLANS["sentinels"], leaves(PLANS["sentinels"], 16, 8, bias=True)
    finer = {**inputs, "scores": inputs["scores"] * (1 + 2**-12)}  # equal in bf16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, other = moe(plan=plan, **inputs), moe(plan=plan, **finer)
    grad_one, grad_other = (torch.autograd.grad(o, inputs["w2"], output_grad(o))[0] for o in (one, other))
    assert not torch.equal(grad_one, grad_other)


def test_mixed_dtypes_are_welcome_under_autocast() -> None:
    plan, inputs = PLANS["sentinels"], leaves(PLANS["sentinels"], 16, 8, bias=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = moe(plan=plan, **inputs)
        mixed = moe(plan=plan, **{**inputs, "x": inputs["x"].bfloat16(), "b1": inputs["b1"].half().float()})
        assert mixed.dtype == torch.bfloat16
        assert torch.equal(moe(plan=plan, **{**inputs, "x": inputs["x"].bfloat16()}), expected)


def test_fp64_is_left_alone_and_off_changes_nothing() -> None:
    single = leaves(PLANS["sentinels"], 16, 8, bias=True)
    with torch.autocast("cpu", enabled=False):
        off = moe(plan=PLANS["sentinels"], **single)
    assert torch.equal(off, moe(plan=PLANS["sentinels"], **single))
    plan, inputs = PLANS["sentinels"], leaves(PLANS["sentinels"], 16, 8, dtype=torch.float64, bias=True)
    expected = moe(plan=plan, **inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(moe(plan=plan, **inputs), expected)
        with pytest.raises(ValueError, match=r"w1 is torch.float64 but x is torch.bfloat16"):
            moe(plan=plan, **{**single, "w1": inputs["w1"]})


@pytest.mark.parametrize("name", ["sentinels", "pairs, repeated"])
@pytest.mark.parametrize("recompute", [None, "up_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_backward_inside_autocast_is_the_same(dtype: torch.dtype, recompute: str | None, name: str) -> None:
    """ds and db2 are computed in fp32 products that autocast would lower."""
    plan = PLANS[name]
    for size in ((16, 8), (5, 3)):
        inputs = leaves(plan, *size, dtype=dtype, bias=True)
        o = moe(plan=plan, recompute=recompute, **inputs)
        do = output_grad(o)
        outside = torch.autograd.grad(o, list(inputs.values()), do, retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = torch.autograd.grad(o, list(inputs.values()), do)
        assert_equal(inside, outside)
