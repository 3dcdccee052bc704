"""The Triton kernels in Triton's interpreter.

Its bf16 is wrong, so fp32 and fp16. Both ways to reach memory: by pointer, and by descriptor as on a GPU with TMA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_checks import Case, assert_added_exactly, assert_kernels_agree, choose_bands, turn

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.kernels.experts.triton import host as mlp
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch
from tilemoe.testing import assert_equal, hostile_routings, make_inputs

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.usefixtures("poisoned_memory")]

TILE = 16
FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP16: 1e-3, FP32: 3e-6}
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=TILE)}
CASES = (
    Case(FP32, "swiglu", bias=True),
    Case(FP16, "swiglu_oai", "interleaved", bias=True, transposed=True),
    Case(FP32, "gelu", transposed=True),
    Case(FP16, "geglu", "interleaved"),
    Case(FP32, "reglu", transposed=True, hidden_size=32, intermediate_size=64),
)


@pytest.fixture(params=["pointer", "descriptor"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    capability = 90 if request.param == "descriptor" else 0
    device = Device(capability, shared_bytes=1 << 20, multiprocessors=3, interpreted=True)
    monkeypatch.setattr(triton_backend, "device_of", lambda t: device)
    monkeypatch.setattr(triton_backend, "small_m", lambda rows, experts: None)  # its kernels have tests of their own
    return request.param


@pytest.mark.parametrize("name", ROUTINGS)
def test_hostile_routings(name: str, access: str) -> None:
    # Every case meets both accesses and every routing a case of each; all pairs would take minutes.
    case = CASES[(list(ROUTINGS).index(name) + (access == "pointer")) % len(CASES)]
    assert_kernels_agree(TritonBackend(), ROUTINGS[name], case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_weight_gradients_are_added_exactly(case: Case, access: str) -> None:
    assert_added_exactly(TritonBackend(), ROUTINGS["first and last expert empty"], case)


@pytest.mark.parametrize("name", ["random", "first and last expert empty"])
def test_tiles_in_bands(name: str, access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five column tiles are walked two, two and one at a time, nine by fours."""
    asked = choose_bands(monkeypatch, mlp, {5: 2, 9: 4})
    case = Case(FP32, hidden_size=136, intermediate_size=136)
    assert_kernels_agree(TritonBackend(), ROUTINGS[name], case, TOLERANCE[FP32])
    assert {kernel: width_in for kernel, (_, width_in) in asked.items()} == {
        "up_proj_act": 136, "down_proj": 136, "down_proj_dgrad_dact": 136, "up_proj_dgrad": 272
    }  # fmt: skip


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "geglu_tanh", "relu", "relu2"])
def test_activations_not_among_the_cases(activation: str) -> None:
    case = Case(FP32, activation, hidden_size=16, intermediate_size=24)
    assert_kernels_agree(TritonBackend(), ROUTINGS["random"], case, TOLERANCE[FP32])


def test_limit_and_alpha_reach_the_kernels(access: str) -> None:
    plan, spec = ROUTINGS["random"], activation_spec("swiglu_oai", "concatenated", 0.5, 0.9)
    given = make_inputs(plan, 16, 24, "swiglu_oai")
    a, h = TritonBackend().up_proj_act(given["x"], given["w1"], None, plan, spec)
    num_rows = int(plan.row_start_of_expert[-1])
    gate, up = h[:num_rows, :24].clamp(max=0.5), h[:num_rows, 24:].clamp(-0.5, 0.5)
    torch.testing.assert_close(a[:num_rows], gate * torch.sigmoid(0.9 * gate) * (up + 1), rtol=1e-5, atol=1e-5)


def test_weights_of_any_strides_and_gathered_rows_of_any_stride(access: str) -> None:
    plan, spec = ROUTINGS["ragged tiles"], activation_spec("swiglu", "concatenated", None, None)
    given = make_inputs(plan, 24, 16)
    expected, _ = TritonBackend().up_proj_act(given["x"], given["w1"], None, plan, spec)
    wide = torch.randn(plan.num_tokens, 24 + 3)
    wide[:, :24] = given["x"]
    spread = torch.randn(*given["w1"].shape, 2)
    spread[..., 0] = given["w1"]
    for x, w1 in [(wide[:, :24], given["w1"]), (given["x"], turn(given["w1"])), (given["x"], spread[..., 0])]:
        a, _ = TritonBackend().up_proj_act(x, w1, None, plan, spec)
        num_rows = int(plan.row_start_of_expert[-1])
        torch.testing.assert_close(a[:num_rows], expected[:num_rows])


def test_offsets_of_64_bits_where_32_are_too_few(access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not mlp.needs_int64(torch.empty(2**16, 2**15 - 8, device="meta"))
    assert mlp.needs_int64(torch.empty(2**16, 2**15, device="meta"))
    monkeypatch.setattr(mlp, "needs_int64", lambda rows: True)
    assert_kernels_agree(TritonBackend(), ROUTINGS["ragged tiles"], CASES[0], TOLERANCE[FP32])


@pytest.mark.parametrize("tile_ms", [(TILE,), (24,), (TILE, 24)], ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_tile_lists(name: str, tile_ms: tuple[int, ...]) -> None:
    plan = replace(ROUTINGS[name])  # nothing is derived from it yet
    starts = plan.row_start_of_expert.tolist()
    listed_tiles(plan, *tile_ms)
    for tile_m in tile_ms:
        tiles = plan.derived[tile_m]
        expected = [
            (expert, row, starts[expert + 1])
            for expert in range(plan.num_experts)
            for row in range(starts[expert], starts[expert + 1], tile_m)
        ]
        count, capacity = len(expected), -(-plan.capacity // tile_m) + plan.num_experts
        assert tiles.num_tiles.tolist() == [count, 0]
        of_each = (tiles.expert_of_tile, tiles.row_of_tile, tiles.end_of_tile)
        assert all(vector.shape == (capacity,) for vector in of_each)
        assert list(zip(*(vector[:count].tolist() for vector in of_each), strict=True)) == expected


def test_a_plan_lists_its_tiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, launched, run = plan_topk(torch.arange(70)[:, None] % 3, 3), [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (launched.append(launch), run(launch)))
    first = listed_tiles(plan, TILE, 24)
    assert listed_tiles(plan, 24).capacity == 3 + 3
    assert listed_tiles(plan, TILE) is first
    assert len(launched) == 1
    listed_tiles(plan, 32, TILE)
    assert len(launched) == 2
    assert listed_tiles(plan, TILE) is first


def test_many_experts() -> None:
    ids = torch.tensor([[0, 129], [129, 17], [17, 0]])
    case = Case(FP32, "relu", hidden_size=8, intermediate_size=8)
    assert_kernels_agree(TritonBackend(), plan_topk(ids, 130), case, TOLERANCE[FP32])


@pytest.mark.parametrize("view", [lambda s: s[:, :1], lambda s: s[:1, :1].expand(s.shape[0], 1)])
def test_scores_of_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    plan = plan_topk(torch.tensor([[0], [2], [1], [2], [0]]), 3)
    given = {name: t.requires_grad_() for name, t in make_inputs(plan, 16, 8, bias=True).items()}
    scores = view(torch.rand(5, 3))
    assert not scores.is_contiguous()
    results = []
    for s in (scores.requires_grad_(), scores.detach().clone(memory_format=torch.contiguous_format).requires_grad_()):
        o = moe(**{**given, "scores": s}, plan=plan, kernels="triton")
        results.append((o, *torch.autograd.grad(o.sum(), [given["w2"], given["b2"], s])))
    assert_equal(*results)


def test_what_the_kernels_cannot_do_is_one_clear_error() -> None:
    plan, spec = ROUTINGS["random"], activation_spec("relu", "concatenated", None, None)
    x, w1 = torch.zeros(plan.num_tokens, 12), torch.zeros(plan.num_experts, 8, 12)
    with pytest.raises(ValueError, match=r"multiples of 8.*kernels=None or 'torch'"):
        TritonBackend().up_proj_act(x, w1, None, plan, spec)
    with pytest.raises(ValueError, match=r"no Triton kernel computes in torch.float64"):
        TritonBackend().up_proj_act(x.double(), w1.double(), None, plan, spec)
