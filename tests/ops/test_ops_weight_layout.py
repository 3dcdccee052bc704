"""A weight's gradient is written as the weight is stored: nothing is copied on its way to the parameter.

T tokens · d hidden_size · n intermediate_size · E experts · w = 2n gated, n ungated
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import watch_kernels
from torch import Tensor, nn

from tilemoe.kernels.experts.formats.dense import is_column_major
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.testing import assert_equal, forward_and_grads, hostile_routings, make_inputs
from tilemoe.testing.inputs import output_grad

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
D, N = 16, 8


def leaf_and_view(weight: Tensor, transposed: bool) -> tuple[nn.Parameter, Tensor]:
    """A parameter, contiguous, and the view of it that has the weight's shape and values."""
    leaf = nn.Parameter(weight.transpose(1, 2).contiguous() if transposed else weight.clone())
    return leaf, leaf.transpose(1, 2) if transposed else leaf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["random", "pairs, repeated", "all sentinels", "no tokens"])
def test_the_parameter_takes_what_the_kernel_wrote(
    name: str, transposed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLANS[name]
    given = make_inputs(plan, D, N, dtype=dtype)
    expected = forward_and_grads(moe, given, plan)
    written: dict[str, int] = {}

    def around(name: str, kernel: Callable[..., Tensor], *args: Any) -> Tensor:
        grad = kernel(*args)
        written[name] = grad.data_ptr()
        return grad

    watch_kernels(monkeypatch, ("down_proj_wgrad", "up_proj_wgrad"), around)
    (leaf1, w1), (leaf2, w2) = leaf_and_view(given["w1"], transposed), leaf_and_view(given["w2"], transposed)
    o = moe(**{**given, "w1": w1, "w2": w2}, plan=plan)
    o.backward(output_grad(o))
    for leaf, kernel, key in ((leaf2, "down_proj_wgrad", "dw2"), (leaf1, "up_proj_wgrad", "dw1")):
        assert leaf.grad.is_contiguous(), key
        assert leaf.grad.data_ptr() == written[kernel], f"{key} was copied"
        grad = leaf.grad.transpose(1, 2) if transposed else leaf.grad
        torch.testing.assert_close(grad, expected[key])


@pytest.mark.parametrize(("backend", "autocast"), [("aot_eager", False), ("inductor", True)])
def test_compiled(backend: str, autocast: bool) -> None:
    torch._dynamo.reset()
    plan = PLANS["random"]
    given = make_inputs(plan, D, N, bias=True)
    results = []
    for run in (moe, torch.compile(moe, fullgraph=True, backend=backend)):
        (leaf1, w1), (leaf2, w2) = leaf_and_view(given["w1"], True), leaf_and_view(given["w2"], True)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            o = run(**{**given, "w1": w1, "w2": w2}, plan=plan)
        o.sum().backward()
        assert leaf1.grad.is_contiguous()
        assert leaf2.grad.is_contiguous()
        results.append((o.detach(), leaf1.grad, leaf2.grad))
    assert_equal(*results)


def test_weights_that_are_dense_in_neither_order_get_contiguous_gradients() -> None:
    plan = PLANS["random"]
    given = make_inputs(plan, D, N)
    base = torch.randn(plan.num_experts, D, 3 * N)
    for w2 in (
        base[:, :, :N],
        base[:, :, :1].expand(-1, -1, N),
        base[:, :, ::3],
        base[:1, :, :N].expand_as(given["w2"]),
    ):
        assert not is_column_major(w2)
        w2 = w2.detach().requires_grad_()
        (dw2,) = torch.autograd.grad(moe(**{**given, "w2": w2}, plan=plan).sum(), w2)
        assert dw2.is_contiguous()


@pytest.mark.parametrize("name", ["random", "pairs, none"])
def test_adapters(name: str) -> None:
    plan: RoutingPlan = PLANS[name]
    given, rank, experts = make_inputs(plan, D, N, dtype=torch.float64), 4, plan.num_experts
    generator = torch.Generator().manual_seed(2)
    shapes = ((experts, rank, D), (experts, 2 * N, rank), (experts, rank, N), (experts, D, rank))
    adapters = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    results = []
    for transposed in (False, True):
        leaves, views = zip(*(leaf_and_view(adapter, transposed) for adapter in adapters), strict=True)
        moe_lora(**given, plan=plan, adapters=Adapters(*views, 0.5)).sum().backward()
        assert all(leaf.grad.is_contiguous() for leaf in leaves)
        results.append([leaf.grad.transpose(1, 2) if transposed else leaf.grad for leaf in leaves])
    torch.testing.assert_close(*results)
