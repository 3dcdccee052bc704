"""Operators with and without PyTorch's dispatcher: the same numbers, visible to tracers and modes, the same bits.

Which calls may be recorded: those without a tracer or a mode, on the GPU that launches go to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Watching
from torch import Tensor, nn
from torch.autograd import forward_ad

from tilemoe import reference
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.ops import experts as library
from tilemoe.ops.moe import moe
from tilemoe.ops.plan import build_topk
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.runtime import operator as replayed
from tilemoe.runtime.operator import Operator, is_replayable
from tilemoe.testing import assert_equal, forward_and_grads, hostile_routings, make_inputs

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
FORWARD = {"tilemoe::moe"}
NOT_OF_ALL = {"up_proj", "dequantize_h"}  # where all gradients are needed
OPERATORS = [op for op in vars(library).values() if isinstance(op, Operator) and op.registered]
BACKWARD = {f"tilemoe::{op.name}" for op in OPERATORS if op.name not in NOT_OF_ALL} - FORWARD


def leaves_of(plan: RoutingPlan, **options: Any) -> dict[str, Tensor]:
    given = make_inputs(plan, 16, 8, bias=True, **options)
    return {name: tensor.nan_to_num(0.5).requires_grad_() for name, tensor in given.items()}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("options", "more"),
    [({}, set()), ({"recompute": "up_proj"}, {"tilemoe::up_proj"}), ({"save": "fp8"}, {"tilemoe::dequantize_h"})],
    ids=str,
)
def test_a_watched_call_gives_the_same_bits(name: str, options: dict[str, str], more: set[str]) -> None:
    plan = PLANS[name]
    inputs = make_inputs(plan, 16, 64, dtype=torch.bfloat16, bias=True)
    plain = forward_and_grads(moe, inputs, plan, **options)
    seen: set[str] = set()
    with Watching(lambda func, args, out: seen.add(func._schema.name)):
        watched = forward_and_grads(moe, inputs, plan, **options)
    assert {name for name in seen if name.startswith("tilemoe::")} == FORWARD | BACKWARD | more
    assert_equal(watched, plain)


def test_plain_calls_skip_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with parameters, without grad, and where autograd is told to make a graph of nothing."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the registered operator was called")

    plan = PLANS["random"]
    leaves = {name: nn.Parameter(tensor.detach()) for name, tensor in leaves_of(plan).items()}
    for operator in (*OPERATORS, build_topk):
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

    @partial(torch.compile, backend="eager")
    def tangent(given: Tensor) -> Tensor:
        return torch.func.jvp(lambda given: moe(plan=plan, **{**inputs, name: given}), (given,), (given,))[1]

    with pytest.raises(RuntimeError, match="tilemoe::moe has no forward-mode derivative"):
        tangent(inputs[name])


@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_a_batch_of_output_gradients(recompute: str | None) -> None:
    leaves = leaves_of(PLANS["sentinels"])
    o = moe(plan=PLANS["sentinels"], recompute=recompute, **leaves)
    gradients = partial(torch.autograd.grad, o, list(leaves.values()), retain_graph=True)
    batch = torch.randn(3, *o.shape)
    expected = [torch.stack(each) for each in zip(*map(gradients, batch), strict=True)]
    assert_equal(gradients(batch, is_grads_batched=True), expected)


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
    assert_equal(torch.autograd.grad(o.sum(), list(leaves.values())), expected)


@pytest.fixture
def on_gpu_1(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands in for a tensor on the second GPU, which is the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(replayed, "has_triton", lambda: True)
    return SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=1))


def test_on_the_current_gpu_and_not_without_triton_nor_on_amd(on_gpu_1: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_replayable(on_gpu_1)
    on_gpu_1.device.index = 0
    assert not is_replayable(on_gpu_1), "launches go to another"
    on_gpu_1.device.index = 1
    with monkeypatch.context() as patch:
        patch.setattr(replayed, "has_triton", lambda: False)
        assert not is_replayable(on_gpu_1)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert not is_replayable(on_gpu_1)


@pytest.fixture
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_two_threads")
def test_repeated_runs_are_bit_equal_with_two_threads() -> None:
    plan = plan_topk(torch.rand(900, 4, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :2], 4)
    for dtype in (torch.bfloat16, torch.float32):
        inputs = make_inputs(plan, 64, 40, dtype=dtype, bias=True)
        first, second = (forward_and_grads(moe, inputs, plan) for _ in range(2))
        assert_equal(first, second)


@pytest.mark.usefixtures("_two_threads")
def test_a_sum_that_threads_would_share_out_is_bit_equal() -> None:
    """One pair, repeated so often that several threads add its scores."""
    pairs = torch.zeros(40_000, dtype=torch.int64)
    plan = plan_pairs(pairs, pairs, 1, 1)
    scores = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    first, *others = (TorchBackend().down_proj_bias_grad(torch.ones(1, 8), scores, plan) for _ in range(20))
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, scores.sum().expand(1, 8), rtol=1e-3, atol=0.0)
