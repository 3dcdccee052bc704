"""What is repeated of an operator is what it does by itself: run by another test, in a process whose driver is a fake.

R_max row capacity
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_driver import layout
from replayed_cases import (
    BF16,
    CASES,
    RUNS,
    Args,
    Case,
    assert_repeated,
    recordings,
    select_args,
    watch,
)
from torch import Tensor

from tilemoe.kernels.select_plan import PlanBuilder
from tilemoe.kernels.triton import launcher, plan_few, replay
from tilemoe.kernels.triton.launch import Launch, rehearse
from tilemoe.kernels.triton.plan import plan_topk as triton_plan_topk
from tilemoe.ops import inference, library, lora, rounding, router
from tilemoe.ops.replayed import Replayed
from tilemoe.routing.build import plan_topk
from tilemoe.testing import poisoned_memory


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("is_known_release", [True, False])
def test_layers_operators(case: Case, name: str, is_known_release: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_known_release:
        monkeypatch.setattr(launcher, "_RELEASE", "3.5.")
    operator = assert_repeated(RUNS[name], lambda: case.args(name))
    (recording,) = recordings(operator)
    how = replay._LaunchedDirectly if is_known_release else replay._Launched
    assert any(isinstance(step, how) for step in recording.steps)


@pytest.mark.parametrize("tokens", [1, 40, 2100])
def test_inference_by_ids(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = plan_few.unsupported(2 * tokens, 4) is None
    build = (plan_few.plan_topk, plan_few.plan_topk_in_one) if few else (triton_plan_topk,) * 2
    monkeypatch.setattr(
        inference, "builder_for", lambda *args, **options: PlanBuilder("triton", build[0], "", build[1])
    )
    monkeypatch.setattr(inference, "name_for", lambda *args: "hopper")
    case = Case(tokens=tokens)

    def make() -> Args:
        x, w1, w2, s, b1, b2 = case.args("moe")[:6]
        ids = torch.zeros(tokens, 2, dtype=torch.int64)
        return (x, w1, w2, b1, b2, ids, s.view(tokens, 2), inference.Activation("swiglu", "concatenated", None, None))

    (recording,) = recordings(assert_repeated(inference._run, make))
    made = [step for step in recording.steps if isinstance(step, replay._Made)]
    if few:
        assert len(made) == 4, "the plan, a, y and o"


def test_encoded_descriptors_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_MAX_ENCODED", 2)
    case, operator = Case(), Replayed(library._moe)
    given = [case.args("moe") for _ in range(4)]
    for args in given * 3:
        assert watch(operator, args)[0].events == watch(library._moe, args)[0].events
    (recording,) = recordings(operator)
    encoded = [entry[-1] for step in recording.steps for entry in getattr(step, "descriptors", ())]
    assert encoded
    assert all(1 <= len(each._known) <= 2 for each in encoded)


def select_grad_args(balance: bool, z: bool, spread: bool = False, mode: str = "softmax") -> Args:
    d_sums = torch.zeros(1).expand(8) if spread else torch.zeros(8)
    spec = (2, mode, True, 1.0, 1, 1, balance, z)
    logits, _, mask, *_ = select_args(mask=z)
    d_scores = torch.zeros(2, 40).t() if spread else torch.zeros(40, 2)
    ids = torch.arange(2, dtype=torch.int32).repeat(40, 1)
    return (logits, ids, mask, d_scores, d_sums if balance else None, torch.zeros(()) if z else None, *spec)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("with_operands", [False, True])
@pytest.mark.parametrize(("balance", "z"), [(False, False), (True, False), (False, True), (True, True)])
def test_select(balance: bool, z: bool, with_operands: bool, turned: bool) -> None:
    spec = (2, "sigmoid", True, 2.5, 1, 1, balance, z)
    assert_repeated(
        router._select, lambda: select_args(spec=spec, bias=with_operands, mask=with_operands, turned=turned)
    )


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("mode", ["softmax", "late softmax"])
@pytest.mark.parametrize(("balance", "z"), [(False, False), (True, False), (True, True)])
def test_select_grad(balance: bool, z: bool, mode: str, spread: bool) -> None:
    assert_repeated(router._select_grad, lambda: select_grad_args(balance, z, spread, mode))


@pytest.mark.parametrize("tokens", [40, 1])
def test_the_routers_share_of_dx(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "problem_of_triton", lambda *args: None)

    def args() -> Args:
        sizes = ((tokens, 16), (16, 64), (tokens, 64))
        return tuple(torch.zeros(size, dtype=torch.bfloat16) for size in sizes)

    assert_repeated(router._input_grad, args)


def rounding_spec(mode: str, score: str) -> tuple[Any, ...]:
    """Of 40 tokens, 8 experts, 2 a token, and tiles of 16."""
    return (mode, 16, score, True, 2.5, 40 * 2 + 8 * 15)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("mode", "score"), [("nearest", "softmax"), ("nearest_score", "late softmax"), ("balance", "sigmoid")]
)
def test_rounding(mode: str, score: str, masked: bool) -> None:
    def make() -> Args:
        logits, _, mask, *_ = select_args(mask=masked, turned=masked)
        uniform = torch.zeros(8) if mode == "nearest_score" else None
        ids = torch.zeros(40, 2, dtype=torch.int32)
        return (logits, ids, torch.zeros(40, 2), uniform, mask, *rounding_spec(mode, score))

    operator = assert_repeated(rounding._rounded_scores, make)
    (recording,) = recordings(operator)
    launched = [step for step in recording.steps if isinstance(step, replay._LaunchedDirectly)]
    assert len(launched) == (8 if mode == "nearest_score" else 6), "all of them without Triton's launcher"


def test_all_of_roundings_kernels_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(Launch, "_compile_ahead", lambda launch, device: names.append(launch.kernel.fn.__name__))
    logits = torch.zeros(40, 8)
    args = (logits, torch.zeros(40, 2, dtype=torch.int32), torch.zeros(40, 2), torch.zeros(8), None)
    args = (*args, *rounding_spec("nearest_score", "softmax"))
    rehearse(rounding._roundings_launches(*args), args)
    steps = ("key", "count", "place", "margin", "round", "row", "token", "pair", "grad")
    assert names == [f"{step}_kernel" for step in steps]
    of_capacities = {rounding._kind_of_rounding(*args[:-1], capacity) for capacity in (80, 200)}
    assert len(of_capacities) == 1, "the number of tokens is no part of it"
    assert rounding._kind_of_rounding(logits, args[1], args[2], None, None, *args[5:]) not in of_capacities


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("score", ["softmax", "late softmax", "sigmoid"])
def test_rounding_grad(score: str, spread: bool) -> None:
    *_, capacity = spec = rounding_spec("nearest", score)

    def make() -> Args:
        logits, _, mask, *_ = select_args(mask=spread, turned=spread)
        d_scores = torch.zeros(1).expand(capacity) if spread else torch.zeros(capacity)
        norm = torch.zeros(0 if score == "sigmoid" else 40, 2)
        row, code = (torch.zeros(capacity, dtype=dtype) for dtype in (torch.int32, torch.int16))
        start, ids = torch.zeros(41, dtype=torch.int32), torch.zeros(40, 2, dtype=torch.int32)
        return (d_scores, logits, ids, mask, norm, row, code, start, *spec)

    assert_repeated(rounding._rounded_scores_grad, make)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("extra", [0, 1])
def test_plan_topk(dtype: torch.dtype, extra: int) -> None:
    for build in (triton_plan_topk, plan_few.plan_topk):
        assert_repeated(build, lambda: (torch.zeros(300, 2 + extra, dtype=dtype)[:, :2], 8))


@pytest.mark.parametrize("name", RUNS)
def test_nothing_to_do(name: str) -> None:
    """No tokens, and so no rows: most of it is a fill in place, which is not recorded."""
    run = Replayed(RUNS[name])
    for _ in range(4):
        args = Case("triton", tokens=0).args(name)
        (expected, returned), (found, got) = watch(RUNS[name], args), watch(run, args)
        assert (found.events, got) == (expected.events, returned)


def test_operators_that_add_in_place_are_not_recorded() -> None:
    case, rank, run = Case("triton"), 8, Replayed(lora._run)
    for _ in range(3):
        x, w1, w2, s, b1, b2, _, *tail = case.args("moe")
        shapes = ((rank, case.d), (2 * case.n, rank), (rank, case.n), (case.d, rank))
        adapters = [torch.zeros(case.experts, *shape, dtype=BF16) for shape in shapes]
        args = (x, w1, w2, s, *adapters, b1, b2, 0.5, *tail)
        assert watch(run, args)[0].events == watch(lora._run, args)[0].events
    assert recordings(run) == [None]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, poisoned_memory])
def test_in_every_mode(mode: Callable[[], Any]) -> None:
    """In inference mode `contiguous` and `to` reach a dispatch mode whole, and may be views or copies."""
    assert_repeated(router._select, lambda: select_args(turned=True), mode)
    assert_repeated(RUNS["moe"], lambda: CASES["hopper, x to be copied"].args("moe"), mode)
    bias = CASES["triton, bias, interleaved"]
    assert_repeated(RUNS["down_proj_bias_grad"], lambda: bias.args("down_proj_bias_grad"), mode)


def test_what_one_mode_recorded_another_repeats() -> None:
    """Memory that is not initialised is poisoned where PyTorch is asked to, and zeros stay zeros."""
    case, run = Case(), Replayed(RUNS["down_proj_act_grad"])
    for _ in range(2):
        run(*case.args("down_proj_act_grad"))
    with poisoned_memory():
        dh, ds, a_scaled = run(*case.args("down_proj_act_grad"))
    assert bool(dh.isnan().all() & a_scaled.isnan().all() & (ds == 0).all())
    with torch.inference_mode():
        assert all(t.is_inference() for t in run(*case.args("down_proj_act_grad")))
    assert not any(t.is_inference() for t in run(*case.args("down_proj_act_grad")))


def test_results_without_elements_are_apart() -> None:
    select = Replayed(router._select)
    for _ in range(3):
        results = select(*select_args())
        assert results[2].numel() == results[3].numel() == 0
        assert results[2] is not results[3]


@pytest.mark.parametrize("operator", [router.select, library.moe])
def test_registered_operators_as_compiled_code_calls_them(operator: Any) -> None:
    args = select_args(turned=True) if operator is router.select else Case(extra=3).args("moe_inference")
    results = [operator.registered(*args) for _ in range(4)]
    layouts = [[layout(t) for t in each] for each in results]
    assert layouts[1:] == layouts[:-1]
    assert len({id(t) for each in results for t in each}) == 4 * len(results[0])


@pytest.mark.parametrize("keep_h", [True, False])
def test_slices_are_given_back_in_turn(keep_h: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = [slice(0, 48), slice(48, 96), slice(96, 128)]
    for name in ("forward_slices", "inference_slices", "backward_slices"):
        monkeypatch.setattr(library, name, lambda shape: cut)
    case = Case("triton")
    moe = assert_repeated(library._moe, lambda: case.args("moe" if keep_h else "moe_inference"))
    args = case.args("moe" if keep_h else "moe_inference")
    alone, _ = watch(library._moe, args)
    repeated, _ = watch(moe, args)
    assert repeated.peak_bytes() <= alone.peak_bytes()
    rows = case.tokens * case.k
    of_slice = [number for number, size in enumerate(repeated.bytes) if size in (rows * 48 * 2, rows * 32 * 2)]
    a = next(number for number, size in enumerate(repeated.bytes) if size == rows * case.n * 2)
    of_slice = [number for number in of_slice if number != a]
    assert len(of_slice) == 3
    for number, later in pairwise(of_slice):
        assert number not in repeated.alive[later], "one slice of y at a time"
    assert_repeated(library._up_proj_input_grad, lambda: case.args("up_proj_input_grad"))


def test_a_is_gone_before_the_output_is_made() -> None:
    """Where there is one slice; as `tilemoe.perf.memory` counts it."""
    case = Case()
    moe = assert_repeated(library._moe, lambda: case.args("moe"))
    repeated, (o, _) = watch(moe, case.args("moe"))
    output = o[0][0]
    sizes = {number: repeated.bytes[number] for number in repeated.alive[output]}
    rows = case.tokens * case.k
    assert rows * case.d * 2 in sizes.values(), "y"
    assert rows * 2 * case.n * 2 in sizes.values(), "h"
    assert rows * case.n * 2 not in sizes.values(), "a"


def test_operands_cut_from_one_buffer() -> None:
    case = Case()

    def in_one(shapes: list[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        flat = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype)
        parts = flat.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def make() -> Args:
        plan = case.plan()
        token, pair = in_one([plan.token_of_row.shape, plan.pair_of_row.shape], torch.int32)
        x, w1, w2, s, b1, b2, keep_h, _, _, *tail = case.args("moe", plan)
        w1, w2 = in_one([w1.shape, w2.shape], case.dtype)
        return (x, w1, w2, s, b1, b2, keep_h, token, pair, *tail)

    assert_repeated(library._moe, make)


def test_operands_that_are_one_tensor() -> None:
    """Not recorded, as a pointer does not say whose it is; but what others recorded is repeated for them."""
    case = Case()
    shape = (case.tokens * case.k, case.d)
    plan = plan_topk(torch.arange(shape[0]).view(-1, 1) % case.experts, case.experts)

    def make(shared: bool) -> Args:
        do, _, *tail = case.args("down_proj_weight_grad", plan)
        do = torch.zeros(shape, dtype=BF16)
        return (do, do if shared else torch.zeros(shape, dtype=BF16), *tail)

    run = library._down_proj_weight_grad
    operator = Replayed(run)
    for shared in (False, False, True, True, False):
        args = make(shared)
        assert watch(operator, args)[0].events == watch(run, args)[0].events
    (recording,) = recordings(operator)
    assert recording
    operator = Replayed(run)
    for shared in (True, True, True, False):
        args = make(shared)
        assert watch(operator, args)[0].events == watch(run, args)[0].events
    assert recordings(operator) == [None]
