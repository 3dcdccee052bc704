"""The operator's output and all its gradients against the reference, on every routing, dtype, layout and stride order.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token · P pairs
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilemoe.config import ACTIVATIONS, GATE_UP_LAYOUTS, GATED_ACTIVATIONS
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.testing import (
    ERROR_CAPS,
    HostileRouting,
    assert_equal,
    assert_moe_matches_reference,
    forward_and_grads,
    hostile_routings,
    make_inputs,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROUTINGS = list(hostile_routings())
PLANS = {routing.name: routing.plan for routing in ROUTINGS}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Multiples of 8 take the grouped path, odd sizes the loop; the mixed ones take one on the way up, the other down.
SIZES = [(16, 8), (5, 3), (8, 5), (3, 8), (1, 1)]


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_hostile_routings(routing: HostileRouting, dtype: torch.dtype) -> None:
    for size, bias in ((SIZES[0], False), (SIZES[0], True), (SIZES[1], True), (SIZES[2], False)):
        inputs = make_inputs(routing.plan, *size, dtype=dtype, bias=bias)
        assert_moe_matches_reference(inputs, routing.plan)


def activation_cases() -> list[dict[str, Any]]:
    cases = [
        {"activation": name, "gate_up": layout}
        for name in sorted(ACTIVATIONS)
        for layout in (GATE_UP_LAYOUTS if name in GATED_ACTIVATIONS else GATE_UP_LAYOUTS[:1])
    ]
    oai = {"activation": "swiglu_oai", "activation_limit": 1.5, "activation_alpha": 0.9}
    return [*cases, {**oai, "gate_up": "interleaved"}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", activation_cases(), ids=lambda options: "-".join(map(str, options.values())))
def test_activations_layouts_and_biases(options: dict[str, Any], dtype: torch.dtype) -> None:
    for routing in ("sentinels", "pairs, unordered"):
        plan = PLANS[routing]
        for (d, n), bias in (
            (SIZES[0], True),
            (SIZES[0], False),
            (SIZES[1], True),
            (SIZES[2], True),
            (SIZES[3], False),
        ):
            inputs = make_inputs(plan, d, n, options["activation"], dtype=dtype, bias=bias, seed=3)
            assert_moe_matches_reference(inputs, plan, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_of_ordinary_size(dtype: torch.dtype) -> None:
    """Several blocks of rows, uneven experts, one empty."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(7, generator=generator)[:4] for _ in range(600)])
    plan = plan_topk(torch.where(ids == 5, 8, ids), 8)
    inputs = make_inputs(plan, 96, 128, dtype=dtype, bias=True)
    assert plan.capacity * inputs["w1"].shape[1] * 4 > 2 << 20
    assert_moe_matches_reference(inputs, plan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES[:3], ids=str)
def test_weights_in_either_stride_order_give_the_same(dtype: torch.dtype, size: tuple[int, int]) -> None:
    plan = PLANS["sentinels"]
    plain = make_inputs(plan, *size, dtype=dtype, bias=True)
    expected = forward_and_grads(moe, plain, plan)
    for names in (("w1",), ("w2",), ("w1", "w2")):
        inputs = {**plain, **{name: plain[name].mT.contiguous().mT for name in names}}
        assert not any(inputs[name].is_contiguous() for name in names)
        got = assert_moe_matches_reference(inputs, plan)
        for name, value in expected.items():
            assert got[name].shape == value.shape
            assert relative_error(got[name], value.double()) < 2 * ERROR_CAPS[dtype], name


def test_weights_are_used_where_they_are() -> None:
    """No copy of a weight: no tensor of its size is allocated in the forward, for either stride order."""
    plan = PLANS["random"]
    inputs = make_inputs(plan, 64, 48, dtype=torch.bfloat16)
    weight_bytes = min(inputs[name].numel() * 2 for name in ("w1", "w2"))
    for transposed in (False, True):
        given = {n: t.mT.contiguous().mT if transposed and n in ("w1", "w2") else t for n, t in inputs.items()}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            moe(plan=plan, **given)
        largest = max(event.cpu_memory_usage for event in profile.events())
        assert 0 < largest < weight_bytes, f"{largest} bytes allocated at once; a weight has {weight_bytes}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_output_gradients_of_any_strides(dtype: torch.dtype, bias: bool) -> None:
    plan = PLANS["random"]
    inputs = {name: t.requires_grad_() for name, t in make_inputs(plan, 16, 8, dtype=dtype, bias=bias).items()}
    o = moe(plan=plan, **inputs)

    def grads(do: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, list(inputs.values()), do, retain_graph=True)

    some = normal(*o.shape, dtype=dtype)
    column, row = some[:, :1].contiguous(), some[:1].contiguous()
    for do in (some.mT.contiguous().mT, column.expand_as(o), row.expand_as(o), some[0, 0].expand_as(o)):
        assert not do.is_contiguous()
        assert_equal(grads(do), grads(do.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score_dtype", DTYPES, ids=str)
def test_scores_of_any_float_dtype_keep_theirs_and_are_never_lowered(
    dtype: torch.dtype, score_dtype: torch.dtype
) -> None:
    for routing in ("random", "pairs, sentinels"):
        plan = PLANS[routing]
        inputs = make_inputs(plan, 16, 8, dtype=dtype, score_dtype=score_dtype, bias=True)
        got = assert_moe_matches_reference(inputs, plan)
        assert got["dscores"].dtype == score_dtype
        assert got["dscores"].shape == inputs["scores"].shape


def test_scores_finer_than_bf16_are_felt() -> None:
    plan = plan_topk(torch.tensor([[0], [0]]), 1)
    inputs = make_inputs(plan, 8, 8)
    inputs["x"][1] = inputs["x"][0]
    inputs["scores"] = torch.tensor([[1.0], [1.0 + 2**-20]])
    o = moe(plan=plan, **inputs)
    assert not torch.equal(o[0], o[1])
    double = {name: t.double() for name, t in inputs.items()}
    double["scores"] = torch.tensor([[1.0], [1.0 + 2**-45]], dtype=torch.float64)
    o = moe(plan=plan, **double)
    assert not torch.equal(o[0], o[1])


@pytest.mark.parametrize("score_dtype", DTYPES, ids=str)
def test_inference_takes_scores_as_they_are_and_gives_the_same(score_dtype: torch.dtype) -> None:
    plan = PLANS["random"]
    for dtype in DTYPES:
        inputs = make_inputs(plan, 16, 8, dtype=dtype)
        inputs["scores"] = inputs["scores"].to(score_dtype)
        with torch.no_grad():
            o = moe(plan=plan, **inputs)
        assert torch.equal(o, forward_and_grads(moe, inputs, plan)["o"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fp64_scores_of_coarser_inputs_are_summed_in_fp64(dtype: torch.dtype) -> None:
    plan = plan_pairs(torch.tensor([0, 0]), torch.tensor([1, 1]), 1, 2)
    inputs = make_inputs(plan, 8, 8, dtype=dtype)
    once = moe(plan=plan, **{**inputs, "scores": torch.tensor([1.0, 0.0])})
    cancelling = torch.tensor([1.0 + 2**-40, -1.0], dtype=torch.float64)
    o = moe(plan=plan, **{**inputs, "scores": cancelling})
    torch.testing.assert_close(o.double(), once.double() * 2**-40, rtol=0.01, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sentinels", "all sentinels", "pairs, tokens without any", "pairs, all sentinels"])
def test_a_token_without_an_expert_is_exactly_zero(name: str, dtype: torch.dtype) -> None:
    plan = PLANS[name]
    inputs = make_inputs(plan, 16, 8, dtype=dtype, bias=True)
    without = inputs["x"].isnan().any(dim=1)
    assert without.any()
    got = forward_and_grads(moe, inputs, plan)
    for value in (got["o"], got["dx"]):
        assert torch.equal(value[without], torch.zeros_like(value[without]))
    skipped = inputs["scores"].isnan()
    assert torch.equal(got["dscores"][skipped], torch.zeros_like(got["dscores"][skipped]))
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("name", ["no tokens", "all sentinels", "pairs, none", "pairs, none and no tokens"])
@pytest.mark.parametrize("recompute", [None, "up_proj"])
def test_empty_work_keeps_its_graph_and_gives_zero_gradients(name: str, recompute: str | None) -> None:
    plan = PLANS[name]
    for dtype in DTYPES:
        inputs = {k: t.requires_grad_() for k, t in make_inputs(plan, 16, 8, dtype=dtype, bias=True).items()}
        o = moe(plan=plan, recompute=recompute, **inputs)
        assert o.grad_fn is not None
        o.sum().backward()
        for key, tensor in inputs.items():
            assert tensor.grad is not None, key
            assert tensor.grad.shape == tensor.shape
            assert tensor.grad.dtype == tensor.dtype
            assert not tensor.grad.any(), key
