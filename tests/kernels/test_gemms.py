"""The experts' kernels against the torch set in fp64: the same cases in Triton's interpreter, by pointer and by
descriptor, and on a GPU, the portable kernels and Hopper's.

The interpreter's bf16 is wrong, so it has fp32 and fp16. What is true of Hopper's kernels alone: test_hopper_gpu.py.

T tokens · K experts per token · E experts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from gpu_layers import no_host_sync
from torch import Tensor
from triton_checks import (
    CASES,
    DEVICE,
    INTERPRETED,
    SMALL_CASES,
    TOLERANCE,
    Case,
    assert_added_exactly,
    assert_inference_agrees,
    assert_kernels_agree,
    choose_bands,
    interpret,
    random_ids,
    random_plan,
    turn,
)

from tilemoe.activations import activation_spec
from tilemoe.config import ACTIVATIONS
from tilemoe.kernels.choose import choose_experts
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton import backend as triton_backend
from tilemoe.kernels.experts.triton import host
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.configs import small_m
from tilemoe.kernels.experts.triton.tiles import listed_tiles
from tilemoe.ops.moe import moe
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.launch import Launch
from tilemoe.testing import (
    assert_equal,
    assert_moe_matches_reference,
    forward_and_grads,
    hostile_routings,
    make_inputs,
    relative_error,
)

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="of the interpreter's small tiles, or of no kernel")
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="of a GPU's tiles")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TF32_TOLERANCE = 2e-3
TILE = 16 if INTERPRETED else 128
ROUTINGS = [routing.name for routing in hostile_routings(tile=TILE)]
E, K, WIDTHS = 64, 8, (512, 256)  # of few tokens on a GPU


class Venue(NamedTuple):
    backend: TritonBackend
    cases: tuple[Case, ...]

    def of(self, index: int) -> tuple[Case, ...]:
        """All cases; in the interpreter, where all pairs would take minutes, one for each place in a list."""
        return (self.cases[index % len(self.cases)],) if INTERPRETED else self.cases


# How operands are read, and by which compute capability.
ACCESSES = {"pointer": 0, "descriptor": 90, "gather by descriptor": 100}
VENUES = tuple(ACCESSES) if INTERPRETED else ("triton", "hopper", "blackwell")
MAJOR = {"hopper": 9, "blackwell": 10}  # of the compute capability that they are for


@pytest.fixture(params=VENUES)
def venue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Venue:
    if not INTERPRETED:
        major = torch.cuda.get_device_capability()[0]
        if MAJOR.get(request.param, major) != major:
            pytest.skip(f"these kernels are for compute capability {MAJOR[request.param]}.x")
        return Venue(backend_named(request.param), CASES[request.param])
    interpret(monkeypatch, ACCESSES[request.param])
    cases, first = CASES["interpreted"], list(ACCESSES)[::-1].index(request.param)
    return Venue(TritonBackend(), cases[first:] + cases[:first])


# What the kernels do whatever reads their operands is shown of one way to read them, of the others by `make thorough`.
_OTHERS = [pytest.param(name, marks=pytest.mark.thorough if INTERPRETED else ()) for name in VENUES[1:]]
whatever_reads_operands = pytest.mark.parametrize("venue", [VENUES[0], *_OTHERS], indirect=True)


def plan_named(name: str, tile: int = TILE) -> RoutingPlan:
    return next(routing.plan for routing in hostile_routings(tile, DEVICE) if routing.name == name)


def in_turns(*others: object) -> list[Any]:
    """Each routing with each of ``others``; in the interpreter with one of them, the rest for `make thorough`."""
    return [
        pytest.param(name, other, marks=pytest.mark.thorough if INTERPRETED and (i + j) % len(others) else ())
        for i, name in enumerate(ROUTINGS)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(("name", "venue"), in_turns(*VENUES), indirect=["venue"])
def test_hostile_routings(name: str, venue: Venue) -> None:
    """In the interpreter every case meets each access."""
    for case in venue.of(ROUTINGS.index(name)):
        assert_kernels_agree(venue.backend, plan_named(name), case, TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", ["first and last expert empty"] if INTERPRETED else ROUTINGS)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_weight_gradients_are_added_exactly(transposed: bool, name: str, venue: Venue) -> None:
    for case in venue.cases[:3] if INTERPRETED else venue.cases:
        assert_added_exactly(venue.backend, plan_named(name), replace(case, transposed=transposed))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_activation(activation: str) -> None:
    case = Case(FP32, activation, hidden_size=16, intermediate_size=24)
    plan = plan_named("random")
    if not INTERPRETED:
        plan, case = random_plan(300, 4, 2), Case(BF16, activation, hidden_size=128, intermediate_size=128)
    assert_kernels_agree(TritonBackend(), plan, case, TOLERANCE[case.dtype])


@whatever_reads_operands
def test_many_experts(venue: Venue) -> None:
    if INTERPRETED:
        plan = plan_topk(torch.tensor([[0, 129], [129, 17], [17, 0]]), 130)
        case = Case(FP32, "relu", hidden_size=8, intermediate_size=8)
    else:
        plan, case = random_plan(2000, 4096, 4), Case(BF16, hidden_size=64, intermediate_size=64)
    assert_kernels_agree(venue.backend, plan, case, TOLERANCE[case.dtype])


@on_a_gpu
def test_tf32_where_it_is_allowed() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        case = Case(FP32, hidden_size=256, intermediate_size=128)
        assert_kernels_agree(TritonBackend(), random_plan(500, 4, 2), case, TF32_TOLERANCE)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@on_a_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_whole_layer_against_the_reference(dtype: torch.dtype, gate_up: str) -> None:
    chosen_or_asked_for = partial(moe, kernels="triton" if dtype == FP32 else None)
    for routing in hostile_routings(TILE, DEVICE):
        for activation, bias in (("swiglu_oai", True), ("swiglu", False)):
            inputs = make_inputs(routing.plan, 256, 128, activation, dtype=dtype, bias=bias)
            assert_moe_matches_reference(
                inputs, routing.plan, chosen_or_asked_for, activation=activation, gate_up=gate_up
            )


@interpreted
@whatever_reads_operands
def test_tiles_in_bands(venue: Venue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five column tiles are walked two, two and one at a time, nine by fours."""
    asked = choose_bands(monkeypatch, host, {5: 2, 9: 4})
    case, plan = Case(FP32, hidden_size=136, intermediate_size=136), plan_topk(torch.tensor([[0], [2], [2]]), 4)
    assert_kernels_agree(venue.backend, plan, case, TOLERANCE[FP32])
    assert {kernel: width_in for kernel, (_, width_in) in asked.items()} == {
        "up_proj_act": 136, "down_proj": 136, "down_proj_dgrad_dact": 136, "up_proj_dgrad": 272
    }  # fmt: skip


@interpreted
def test_limit_and_alpha_reach_the_kernels(venue: Venue) -> None:
    plan, spec = plan_named("random"), activation_spec("swiglu_oai", "concatenated", 0.5, 0.9)
    given = make_inputs(plan, 16, 24, "swiglu_oai")
    a, h = venue.backend.up_proj_act(given["x"], given["w1"], None, plan, spec)
    assert isinstance(a, Tensor)
    num_rows = int(plan.row_start_of_expert[-1])
    gate, up = h[:num_rows, :24].clamp(max=0.5), h[:num_rows, 24:].clamp(-0.5, 0.5)
    torch.testing.assert_close(a[:num_rows], gate * torch.sigmoid(0.9 * gate) * (up + 1), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("few", [False, True], ids=["", "few rows"])
def test_weights_of_any_strides_and_gathered_rows_of_any_stride(few: bool, venue: Venue) -> None:
    plan = SIZES["decode"] if few else plan_named("ragged tiles")
    spec, num_rows = activation_spec("swiglu", "concatenated", None, None), int(plan.row_start_of_expert[-1])
    given = make_inputs(plan, 24, 16)
    x, w1 = given["x"], given["w1"]
    wide = torch.randn(plan.num_tokens, 24 + 3)
    wide[:, :24] = x
    spread = torch.randn(*w1.shape, 2)
    spread[..., 0] = w1
    by_row = torch.empty(w1.shape[1], *w1.shape[::2]).transpose(0, 1)  # experts lie inside rows
    by_row.copy_(w1)

    def run(x: Tensor, w1: Tensor) -> Tensor:
        found = (
            venue.backend.up_proj_act_inference(x, w1, None, plan, spec)
            if few
            else venue.backend.up_proj_act(x, w1, None, plan, spec)[0]
        )
        assert isinstance(found, Tensor)
        return found[:num_rows]

    expected = run(x, w1)
    for other_x, other_w1 in [(wide[:, :24], w1), (x, turn(w1)), (x, spread[..., 0]), (x, by_row)]:
        torch.testing.assert_close(run(other_x, other_w1), expected)


@interpreted
@whatever_reads_operands
def test_offsets_of_64_bits_where_32_are_too_few(venue: Venue, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not host.needs_int64(torch.empty(2**16, 2**15 - 8, device="meta"))
    assert host.needs_int64(torch.empty(2**16, 2**15, device="meta"))
    monkeypatch.setattr(host, "needs_int64", lambda rows: True)
    assert_kernels_agree(venue.backend, plan_named("ragged tiles"), CASES["interpreted"][0], TOLERANCE[FP32])


@pytest.mark.parametrize("tile_ms", [(TILE,), (24,), (TILE, 24)], ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_tile_lists(name: str, tile_ms: tuple[int, ...]) -> None:
    plan = plan_named(name)
    starts = plan.row_start_of_expert.tolist()
    listed_tiles(plan, *tile_ms)
    for tile_m in tile_ms:
        tiles = listed_tiles(plan, tile_m)
        expected = [
            (expert, row, starts[expert + 1])
            for expert in range(plan.num_experts)
            for row in range(starts[expert], starts[expert + 1], tile_m)
        ]
        count, capacity = len(expected), -(-plan.capacity // tile_m) + plan.num_experts
        assert tiles.num_tiles.tolist() == [count]
        of_each = (tiles.expert_of_tile, tiles.row_of_tile, tiles.end_of_tile)
        assert all(vector.shape == (capacity,) for vector in of_each)
        assert list(zip(*(vector[:count].tolist() for vector in of_each), strict=True)) == expected


def test_a_plan_lists_its_tiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, launched, run = plan_topk(torch.arange(70, device=DEVICE)[:, None] % 3, 3), [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (launched.append(launch), run(launch)))
    first = listed_tiles(plan, 16, 24)
    assert listed_tiles(plan, 24).capacity == 3 + 3
    assert listed_tiles(plan, 16) is first
    assert len(launched) == 1
    listed_tiles(plan, 32, 16)
    assert len(launched) == 2
    assert listed_tiles(plan, 16) is first


@interpreted
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


@interpreted
def test_what_the_kernels_cannot_do_is_one_clear_error() -> None:
    plan, spec = plan_named("random"), activation_spec("relu", "concatenated", None, None)
    x, w1 = torch.zeros(plan.num_tokens, 12), torch.zeros(plan.num_experts, 8, 12)
    for run in (TritonBackend().up_proj_act, TritonBackend().up_proj_act_inference):
        with pytest.raises(ValueError, match=r"multiples of 8.*kernels=None or 'torch'"):
            run(x, w1, None, plan, spec)
        with pytest.raises(ValueError, match=r"no Triton kernel computes in torch.float64"):
            run(x.double(), w1.double(), None, plan, spec)


# Few rows per expert: kernels of their own in inference.

SIZES = {
    "decode": random_plan(1, 24, 8, 1, "cpu"),
    "a short prompt": random_plan(256, 40, 1, 256, "cpu"),
    "256 tokens on one expert": plan_topk(torch.full((256, 1), 30), 33),
    "256 sentinels": plan_topk(torch.full((256, 1), 40), 33),
}


@pytest.mark.parametrize(("name", "block_m"), in_turns(16, 64))
def test_few_rows_on_hostile_routings(name: str, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "small_m", lambda num_rows, num_experts: block_m)
    place = (ROUTINGS.index(name) + (block_m == 64)) % len(SMALL_CASES)
    for case in SMALL_CASES[place : place + 1] if INTERPRETED else SMALL_CASES:
        plan = plan_named(name, TILE if INTERPRETED else 64)
        assert_inference_agrees(TritonBackend(), plan, case, TOLERANCE[case.dtype])


@interpreted
@pytest.mark.parametrize("name", SIZES)
def test_few_tokens(name: str) -> None:
    plan = SIZES[name]
    assert small_m(plan.capacity, plan.num_experts) == 16
    case = Case(FP32, hidden_size=16, intermediate_size=16)
    assert_inference_agrees(TritonBackend(), plan, case, TOLERANCE[FP32])


@on_a_gpu
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


@on_a_gpu
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


@interpreted
def test_few_rows_of_a_slice_of_the_columns() -> None:
    plan = SIZES["decode"]
    given = make_inputs(plan, 64, 16, bias=True)
    a = torch.randn(plan.capacity, 16)
    whole = TritonBackend().down_proj_inference(a, given["w2"], given["b2"], plan)
    part = TritonBackend().down_proj_inference(a, given["w2"][:, 32:], given["b2"][:, 32:], plan)
    torch.testing.assert_close(part, whole[:, 32:])


@interpreted
def test_the_operator_takes_the_kernels_of_few_rows_for_inference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch: (launched.append(launch.kernel.fn.__name__), run(launch)))

    def kernels_of_few_rows() -> int:
        count = sum(name.endswith("small_m_kernel") for name in launched)
        launched.clear()
        return count

    plan = SIZES["decode"]
    inputs = make_inputs(plan, 24, 16)
    with torch.no_grad():
        o = moe(plan=plan, kernels="triton", **inputs)
    assert kernels_of_few_rows() == 2
    torch.testing.assert_close(forward_and_grads(moe, inputs, plan, kernels="triton")["o"], o)
    assert kernels_of_few_rows() == 0
    many = plan_topk(torch.zeros(33, 1, dtype=torch.int64), 1)
    with torch.no_grad():
        moe(plan=many, kernels="triton", **make_inputs(many, 24, 16))
    assert kernels_of_few_rows() == 0


@interpreted
@pytest.mark.parametrize("name", ["sentinels", "pairs, repeated", "no tokens", "all sentinels", "rounded up"])
def test_inference_against_the_reference(name: str) -> None:
    """Recomputing h, the forward is that of inference; the backward is as ever."""
    plan = plan_named(name)
    assert_moe_matches_reference(make_inputs(plan, 24, 16), plan, partial(moe, recompute="up_proj", kernels="triton"))
