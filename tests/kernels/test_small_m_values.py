"""up_proj and down_proj for few rows in Triton's interpreter.

T tokens · K experts per token · E experts
"""

import pytest
import torch
from torch import Tensor
from triton_checks import Case, assert_inference_agrees, random_plan, turn

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.configs import small_m
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.testing import assert_moe_matches_reference, forward_and_grads, hostile_routings, make_inputs

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.usefixtures("poisoned_memory")]

FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP16: 1e-3, FP32: 3e-6}
CASES = {
    "fp32": Case(FP32, "swiglu", bias=True),
    "fp16, interleaved, transposed": Case(FP16, "swiglu_oai", "interleaved", bias=True, transposed=True),
    "fp32, ungated, transposed": Case(FP32, "gelu", transposed=True),
    "fp16, interleaved": Case(FP16, "geglu", "interleaved", hidden_size=48),
    "fp32, even": Case(FP32, "reglu", transposed=True, hidden_size=32, intermediate_size=64),
}
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=16)}


SIZES = {
    "decode": random_plan(1, 24, 8, 1, "cpu"),
    "a short prompt": random_plan(256, 40, 1, 256, "cpu"),
    "256 tokens on one expert": plan_topk(torch.full((256, 1), 30), 33),
    "256 sentinels": plan_topk(torch.full((256, 1), 40), 33),
}


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", ROUTINGS)
def test_hostile_routings(name: str, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tiles meet every routing and every case, though not every pair of them, which would take minutes."""
    monkeypatch.setattr(triton_backend, "small_m", lambda num_rows, num_experts: block_m)
    case = list(CASES.values())[(list(ROUTINGS).index(name) + (block_m == 64)) % len(CASES)]
    assert_inference_agrees(TritonBackend(), ROUTINGS[name], case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", SIZES)
def test_numbers_of_tokens(name: str) -> None:
    plan = SIZES[name]
    assert small_m(plan.capacity, plan.num_experts) == 16
    case = Case(FP32, hidden_size=16, intermediate_size=16)
    assert_inference_agrees(TritonBackend(), plan, case, TOLERANCE[FP32])


def test_weights_of_any_strides_and_gathered_rows_of_any_stride() -> None:
    plan, spec = SIZES["decode"], activation_spec("swiglu", "concatenated", None, None)
    given = make_inputs(plan, 24, 16)
    x, w1 = given["x"], given["w1"]
    expected = TritonBackend().up_proj_act_inference(x, w1, None, plan, spec)
    wide = torch.randn(plan.num_tokens, 24 + 3)
    wide[:, :24] = x
    spread = torch.randn(*w1.shape, 2)
    spread[..., 0] = w1
    by_row = torch.empty(w1.shape[1], *w1.shape[::2]).transpose(0, 1)  # experts lie inside rows
    by_row.copy_(w1)
    for other_x, other_w1 in [(wide[:, :24], w1), (x, turn(w1)), (x, spread[..., 0]), (x, by_row)]:
        a = TritonBackend().up_proj_act_inference(other_x, other_w1, None, plan, spec)
        torch.testing.assert_close(a, expected)


def test_a_slice_of_the_columns() -> None:
    plan = SIZES["decode"]
    given = make_inputs(plan, 64, 16, bias=True)
    a = torch.randn(plan.capacity, 16)
    whole = TritonBackend().down_proj_inference(a, given["w2"], given["b2"], plan)
    part = TritonBackend().down_proj_inference(a, given["w2"][:, 32:], given["b2"][:, 32:], plan)
    torch.testing.assert_close(part, whole[:, 32:])


def test_the_operator_takes_them_for_inference_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = triton_backend.small_m_kernels

    class Watched:
        @staticmethod
        def up_proj_act_launch(*args: object) -> object:
            ran.append("up_proj")
            return real.up_proj_act_launch(*args)  # type: ignore[arg-type]

        @staticmethod
        def down_proj_launch(*args: object) -> object:
            ran.append("down_proj")
            return real.down_proj_launch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_backend, "small_m_kernels", Watched)

    def run(**given: Tensor) -> Tensor:
        return moe(plan=plan, kernels="triton", **given)

    plan = SIZES["decode"]
    inputs = make_inputs(plan, 24, 16)
    with torch.no_grad():
        o = run(**inputs)
    assert ran == ["up_proj", "down_proj"]
    ran.clear()
    torch.testing.assert_close(forward_and_grads(moe, inputs, plan, kernels="triton")["o"], o)
    assert ran == []
    many = plan_topk(torch.zeros(33, 1, dtype=torch.int64), 1)
    run_many = make_inputs(many, 24, 16)
    plan = many
    with torch.no_grad():
        run(**run_many)
    assert ran == []


@pytest.mark.parametrize("name", ["sentinels", "pairs, repeated", "no tokens", "all sentinels", "rounded up"])
def test_inference_against_the_reference(name: str) -> None:
    """Recomputing h, the forward is that of inference; the backward is as ever."""

    def recomputed(*args: Tensor, **options: object) -> Tensor:
        return moe(*args, recompute="up_proj", kernels="triton", **options)  # type: ignore[arg-type]

    plan = ROUTINGS[name]
    assert_moe_matches_reference(make_inputs(plan, 24, 16), plan, recomputed)


def test_what_the_kernels_cannot_do_is_one_clear_error() -> None:
    plan, spec = SIZES["decode"], activation_spec("relu", "concatenated", None, None)
    x, w1 = torch.zeros(1, 12), torch.zeros(24, 8, 12)
    with pytest.raises(ValueError, match=r"multiples of 8.*kernels=None or 'torch'"):
        TritonBackend().up_proj_act_inference(x, w1, None, plan, spec)
