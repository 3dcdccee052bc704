"""Autocast on CPU: what it casts, what it must not, in the forward and around the backward."""

import pytest
import torch
from torch import Tensor

from tilemoe.ops.moe import moe
from tilemoe.testing import forward_and_grads, hostile_routings, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PLANS = {routing.name: routing.plan for routing in hostile_routings()}


def leaves(dtype: torch.dtype, **options: torch.dtype) -> dict[str, Tensor]:
    inputs = make_inputs(PLANS["sentinels"], 16, 8, dtype=dtype, bias=True, **options)
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_output_has_autocasts_dtype_and_gradients_the_parameters(dtype: torch.dtype, recompute: str | None) -> None:
    plan, inputs = PLANS["sentinels"], leaves(torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        o = moe(plan=plan, recompute=recompute, **inputs)
    assert o.dtype == dtype
    o.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in inputs.values())
    cast = {n: t.detach().to(torch.float32 if n == "scores" else dtype).requires_grad_() for n, t in inputs.items()}
    by_hand = moe(plan=plan, recompute=recompute, **cast)
    assert torch.equal(o, by_hand)
    by_hand.sum().backward()
    for name, tensor in inputs.items():
        assert torch.equal(tensor.grad, cast[name].grad.float()), name


def test_scores_are_not_lowered() -> None:
    plan, inputs = PLANS["sentinels"], leaves(torch.float32)
    finer = {**inputs, "scores": inputs["scores"] * (1 + 2**-12)}  # equal in bf16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, other = moe(plan=plan, **inputs), moe(plan=plan, **finer)
    do = torch.randn(one.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    grad_one, grad_other = (torch.autograd.grad(o, inputs["w2"], do)[0] for o in (one, other))
    assert not torch.equal(grad_one, grad_other)


def test_mixed_dtypes_are_welcome_under_autocast() -> None:
    plan, inputs = PLANS["sentinels"], leaves(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = moe(plan=plan, **inputs)
        mixed = moe(plan=plan, **{**inputs, "x": inputs["x"].bfloat16(), "b1": inputs["b1"].half().float()})
        assert mixed.dtype == torch.bfloat16
        assert torch.equal(moe(plan=plan, **{**inputs, "x": inputs["x"].bfloat16()}), expected)


def test_fp64_is_left_alone() -> None:
    plan, inputs = PLANS["sentinels"], leaves(torch.float64)
    expected = moe(plan=plan, **inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(moe(plan=plan, **inputs), expected)
        single = {name: tensor.float() for name, tensor in inputs.items()}
        with pytest.raises(ValueError, match=r"w1 is torch.float64 but x is torch.bfloat16"):
            moe(plan=plan, **{**single, "w1": inputs["w1"]})


def test_integers_are_not_made_floats() -> None:
    plan, inputs = PLANS["sentinels"], leaves(torch.float32)
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"x must be bfloat16, .*, got torch.int64"):
        moe(plan=plan, **{**inputs, "x": torch.zeros(inputs["x"].shape, dtype=torch.int64)})


def test_autocast_that_is_off_changes_nothing() -> None:
    plan, inputs = PLANS["sentinels"], leaves(torch.float32)
    expected = moe(plan=plan, **inputs)
    with torch.autocast("cpu", enabled=False):
        assert torch.equal(moe(plan=plan, **inputs), expected)


@pytest.mark.parametrize("name", ["sentinels", "pairs, repeated"])
@pytest.mark.parametrize("recompute", [None, "up_proj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_backward_inside_autocast_is_the_same(dtype: torch.dtype, recompute: str | None, name: str) -> None:
    """ds and db2 are computed in fp32 products that autocast would lower."""
    plan = PLANS[name]
    for size in ((16, 8), (5, 3)):
        inputs = {k: t.requires_grad_() for k, t in make_inputs(plan, *size, dtype=dtype, bias=True).items()}
        o = moe(plan=plan, recompute=recompute, **inputs)
        do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        outside = torch.autograd.grad(o, list(inputs.values()), do, retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = torch.autograd.grad(o, list(inputs.values()), do)
        for key, one, other in zip(inputs, outside, inside, strict=True):
            assert torch.equal(one, other), key


def test_autocast_error_is_that_of_bf16() -> None:
    """Numbers of a run under autocast equal those of a bf16 run, but for the rounding of the parameters' gradients."""
    plan = PLANS["random"]
    inputs = make_inputs(plan, 16, 8, bias=True)

    def under_autocast(**given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return moe(**given)

    got = forward_and_grads(under_autocast, inputs, plan)
    cast = {name: t if name == "scores" else t.bfloat16() for name, t in inputs.items()}
    for name, value in forward_and_grads(moe, cast, plan).items():
        assert torch.equal(got[name].to(value.dtype), value), name
