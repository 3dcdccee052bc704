"""Differentiation: gradcheck, every mix of inputs that require grad, reuse of the graph, what is refused.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilemoe import reference
from tilemoe.config import ACTIVATIONS, GATE_UP_LAYOUTS, GATED_ACTIVATIONS
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.testing import assert_equal, forward_and_grads, hostile_routings, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
NAMES = ("x", "w1", "w2", "scores", "b1", "b2")


def small_plans() -> dict[str, RoutingPlan]:
    return {
        "topk": plan_topk(torch.tensor([[0, 2], [2, 1], [3, 0]]), 4),
        "pairs": plan_pairs(torch.tensor([1, 0, 1, 1, 2]), torch.tensor([0, 2, 2, 2, 3]), 4, 4),
    }


def leaves(plan: RoutingPlan, *size: int, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.requires_grad_() for name, tensor in make_inputs(plan, *size, **options).items()}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("plan", ["topk", "pairs"])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gradcheck(name: str, plan: str, bias: bool) -> None:
    routing = small_plans()[plan]
    inputs = make_inputs(routing, 3, 2, name, dtype=torch.float64, bias=bias, seed=1)
    # Finite differences mean nothing where a value was NaN on purpose (an unread score, an unrouted token).
    inputs = {key: tensor.nan_to_num(0.5).requires_grad_() for key, tensor in inputs.items()}
    for layout in GATE_UP_LAYOUTS if name in GATED_ACTIVATIONS else GATE_UP_LAYOUTS[:1]:
        for recompute in (None, "up_proj"):

            def run(*tensors: Tensor, layout: str = layout, recompute: str | None = recompute) -> Tensor:
                given = dict(zip(inputs, tensors, strict=True))
                return moe(plan=routing, activation=name, gate_up=layout, recompute=recompute, **given)

            assert torch.autograd.gradcheck(run, tuple(inputs.values()), nondet_tol=0.0)


@pytest.mark.parametrize("recompute", [None, "up_proj"])
@pytest.mark.parametrize("name", ["sentinels", "pairs, unordered"])
def test_every_mix_of_inputs_that_require_grad(name: str, recompute: str | None) -> None:
    """All 63 subsets: the same gradients as with all six, none for the others."""
    plan = PLANS[name]
    inputs = make_inputs(plan, 8, 8, bias=True)
    full = forward_and_grads(moe, inputs, plan)
    do = torch.randn(full["o"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    for size in range(1, len(NAMES) + 1):
        for chosen in combinations(NAMES, size):
            given = {key: tensor.detach().requires_grad_(key in chosen) for key, tensor in inputs.items()}
            o = moe(plan=plan, recompute=recompute, **given)
            assert torch.equal(o, full["o"])
            o.backward(do)
            for key, tensor in given.items():
                if key in chosen:
                    assert tensor.grad is not None, (chosen, key)
                    assert torch.equal(tensor.grad, full[f"d{key}"]), (chosen, key)
                else:
                    assert tensor.grad is None, (chosen, key)


def test_a_mix_that_differentiates_only_b2_needs_no_h() -> None:
    """db2 reads neither h nor the activation: recomputing it would be waste."""
    plan = PLANS["random"]
    given = make_inputs(plan, 8, 8, bias=True)
    given["b2"].requires_grad_()
    o = moe(plan=plan, recompute="up_proj", **given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        o.sum().backward()
    ran = {event.name for event in profile.events() if event.name.startswith("tilemoe::")}
    assert ran == {"tilemoe::down_proj_bias_grad"}


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
    second = torch.autograd.grad(loss, targets, retain_graph=True)
    last = torch.autograd.grad(loss, targets)
    for one, two, three in zip(first, second, last, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    with pytest.raises(RuntimeError, match=r"second time|already been freed"):
        torch.autograd.grad(o.sum(), targets)


def test_gradients_accumulate() -> None:
    plan = PLANS["random"]
    inputs = leaves(plan, 16, 8)
    for _ in range(2):
        moe(plan=plan, **inputs).sum().backward()
    once = leaves(plan, 16, 8)
    moe(plan=plan, **once).sum().backward()
    for name, tensor in inputs.items():
        torch.testing.assert_close(tensor.grad, 2 * once[name].grad)


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
    plan = small_plans()["topk"]
    inputs = leaves(plan, 3, 2, dtype=torch.float64, bias=True)
    (grad,) = torch.autograd.grad(moe(plan=plan, **inputs).square().sum(), inputs[name], create_graph=True)
    with pytest.raises(RuntimeError, match=r"tilemoe.moe is differentiable once.*tilemoe.reference.moe"):
        grad.sum().backward()
    (grad,) = torch.autograd.grad(reference.moe(plan=plan, **inputs).square().sum(), inputs[name], create_graph=True)
    grad.sum().backward()  # what the message recommends works


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_is_refused_where_all_else_is_frozen(name: str) -> None:
    plan = small_plans()["topk"]
    inputs = {key: t.detach() for key, t in leaves(plan, 3, 2, dtype=torch.float64, bias=True).items()}
    inputs[name].requires_grad_()
    (grad,) = torch.autograd.grad(moe(plan=plan, **inputs).sum(), inputs[name], create_graph=True)
    with pytest.raises(RuntimeError, match=r"tilemoe.moe is differentiable once"):
        torch.autograd.grad(grad.square().sum() + inputs[name].sum(), inputs[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_nothing_is_kept(mode: Any) -> None:
    plan = PLANS["sentinels"]
    inputs = leaves(plan, 16, 8, bias=True)
    expected = moe(plan=plan, **inputs)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
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


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_activation_checkpointing(recompute: str | None, use_reentrant: bool) -> None:
    plan = PLANS["sentinels"]
    inputs = leaves(plan, 16, 8, dtype=torch.bfloat16, bias=True)

    def layer(x: Tensor, w1: Tensor, w2: Tensor, scores: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        return moe(x, w1, w2, plan, scores, b1=b1, b2=b2, recompute=recompute)

    plain, again = layer(*inputs.values()), checkpoint(layer, *inputs.values(), use_reentrant=use_reentrant)
    assert torch.equal(plain, again)
    for output in (plain, again):
        output.sum().backward()
        grads = [tensor.grad for tensor in inputs.values()]
        for tensor in inputs.values():
            tensor.grad = None
        if output is plain:
            expected = grads
    for name, one, other in zip(inputs, grads, expected, strict=True):
        assert torch.equal(one, other), name


def test_a_hook_on_the_output_sees_and_may_change_the_gradient() -> None:
    plan = PLANS["random"]
    inputs = leaves(plan, 8, 8)
    o = moe(plan=plan, **inputs)
    o.register_hook(lambda grad: grad * 0)
    o.sum().backward()
    assert not inputs["w1"].grad.any()


def test_saved_tensors_may_be_moved_by_hooks() -> None:
    """As CPU offloading does: what is unpacked is another tensor."""
    plan = PLANS["random"]
    inputs = leaves(plan, 16, 8, bias=True)
    expected = torch.autograd.grad(moe(plan=plan, **inputs).sum(), list(inputs.values()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        o = moe(plan=plan, **inputs)
    assert_equal(torch.autograd.grad(o.sum(), list(inputs.values())), expected)
