"""Weight gradients that the kernels add to ``.grad``: those of autograd's way, and where autograd adds as ever.

d hidden_size · n intermediate_size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import watch_kernels
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilemoe
from tilemoe import reference
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.testing import assert_equal, hostile_routings, make_inputs, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

D, N, EXPERTS = 128, 64, 4  # wide enough for every kernel


def plans_on(device: str) -> list[RoutingPlan]:
    return [routing.plan for routing in hostile_routings(device=device) if routing.plan.num_experts == EXPERTS]


PLANS = plans_on("cpu")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Given = dict[str, Tensor]


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The gradients that a backend has added to a sum."""
    names: list[str] = []

    def around(name: str, kernel: Callable[..., Tensor], *args: Any) -> Tensor:
        names.extend([name] * (len(args) == 5 and args[-1] is not None))
        return kernel(*args)

    watch_kernels(monkeypatch, ("down_proj_wgrad", "up_proj_wgrad"), around)
    return names


def weights(dtype: torch.dtype, transposed: bool = False, plan: RoutingPlan = PLANS[0]) -> Given:
    given = make_inputs(plan, D, N, dtype=dtype, bias=True)
    made = {name: given[name] for name in ("w1", "w2", "b1", "b2")}
    if transposed:
        made |= {name: made[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("w1", "w2")}
    return {name: nn.Parameter(weight) for name, weight in made.items()}


def grads_of(
    given: Given,
    compute: Callable[..., Tensor] = moe,
    dtype: torch.dtype = FP32,
    plans: Sequence[RoutingPlan] = PLANS,
    **options: Any,
) -> Given:
    """All gradients after a backward of each plan; of x and the scores those of each."""
    found: Given = {}
    for number, plan in enumerate(plans):
        made = make_inputs(plan, D, N, dtype=dtype, seed=number)
        inputs = {name: made[name].requires_grad_() for name in ("x", "scores")}
        compute(plan=plan, **inputs, **given, **options).square().sum().backward()
        found |= {f"{name} {number}": tensor.grad for name, tensor in inputs.items()}
    return {**found, **{name: weight.grad for name, weight in given.items()}}


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("options", [{}, {"recompute": "up_proj"}, {"gate_up": "interleaved"}], ids=str)
@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
def test_the_sums_are_those_of_autograd(
    dtype: torch.dtype, options: dict[str, str], transposed: bool, added: list[str]
) -> None:
    expected = grads_of(weights(dtype, transposed), dtype=dtype, **options)
    for _ in range(2):  # bit-equal repeats
        added.clear()
        found = grads_of(weights(dtype, transposed), dtype=dtype, accumulate=True, **options)
        assert_equal(found, expected)
        assert len(added) == 2 * len(PLANS)
        assert found["w1"].stride() == expected["w1"].stride()


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "autocast"])
def test_sums_in_fp32_are_nearer_than_autograds(autocast: bool, added: list[str]) -> None:
    """Of bf16 products: .grad is fp32, and adds no rounding of its own; the other gradients are the same."""
    start, dtype = weights(BF16), FP32 if autocast else BF16
    exact = grads_of({name: nn.Parameter(weight.detach().double()) for name, weight in start.items()}, dtype=FP64)

    def given() -> Given:
        return {name: nn.Parameter(weight.detach().to(dtype)) for name, weight in start.items()}

    with torch.autocast("cpu", BF16, enabled=autocast):
        before, after = (grads_of(given(), dtype=dtype, accumulate=value) for value in (False, True))
    assert len(added) == 2 * len(PLANS)
    for name in exact:
        if name in ("w1", "w2"):
            assert after[name].dtype == FP32
            assert relative_error(after[name], exact[name]) <= 1.001 * relative_error(before[name], exact[name]), name
        else:
            assert_equal(after[name], before[name], name)


def backward_of(given: Given, **options: Any) -> Tensor:
    """A loss, its backward not yet run."""
    made = make_inputs(PLANS[0], D, N, dtype=given["w1"].dtype)
    loss: Tensor = moe(made["x"], plan=PLANS[0], scores=made["scores"], **given, **options).square().sum()
    return loss


def hooked(given: Given, accumulate: bool) -> list[Tensor]:
    seen: list[Tensor] = []
    given["w1"].register_hook(lambda grad: seen.append(grad.clone()))
    given["w2"].register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    backward_of(given, accumulate=accumulate).backward()
    assert len(seen) == 2
    return seen


def returned(given: Given, accumulate: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(backward_of(given, accumulate=accumulate), [given["w1"], given["w2"]])


def watched(given: Given, accumulate: bool) -> None:
    with torch.autograd.set_detect_anomaly(True), FlopCounterMode(display=False):
        backward_of(given, accumulate=accumulate).backward()


def traced(given: Given, accumulate: bool) -> None:
    with compiled_autograd._enable(lambda graph: graph):
        backward_of(given, accumulate=accumulate).backward()


@pytest.mark.parametrize("run", [hooked, returned, watched, traced])
def test_who_asks_for_the_gradient_sees_it(run: Callable[[Given, bool], Any], added: list[str]) -> None:
    """The same gradients and results whether or not accumulation is asked for, which is unused here."""
    results = []
    for accumulate in (False, True):
        given = weights(FP32)
        backward_of(given, accumulate=accumulate).backward()  # so that there are sums to add to
        added.clear()
        results.append((run(given, accumulate), {name: weight.grad for name, weight in given.items()}))
        assert not added
    assert_equal(results[1], results[0])


def test_a_backward_to_some_inputs_leaves_the_others(added: list[str]) -> None:
    found = []
    for accumulate in (False, True):
        given = weights(FP32)
        backward_of(given, accumulate=accumulate).backward(inputs=[given["w1"]])
        found.append(given["w1"].grad)
        assert given["w2"].grad is None
    assert added == ["up_proj_wgrad"]
    assert_equal(found[1], found[0])


def test_a_sum_of_another_dtype_is_autograds(added: list[str]) -> None:
    given = weights(BF16)
    given["w1"].grad = torch.zeros_like(given["w1"])
    backward_of(given, accumulate=True).backward()
    assert added == ["down_proj_wgrad"]
    assert given["w1"].grad.dtype == BF16
    assert bool(given["w1"].grad.any())


def test_weights_that_are_computed_are_autograds(added: list[str]) -> None:
    given = weights(FP32)
    backward_of(given | {"w1": 2 * given["w1"]}, accumulate=True).backward()
    assert not added
    expected = weights(FP32)
    backward_of(expected | {"w1": 2 * expected["w1"]}).backward()
    assert_equal([weight.grad for weight in given.values()], [weight.grad for weight in expected.values()])


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant: bool, added: list[str]) -> None:
    def repeated(plan: Any, **given: Any) -> Tensor:
        out: Tensor = checkpoint(lambda x: moe(x, plan=plan, **given), given.pop("x"), use_reentrant=reentrant)
        return out

    expected = grads_of(weights(FP32))
    assert_equal(grads_of(weights(FP32), repeated, accumulate=True), expected)
    assert len(added) == 2 * len(PLANS)


def test_under_a_profiler_and_in_a_graph() -> None:
    """A profiler sees what is done without it. In a graph of torch.compile autograd adds. The sums are the same."""
    expected = grads_of(weights(FP32))
    with torch.profiler.profile() as profile:
        found = grads_of(weights(FP32), accumulate=True)
    assert_equal(found, expected)
    names = {event.name for event in profile.events()}
    assert "tilemoe::moe" in names
    assert "tilemoe::down_proj_wgrad" not in names
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    found, expected = (grads_of(weights(FP32), each, plans=PLANS[:2], accumulate=True) for each in (compiled, moe))
    assert_equal(found, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer(compiled: bool, added: list[str]) -> None:
    """Against the reference in fp64, of two backwards of a layer in bf16 with an fp32 sum."""
    cfg = tilemoe.MoEConfig(D, N, num_experts=EXPERTS, num_experts_per_tok=2)
    layer = tilemoe.MoE(cfg, dtype=BF16)
    tilemoe.accumulate_grads(layer)
    compute = torch.compile(layer, backend="aot_eager") if compiled else layer
    total = torch.zeros(layer.experts.w1.shape, dtype=FP64)
    for seed in range(2):
        x = torch.randn(7, D, generator=torch.Generator().manual_seed(seed)).to(BF16)
        compute(x).hidden.float().square().sum().backward()
        routing = tilemoe.route(layer.router(x)[0], cfg)
        w1, w2 = (weight.detach().double().requires_grad_() for weight in (layer.experts.w1, layer.experts.w2))
        reference.moe(x.double(), w1, w2, routing.plan, routing.scores.double()).square().sum().backward()
        total += w1.grad
    assert len(added) == 4
    found = layer.experts.w1.grad
    assert found is not None
    assert found.dtype == FP32
    assert float((found.double() - total).norm() / total.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize("kernels", ["triton", "hopper"])
def test_on_a_gpu(kernels: str, gate_up: str, transposed: bool) -> None:
    """Against fp64, three times each routing, the last from the launch cache; bit-equal repeats."""
    if kernels == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    plans = plans_on("cuda") * 3
    options: dict[str, Any] = {"gate_up": gate_up, "plans": plans}

    def given() -> Given:
        return weights(BF16, transposed, plans[0])

    exact_weights = {name: nn.Parameter(weight.detach().double()) for name, weight in given().items()}
    exact = grads_of(exact_weights, dtype=FP64, kernels="torch", **options)
    options |= {"dtype": BF16, "kernels": kernels}
    before, after, again = (grads_of(given(), accumulate=value, **options) for value in (False, True, True))
    assert_equal(again, after)
    for name in after:
        if name in ("w1", "w2"):
            assert after[name].dtype == FP32
            assert relative_error(after[name], exact[name]) <= relative_error(before[name], exact[name]), name
        else:
            assert_equal(after[name], before[name], name)


def test_a_module_without_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="has no MoE layer"):
        tilemoe.accumulate_grads(nn.Linear(2, 2))
