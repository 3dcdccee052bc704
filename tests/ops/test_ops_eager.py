"""Operators with and without PyTorch's dispatcher: the same numbers, and whoever watches operators still sees them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tilemoe import reference
from tilemoe.ops import experts as library
from tilemoe.ops import plan as plan_ops
from tilemoe.ops.moe import moe
from tilemoe.ops.plan import plan_topk as plan_operator
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing import forward_and_grads, hostile_routings, make_inputs

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
FORWARD = {"tilemoe::moe"}
BACKWARD = {f"tilemoe::{op.name}" for op in library.BACKWARD_OPS} - {"tilemoe::up_proj"}


class Seen(TorchDispatchMode):
    """The names of the package's operators that pass through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilemoe":
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def leaves_of(plan: RoutingPlan, **options: Any) -> dict[str, Tensor]:
    given = make_inputs(plan, 16, 8, bias=True, **options)
    return {name: tensor.nan_to_num(0.5).requires_grad_() for name, tensor in given.items()}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_a_watched_call_gives_the_same_bits(name: str, recompute: str | None) -> None:
    plan = PLANS[name]
    inputs = make_inputs(plan, 16, 8, dtype=torch.bfloat16, bias=True)
    plain = forward_and_grads(moe, inputs, plan, recompute=recompute)
    with Seen() as seen:
        watched = forward_and_grads(moe, inputs, plan, recompute=recompute)
    assert seen.names == FORWARD | BACKWARD | ({"tilemoe::up_proj"} if recompute else set())
    for key, tensor in plain.items():
        assert torch.equal(tensor, watched[key]), key


def test_watching_the_backward_alone_is_enough() -> None:
    o = moe(plan=PLANS["random"], **leaves_of(PLANS["random"]))
    with Seen() as seen:
        o.sum().backward()
    assert seen.names == BACKWARD


def test_a_profile_names_the_operators() -> None:
    leaves = leaves_of(PLANS["random"])
    with torch.profiler.profile() as profile:
        moe(plan=PLANS["random"], **leaves).sum().backward()
    assert {event.name for event in profile.events() if event.name.startswith("tilemoe::")} == FORWARD | BACKWARD


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
def test_a_trace_names_the_operator() -> None:
    plan = PLANS["random"]
    inputs = make_inputs(plan, 16, 8)
    traced = torch.jit.trace(lambda x: moe(plan=plan, **{**inputs, "x": x}), inputs["x"], check_trace=False)
    assert "tilemoe::moe" in {node.kind() for node in traced.graph.nodes()}


def test_building_a_plan_is_seen_too() -> None:
    ids = torch.tensor([[0, 2], [1, 2]])
    plain = plan_operator(ids, 3, False)
    with Seen() as seen:
        watched = plan_operator(ids, 3, False)
    assert seen.names == {"tilemoe::plan_topk"}
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one, other)


def test_a_plan_is_told_whether_it_is_for_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an argument: what is repeated follows arguments, and compiled training runs its forward without autograd."""
    chosen: list[str] = []

    def watch(name: str) -> None:
        real = getattr(plan_ops, name)

        def select(*args: Any) -> Any:
            chosen.append(name)
            return real(*args)

        monkeypatch.setattr(plan_ops, name, select)

    for name in ("choose_plan", "choose_inference_plan"):
        watch(name)
    ids = torch.tensor([[0, 2], [1, 2]])
    leaves = leaves_of(plan_topk(ids, 3))

    def layer(x: Tensor) -> Tensor:
        return moe(plan=plan_topk(ids, 3), **{**leaves, "x": x})

    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        chosen.clear()
        function(leaves["x"]).sum().backward()
        with torch.no_grad():
            function(leaves["x"])
        assert chosen == ["choose_plan", "choose_inference_plan"]


def test_plain_calls_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with parameters, without grad, and where autograd is told to make a graph of nothing."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the registered operator was called")

    plan = PLANS["random"]
    leaves = {name: nn.Parameter(tensor.detach()) for name, tensor in leaves_of(plan).items()}
    for operator in (library.moe, *library.BACKWARD_OPS, plan_operator):
        monkeypatch.setattr(operator, "registered", refuse)
    plan_topk(torch.tensor([[0, 2], [1, 2]]), 3)
    moe(plan=plan, **leaves).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves.values())
    with torch.no_grad():
        moe(plan=plan, **leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moe(plan=plan, **leaves).float().sum().backward()


@pytest.mark.parametrize("name", ["x", "w1", "scores"])
def test_forward_mode_is_refused_not_dropped(name: str) -> None:
    plan = PLANS["random"]
    inputs = make_inputs(plan, 16, 8)
    with forward_ad.dual_level():
        moe(plan=plan, **inputs)
        dual = {**inputs, name: forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))}
        with pytest.raises(RuntimeError, match="tilemoe::moe has no forward-mode derivative"):
            moe(plan=plan, **dual)
        assert forward_ad.unpack_dual(reference.moe(plan=plan, **dual)).tangent is not None


def test_vmap_and_function_transforms_are_refused() -> None:
    x, ids, scores = torch.randn(3, 6, 16), torch.arange(12).view(6, 2) % 3, torch.rand(3, 6, 2)
    plan = plan_topk(ids, 3)
    weights = {name: tensor for name, tensor in make_inputs(plan, 16, 8).items() if name in ("w1", "w2")}

    def layer(x: Tensor, scores: Tensor) -> Tensor:
        return moe(x, plan=plan, scores=scores, **weights)

    refused = r"tilemoe::moe does not go through torch\.vmap or torch\.func\. Pass a batch as further tokens"
    with pytest.raises(RuntimeError, match=refused):
        torch.vmap(layer)(x, scores)
    with pytest.raises(RuntimeError, match=r"tilemoe::plan_topk does not go through torch\.vmap"):
        torch.vmap(lambda ids: plan_topk(ids, 3).row_of_pair)(ids.expand(3, 6, 2))
    with pytest.raises(RuntimeError, match=refused):
        torch.func.grad(lambda x: layer(x, scores[0]).sum())(x[0])
    # What a transform does not touch is computed as ever.
    out = torch.vmap(lambda row: row + layer(x[0], scores[0]).sum())(torch.zeros(3))
    assert torch.equal(out, layer(x[0], scores[0]).sum().expand(3))


def test_fake_tensors_meet_the_operators_shapes() -> None:
    with FakeTensorMode() as mode:
        ids = torch.zeros(5, 2, dtype=torch.int64)
        plan = plan_topk(ids, 3)
        x, w1, w2 = torch.randn(5, 16), torch.randn(3, 16, 16), torch.randn(3, 16, 8)
        o = moe(x.requires_grad_(), w1, w2, plan, torch.rand(5, 2))
        o.sum().backward()
    assert mode.is_our_fake(o)
    assert o.shape == x.grad.shape == (5, 16)


def test_a_tensor_of_another_kind_goes_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    class Labelled(Tensor):
        pass

    registered, calls = library.moe.registered, []
    monkeypatch.setattr(library.moe, "registered", lambda *args: calls.append(1) or registered(*args))
    plan = PLANS["random"]
    inputs = make_inputs(plan, 16, 8)
    expected = moe(plan=plan, **inputs)
    assert not calls
    out = moe(plan=plan, **{**inputs, "w1": inputs["w1"].as_subclass(Labelled)})
    assert calls
    assert torch.equal(out.as_subclass(Tensor), expected)


def test_hooks_on_saved_tensors_are_called_and_may_replace_them() -> None:
    plan, moved = PLANS["random"], []

    def pack(tensor: Tensor) -> Tensor:
        moved.append(tensor.shape)
        return tensor.clone()

    leaves = leaves_of(plan)
    expected = torch.autograd.grad(moe(plan=plan, **leaves).sum(), list(leaves.values()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        o = moe(plan=plan, **leaves)
    assert (plan.capacity, 16) in moved, "h"
    for got, want in zip(torch.autograd.grad(o.sum(), list(leaves.values())), expected, strict=True):
        assert torch.equal(got, want)
