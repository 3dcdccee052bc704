"""torch.library and torch.compile: opcheck, one graph, no recompilation when T changes.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.base import is_column_major
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.ops import experts as library
from tilemoe.ops import lora as lora_ops
from tilemoe.ops import plan as plan_ops
from tilemoe.ops import rounding as rounding_ops
from tilemoe.ops import router as router_ops
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.runtime.operator import Operator
from tilemoe.testing import forward_and_grads, hostile_routings, make_inputs

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
# Rows past R are unspecified, so operators that return rows repeat themselves only where every row is in use.
FULL_PLANS = ["random", "pairs, repeated", "no tokens"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def sample_arguments(plan: RoutingPlan, d: int, n: int, dtype: torch.dtype, bias: bool) -> dict[str, tuple[Any, ...]]:
    """What each registered operator is called with, those before it already run; inputs require grad.

    Weights with biases are column-major, as gpt-oss has them.
    """
    act = "swiglu" if bias else "relu2"
    spec = activation_spec(act, "concatenated", None, None)
    given = make_inputs(plan, d, n, act, dtype=dtype, bias=bias)
    if bias:
        given |= {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("w1", "w2")}
    given = {name: t.requires_grad_() for name, t in given.items()}
    x, w1, w2, scores = (given[name] for name in ("x", "w1", "w2", "scores"))
    b1, b2, s = given.get("b1"), given.get("b2"), scores.detach().reshape(-1).requires_grad_()
    ks = backend_named("torch")
    tail = library.ROUTED.flatten((plan, spec, ks))
    with torch.no_grad():
        _, h = ks.up_proj_act(x, w1, b1, plan, spec)
        do = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        dh, _, a_scaled = ks.down_proj_dgrad_dact(do, w2, b2, h, s, plan, spec)
    return {
        "moe": (x, w1, w2, s, b1, b2, True, *tail),
        "up_proj": (x, w1, b1, *tail),
        "down_proj_dgrad_dact": (do, w2, b2, h, s, *tail),
        "down_proj_wgrad": (do, a_scaled, is_column_major(w2), *tail),
        "up_proj_input_grad": (dh, w1, *tail),
        "up_proj_wgrad": (x, dh, is_column_major(w1), *tail),
        "down_proj_bias_grad": (do, s, *tail),
        "up_proj_bias_grad": (dh, *tail),
    }


OPS = {
    "moe": library.moe.registered,
    **{op.name: op.registered for op in library.BACKWARD_OPS},
}


def test_samples_cover_every_registered_operator() -> None:
    registered = {name for name in dir(torch.ops.tilemoe) if name in torch.ops.tilemoe}
    modules = (plan_ops, router_ops, rounding_ops, lora_ops)  # which have tests of their own
    elsewhere = {op.name for module in modules for op in vars(module).values() if isinstance(op, Operator)}
    assert set(OPS) | elsewhere == registered
    assert set(OPS) == set(sample_arguments(PLANS["random"], 8, 8, torch.float32, True))


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    for plan in FULL_PLANS:
        for dtype, size, bias in (
            (torch.float32, (8, 8), True),
            (torch.bfloat16, (8, 5), False),
            (torch.float64, (5, 3), True),
        ):
            arguments = sample_arguments(PLANS[plan], *size, dtype, bias)[name]
            if name == "moe":
                torch.library.opcheck(library.moe.registered, arguments)
                arguments = (*arguments[:6], False, *arguments[7:])
            # The steps of the backward refuse to be differentiated.
            torch.library.opcheck(OPS[name], tuple(_detached(argument) for argument in arguments))


def _detached(argument: Any) -> Any:
    return argument.detach() if isinstance(argument, Tensor) else argument


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_opcheck_of_plan_building(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 3], [4, 1], [1, 9], [2, 2]], dtype=dtype)
    torch.library.opcheck(plan_ops.plan_topk.registered, (ids, 4, False))
    torch.library.opcheck(plan_ops.plan_topk.registered, (ids[:0], 4, False))
    torch.library.opcheck(plan_ops.plan_topk.registered, (ids.T, 4, True))
    token = torch.tensor([3, 0, 3, 1], dtype=dtype)
    torch.library.opcheck(plan_ops.plan_pairs.registered, (token, ids[:, 1].contiguous(), 5, 4))
    torch.library.opcheck(plan_ops.plan_pairs.registered, (token[:0], token[:0], 0, 4))


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("recompute", [None, "up_proj"])
@pytest.mark.parametrize("name", ["sentinels", "pairs, sentinels", "no tokens", "one token"])
def test_compiled_in_one_graph_equals_eager(name: str, recompute: str | None) -> None:
    plan = PLANS[name]
    fast = compiled(moe)
    for dtype, size, activation, bias in (
        (torch.bfloat16, (16, 8), "swiglu", True),
        (torch.float32, (5, 3), "gelu", False),
    ):
        inputs = make_inputs(plan, *size, activation, dtype=dtype, bias=bias)
        options = {"activation": activation, "recompute": recompute}
        expected = forward_and_grads(moe, inputs, plan, **options)
        for key, value in forward_and_grads(fast, inputs, plan, **options).items():
            assert torch.equal(value, expected[key]), key
    assert not counters["graph_break"]


def layer(x: Tensor, w1: Tensor, w2: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """As a model calls it: routing and experts in one graph."""
    plan = plan_topk(ids, w1.shape[0])
    return x + moe(x, w1, w2, plan, scores)


def pairs_layer(x: Tensor, w1: Tensor, w2: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    token = torch.arange(x.shape[0]).repeat_interleave(ids.shape[1])
    plan = plan_pairs(token, ids.reshape(-1), x.shape[0], w1.shape[0])
    return x + moe(x, w1, w2, plan, scores.reshape(-1))


def layer_inputs(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 4, generator=generator).argsort(dim=1)[:, :2].contiguous()
    ids[tokens // 2] = 4
    inputs = make_inputs(plan_topk(ids, 4), 16, 8)
    return {name: t.nan_to_num(0.5).requires_grad_() for name, t in inputs.items()} | {"ids": ids}


@pytest.mark.parametrize("recompute_ids", [layer, pairs_layer], ids=["topk", "pairs"])
def test_routing_and_experts_in_one_graph_and_no_recompilation_over_t(recompute_ids: Callable[..., Tensor]) -> None:
    fast = compiled(recompute_ids)
    for calls, tokens in enumerate((12, 31, 7), start=1):
        inputs = layer_inputs(tokens)
        for name in ("x", "ids", "scores"):
            torch._dynamo.mark_dynamic(inputs[name], 0)
        leaves = [t for t in inputs.values() if t.requires_grad]
        o, expected = fast(**inputs), recompute_ids(**inputs)
        assert torch.equal(o, expected)
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (o, expected)]
        for got, want in zip(*grads, strict=True):
            assert torch.equal(got, want)
        assert counters["stats"]["unique_graphs"] == 1, f"compiled again at call {calls}"
    assert not counters["graph_break"]


def test_dynamic_shapes_settle_after_one_recompilation() -> None:
    """Without any marking: the second T makes the graph dynamic, the third finds it there."""
    fast = compiled(layer)
    graphs = []
    for tokens in (12, 31, 7, 50):
        fast(**layer_inputs(tokens))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == 1
    assert graphs[1] == graphs[2] == graphs[3] <= 2


def test_inductor() -> None:
    inputs = layer_inputs(12)
    leaves = [t for t in inputs.values() if t.requires_grad]
    o, expected = compiled(layer, backend="inductor")(**inputs), layer(**inputs)
    torch.testing.assert_close(o, expected)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
    for got, want in zip(torch.autograd.grad(o, leaves, do), torch.autograd.grad(expected, leaves, do), strict=True):
        torch.testing.assert_close(got, want)


def test_compiled_under_autocast_and_without_grad() -> None:
    def under_autocast(**given: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return moe(**given)

    plan = PLANS["sentinels"]
    inputs = make_inputs(plan, 16, 8, bias=True)
    expected = forward_and_grads(under_autocast, inputs, plan)
    fast = compiled(under_autocast)
    for key, value in forward_and_grads(fast, inputs, plan).items():
        assert torch.equal(value, expected[key]), key
    with torch.no_grad():
        assert torch.equal(fast(plan=plan, **inputs), expected["o"])


def test_bad_arguments_are_still_named_under_compile() -> None:
    plan = PLANS["random"]
    inputs = make_inputs(plan, 16, 8)
    with pytest.raises(Exception, match="recompute must be None or 'up_proj', got 'all'"):
        compiled(moe)(plan=plan, recompute="all", **inputs)
    with pytest.raises(ValueError, match="found a negative id"):
        compiled(layer)(**{**layer_inputs(6), "ids": torch.full((6, 2), -1)})
