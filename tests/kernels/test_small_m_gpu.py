"""Inference with few rows per expert on a GPU: values, repeatability, CUDA graphs, and what it compiles.

T tokens · K experts per token · E experts
"""

import pytest
import torch
from gpu_layers import compilations, no_host_sync
from torch import Tensor
from triton_checks import Case, assert_inference_agrees

from tilemoe.kernels.choose import choose_experts
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.configs import small_m
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.testing import forward_and_grads, hostile_routings, make_inputs, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 4e-3, FP16: 6e-4, FP32: 1e-5}
CASES = {
    "bf16": Case(BF16, hidden_size=512, intermediate_size=256),
    "bf16, uneven": Case(BF16, "swiglu", "interleaved", bias=True, hidden_size=136, intermediate_size=72),
    "bf16, as gpt-oss": Case(
        BF16, "swiglu_oai", "interleaved", bias=True, turned=True, hidden_size=320, intermediate_size=320
    ),
    "fp16, ungated, turned": Case(FP16, "relu2", turned=True, hidden_size=328, intermediate_size=512),
    "fp32": Case(FP32, "reglu", bias=True, hidden_size=264, intermediate_size=136),
}
E, K, WIDTHS = 64, 8, (512, 256)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", CASES)
def test_hostile_routings(name: str, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "small_m", lambda num_rows, num_experts: block_m)
    for routing in hostile_routings(tile=64, device="cuda"):
        assert_inference_agrees(TritonBackend(), routing.plan, CASES[name], TOLERANCE[CASES[name].dtype])


@pytest.mark.parametrize("tokens", [1, 2, 16, 64, 65, 255, 256])
def test_numbers_of_tokens(tokens: int) -> None:
    """As chosen on this GPU, and as trained: the two differ by roundings."""
    plan = plan_topk(random_ids(tokens), E)
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
        all_ids = [random_ids(tokens, seed) for seed in range(3)]
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
    w = make_inputs(plan_topk(random_ids(1), E), *WIDTHS, dtype=BF16)

    def use(tokens: int) -> None:
        plan = plan_topk(random_ids(tokens), E)
        inputs = make_inputs(plan, *WIDTHS, dtype=BF16) | {name: w[name] for name in ("w1", "w2")}
        with torch.no_grad():
            moe(plan=plan, **inputs)

    use(64)
    use(256)
    with compilations() as names:
        for tokens in (1, 2, 3, 16, 17, 63, 65, 100, 128, 255):
            use(tokens)
            assert names == {"compiled": [], "cached": []}, f"at T = {tokens}"


def random_ids(tokens: int, seed: int = 0) -> Tensor:
    """(T, K)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, E, generator=generator).topk(K, dim=1).indices.cuda()
