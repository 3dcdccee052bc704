"""The Triton kernels on a GPU: all dtypes, hostile routings, repeatability, graphs, no host sync; few rows per expert.

T tokens · K experts per token · E experts
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from gpu_layers import compilations, no_host_sync
from torch import Tensor
from triton_checks import (
    Case,
    assert_added_exactly,
    assert_inference_agrees,
    assert_kernels_agree,
    random_ids,
    random_plan,
    run_kernels,
)

from tilemoe.config import ACTIVATIONS
from tilemoe.kernels.choose import choose_experts
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.configs import small_m
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.testing import (
    assert_equal,
    assert_moe_matches_reference,
    forward_and_grads,
    hostile_routings,
    make_inputs,
    relative_error,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 1e-5}
TF32_TOLERANCE = 2e-3
CASES = {
    "bf16": Case(BF16, hidden_size=320, intermediate_size=264),
    "bf16, small": Case(BF16, "swiglu", "interleaved", bias=True, hidden_size=136, intermediate_size=72),
    "bf16, bias, transposed": Case(
        BF16, "swiglu_oai", bias=True, transposed=True, hidden_size=192, intermediate_size=128
    ),
    "fp16": Case(FP16, "geglu", "interleaved", bias=True, transposed=True, hidden_size=328, intermediate_size=256),
    "fp16, ungated": Case(FP16, "relu2", hidden_size=128, intermediate_size=512),
    "fp32": Case(FP32, "reglu", bias=True, hidden_size=264, intermediate_size=136),
    "fp32, ungated, transposed": Case(FP32, "gelu_tanh", transposed=True, hidden_size=72, intermediate_size=264),
}
ROUTINGS = [routing.name for routing in hostile_routings(tile=128)]


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_on_hostile_routings(name: str) -> None:
    case = CASES[name]
    for routing in hostile_routings(tile=128, device="cuda"):
        assert_kernels_agree(TritonBackend(), routing.plan, case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation(activation: str) -> None:
    case = Case(BF16, activation, hidden_size=128, intermediate_size=128)
    assert_kernels_agree(TritonBackend(), random_plan(300, 4, 2), case, TOLERANCE[BF16])


def test_tf32_where_it_is_allowed() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        case = Case(FP32, hidden_size=256, intermediate_size=128)
        assert_kernels_agree(TritonBackend(), random_plan(500, 4, 2), case, TF32_TOLERANCE)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_many_experts() -> None:
    case = Case(BF16, hidden_size=64, intermediate_size=64)
    assert_kernels_agree(TritonBackend(), random_plan(2000, 4096, 4), case, TOLERANCE[BF16])


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("name", CASES)
def test_weight_gradients_are_added_exactly(name: str, transposed: bool) -> None:
    case = replace(CASES[name], transposed=transposed)
    for routing in hostile_routings(tile=128, device="cuda"):
        assert_added_exactly(TritonBackend(), routing.plan, case)


def test_twenty_runs_are_bit_equal() -> None:
    plan, case = random_plan(3000, 8, 2), Case(BF16, bias=True, hidden_size=512, intermediate_size=320)
    num_rows = int(plan.row_start_of_expert[-1])
    first = {name: pair[0] for name, pair in run_kernels(TritonBackend(), plan, case).items()}
    assert num_rows == 6000
    for _ in range(19):
        for name, pair in run_kernels(TritonBackend(), plan, case).items():
            assert torch.equal(pair[0], first[name]), name


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_whole_layer_against_the_reference(dtype: torch.dtype, gate_up: str) -> None:
    chosen_or_asked_for = partial(moe, kernels="triton" if dtype == FP32 else None)
    for routing in hostile_routings(tile=128, device="cuda"):
        inputs = make_inputs(routing.plan, 256, 128, "swiglu_oai", dtype=dtype, bias=True)
        assert_moe_matches_reference(
            inputs, routing.plan, chosen_or_asked_for, activation="swiglu_oai", gate_up=gate_up
        )


def test_no_host_sync_and_the_same_bits_from_a_replayed_graph_with_other_inputs() -> None:
    plan = random_plan(700, 8, 2)
    inputs = make_inputs(plan, 256, 128, dtype=BF16)
    w1, w2, static = inputs["w1"], inputs["w2"], {name: inputs[name].clone() for name in ("x", "scores")}

    def run() -> torch.Tensor:
        return moe(static["x"], w1, w2, plan, static["scores"], kernels="triton")

    run()
    with no_host_sync():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    static["x"].copy_(inputs["x"].flip(0))
    static["scores"].copy_(inputs["scores"].flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed, run())


def test_gradients_without_host_sync() -> None:
    plan = random_plan(700, 8, 2)
    inputs = make_inputs(plan, 256, 128, dtype=BF16, bias=True)
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    o = moe(plan=plan, **leaves)
    do = torch.randn_like(o)
    with no_host_sync():
        torch.autograd.grad(moe(plan=plan, **leaves), list(leaves.values()), do)


def test_compiled_is_equal_to_eager() -> None:
    plan = random_plan(300, 4, 2)
    inputs = make_inputs(plan, 128, 64, dtype=BF16)
    eager = forward_and_grads(moe, inputs, plan)
    compiled = forward_and_grads(torch.compile(moe, fullgraph=True), inputs, plan)
    assert_equal(compiled, eager)


SMALL_CASES = {
    "bf16": Case(BF16, hidden_size=512, intermediate_size=256),
    "bf16, uneven": Case(BF16, "swiglu", "interleaved", bias=True, hidden_size=136, intermediate_size=72),
    "bf16, as gpt-oss": Case(
        BF16, "swiglu_oai", "interleaved", bias=True, transposed=True, hidden_size=320, intermediate_size=320
    ),
    "fp16, ungated, transposed": Case(FP16, "relu2", transposed=True, hidden_size=328, intermediate_size=512),
    "fp32": Case(FP32, "reglu", bias=True, hidden_size=264, intermediate_size=136),
}
E, K, WIDTHS = 64, 8, (512, 256)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", SMALL_CASES)
def test_few_rows_on_hostile_routings(name: str, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "small_m", lambda num_rows, num_experts: block_m)
    for routing in hostile_routings(tile=64, device="cuda"):
        assert_inference_agrees(TritonBackend(), routing.plan, SMALL_CASES[name], TOLERANCE[SMALL_CASES[name].dtype])


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 65, 255, 256])
def test_numbers_of_tokens(tokens: int) -> None:
    """As chosen on this GPU, and as trained: the two differ by roundings."""
    plan = plan_topk(random_ids(tokens, E, K), E)
    assert small_m(plan.capacity, E) == (16 if tokens <= 64 else 64)
    case = Case(BF16, hidden_size=WIDTHS[0], intermediate_size=WIDTHS[1])
    chosen = choose_experts(torch.device("cuda"), BF16, WIDTHS).impl
    assert_inference_agrees(chosen, plan, case, TOLERANCE[BF16])
    inputs = make_inputs(plan, *WIDTHS, dtype=BF16)
    with torch.no_grad():
        o = moe(plan=plan, **inputs)
    trained = forward_and_grads(moe, inputs, plan)["o"]
    assert relative_error(o, trained.double()) <= 2 * TOLERANCE[BF16]


def test_a_captured_decode_step_follows_its_routing_and_waits_for_nothing() -> None:
    for tokens in (1, 200):
        all_ids = [random_ids(tokens, E, K, seed) for seed in range(3)]
        inputs = make_inputs(plan_topk(all_ids[0], E), *WIDTHS, dtype=BF16)
        ids = all_ids[0].clone()

        def run(ids: Tensor = ids, inputs: dict[str, Tensor] = inputs) -> Tensor:
            with torch.no_grad():
                return moe(plan=plan_topk(ids, E), **inputs)

        expected = [run(given) for given in all_ids]
        assert not torch.equal(expected[0], expected[1])
        with no_host_sync():
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(5):
            for given, wanted in zip(all_ids, expected, strict=True):
                ids.copy_(given)
                captured.fill_(float("nan"))
                graph.replay()
                assert torch.equal(captured, wanted), "not the bits of the first run"


def test_another_number_of_tokens_compiles_nothing() -> None:
    w = make_inputs(plan_topk(random_ids(1, E, K), E), *WIDTHS, dtype=BF16)

    def use(tokens: int) -> None:
        plan = plan_topk(random_ids(tokens, E, K), E)
        inputs = make_inputs(plan, *WIDTHS, dtype=BF16) | {name: w[name] for name in ("w1", "w2")}
        with torch.no_grad():
            moe(plan=plan, **inputs)

    use(64)
    use(256)
    with compilations() as names:
        for tokens in (1, 2, 3, 16, 17, 63, 65, 100, 128, 255):
            use(tokens)
            assert names == {"compiled": [], "cached": []}, f"at T = {tokens}"
