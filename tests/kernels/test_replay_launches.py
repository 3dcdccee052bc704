"""What is repeated of an operator, and of the steps around an exchange between ranks, is what it does by itself.

T tokens · d model width · W ranks · R_max row capacity
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_driver import layout, tracked
from replay_cases import (
    BF16,
    CASES,
    RUNS,
    Args,
    Case,
    assert_repeated,
    recordings,
    repeating,
    select_args,
    tensors_of,
    watch,
)
from torch import Tensor
from triton.backends.nvidia.driver import CudaLauncher

from tilemoe.kernels.choose import Choice, PlanBuilder
from tilemoe.kernels.expert_parallel import triton as by_triton
from tilemoe.kernels.expert_parallel import triton_window
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.formats import quantize as packed
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.kernels.plan.triton import count_sort
from tilemoe.ops import experts as library
from tilemoe.ops import inference, lora, rounding, router, window
from tilemoe.routing.build import plan_rows, plan_topk
from tilemoe.runtime import c_launcher as launcher
from tilemoe.runtime import launch_trace as replay
from tilemoe.testing import poisoned_memory

pytestmark = pytest.mark.process("fake_driver")


def launches(recording: replay.LaunchTrace) -> list[replay._Launched]:
    return [step for step in recording.steps if isinstance(step, replay._Launched)]


def is_direct(step: replay._Launched) -> bool:
    return not isinstance(step.launch, CudaLauncher)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_layers_operators(case: Case, name: str) -> None:
    operator = assert_repeated(RUNS[name], lambda: case.args(name))
    (recording,) = recordings(operator)
    assert all(map(is_direct, launches(recording))), "without Triton's launcher"


@pytest.mark.parametrize("name", ["moe", "down_proj_dgrad_dact", "add_up_proj_wgrad"])
def test_another_release_of_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_RELEASE", "3.5.")
    operator = assert_repeated(RUNS[name], lambda: CASES["hopper"].args(name))
    (recording,) = recordings(operator)
    assert not any(map(is_direct, launches(recording)))


@pytest.mark.parametrize("name", ["moe", "down_proj_dgrad_dact", "up_proj_input_grad"])
def test_quantised_weights_are_found_again(name: str) -> None:
    """What is kept for a weight is no operand: a repetition asks for it, and gets another once the weight changes."""
    case = Case("hopper_fp8")
    case.n = 128
    operator, args = repeating(RUNS[name]), case.args(name)
    weights = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim == 3]
    quantised = list[list[int]]()
    with tracked(tensors_of(args)) as tracker:
        for index in range(6):
            if index in (1, 4):  # before it is recorded, and after
                weights[0].add_(1)
            before = len(tracker.events)
            operator(*args)
            launched = [event for event in tracker.events[before:] if "quantize_" in str(event[0])]
            quantised.append([function for _, function, *_ in launched])
    (of_rows,) = quantised[-1]  # in every call
    times = [sum(function != of_rows for function in of_call) for of_call in quantised]
    assert times == [len(weights), 1, 0, 0, 1, 0]
    (recording,) = recordings(operator)
    assert sum(isinstance(step, replay._Kept) for step in recording.steps) == len(weights)


@pytest.mark.parametrize("name", ["hopper, pairs", "triton, fp32"])
def test_h_in_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of h is made before down_proj and h given back; in the backward h is made again."""
    case = CASES[name]
    monkeypatch.setattr(case, "n", 128)
    rows, width = case.tokens * case.k, 2 * case.n
    operator = assert_repeated(library.moe_forward, lambda: case.args("moe_h_in_fp8"))
    tracker, (o, data, scale) = watch(operator, case.args("moe_h_in_fp8"))
    sizes = [tracker.bytes[name[0][0]] for name in (data, scale)]
    assert sizes == [rows * width, 4 * rows * width // 128]
    alive_at_o = [tracker.bytes[number] for number in tracker.alive[o[0][0]]]
    assert case.dtype.itemsize * rows * width not in alive_at_o, "h"
    assert_repeated(library.dequantize_h.run, lambda: case.args("dequantize_h"))


@pytest.mark.parametrize("tokens", [1, 40, 2100])
def test_inference_by_ids(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = plan_small.why_unsupported(2 * tokens, 4) is None
    build = (plan_small.count_sort_small, plan_small.count_sort_small_in_one) if few else (count_sort,) * 2
    monkeypatch.setattr(inference, "builder_for", lambda *args, **options: PlanBuilder(*build))
    monkeypatch.setattr(inference, "choose_experts", lambda *args: Choice("hopper", backend_named("hopper"), ""))
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
    case, operator = Case(), repeating(library.moe_forward)
    given = [case.args("moe") for _ in range(4)]
    watch(library.moe_forward, given[0])  # it compiles
    for args in given * 3:
        assert watch(operator, args)[0].events == watch(library.moe_forward, args)[0].events
    (recording,) = recordings(operator)
    encoded = [entry[-1] for step in recording.steps for entry in getattr(step, "descriptors", ())]
    assert encoded
    assert all(1 <= len(each._known) <= 2 for each in encoded)


def select_grad_args(with_all: bool) -> Args:
    """With all: gradients of both sums, of strides that are copied, a mask and the other softmax."""
    spec = (2, "late softmax" if with_all else "softmax", True, 1.0, 1, 1, with_all, with_all)
    logits, _, mask, *_ = select_args(mask=with_all)
    d_scores = torch.zeros(2, 40).t() if with_all else torch.zeros(40, 2)
    sums = (torch.zeros(1).expand(8), torch.zeros(())) if with_all else (None, None)
    return (logits, torch.arange(2, dtype=torch.int32).repeat(40, 1), mask, d_scores, *sums, *spec)


def sigmoid_args(with_all: bool) -> Args:
    spec = (2, "sigmoid", True, 2.5, 1, 1, with_all, with_all)
    return select_args(spec=spec, bias=with_all, mask=with_all, transposed=with_all)


def rounding_spec(mode: str, score: str) -> tuple[Any, ...]:
    """Of 40 tokens, 8 experts, 2 a token, and tiles of 16."""
    return (mode, 16, score, True, 2.5, 40 * 2 + 8 * 15)


def rounding_args(mode: str, score: str, masked: bool) -> Args:
    logits, _, mask, *_ = select_args(mask=masked, transposed=masked)
    uniform = torch.zeros(8) if mode == "nearest_score" else None
    return (logits, indices(40, 2), torch.zeros(40, 2), uniform, mask, *rounding_spec(mode, score))


def rounding_grad_args(score: str, spread: bool) -> Args:
    *_, capacity = spec = rounding_spec("nearest", score)
    logits, _, mask, *_ = select_args(mask=spread, transposed=spread)
    d_scores = torch.zeros(1).expand(capacity) if spread else torch.zeros(capacity)
    code, norm = torch.zeros(capacity, dtype=torch.int16), torch.zeros(0 if score == "sigmoid" else 40, 2)
    return (d_scores, logits, indices(40, 2), mask, norm, indices(capacity), code, indices(41), *spec)


def input_grad_args(tokens: int) -> Args:
    return tuple(torch.zeros(shape, dtype=BF16) for shape in ((tokens, 16), (16, 64), (tokens, 64)))


TOKENS, RANKS, D = 40, 2, 128


def indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def a_window() -> window.OpenWindow:
    limits = triton_window.Limits(TOKENS, 2 * TOKENS, 3 * TOKENS, 1, 2 * D)
    layout = triton_window.layout_of(limits, RANKS)
    state, alarm = indices(triton_window.STATE), indices(2)
    view = triton_window.Window(indices(RANKS).long(), state, alarm, 1, limits, layout)
    memory = torch.zeros(layout.bytes, dtype=torch.uint8)
    return window.OpenWindow("one of a test", view, (memory, None))


def to_experts_args(pairs: bool, columns_apart: bool, precision: str) -> Args:
    plan = Case(tokens=TOKENS, pairs=pairs).plan()
    arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
    x = torch.zeros(TOKENS, D, dtype=BF16)
    x = x.t().contiguous().t() if columns_apart else x
    return (x, torch.zeros(2 * TOKENS), *arrays, indices(1), 3 * TOKENS, precision, a_window())


def places() -> Args:
    shapes = (triton_window.AGREED * RANKS, 4, RANKS * TOKENS, RANKS * TOKENS, 2 * TOKENS)
    return tuple(indices(shape) for shape in shapes)


def rows_of(tokens: int) -> Tensor:
    return torch.zeros(tokens, D, dtype=BF16)


def results_in_the_window(ds: torch.Tensor | None = None) -> Args:
    own = a_window()
    own._can_lend = own.has_results = True
    return (own.lend(rows_of(RANKS * TOKENS)), ds, *places(), "bf16", own)


def to_sums() -> Args:
    case = Case()
    return case.args("moe", replace(case.plan(), sums=case.rows(case.d), unchecked=True))


# An operator, its launches in one call (None: however many), and what makes its operands.
OPERATORS: dict[str, tuple[Callable[..., Any], int | None, Callable[[], Args]]] = {
    "select": (router._select, None, partial(sigmoid_args, False)),
    "select, all": (router._select, None, partial(sigmoid_args, True)),
    "select grad": (router._select_grad, None, partial(select_grad_args, False)),
    "select grad, all": (router._select_grad, None, partial(select_grad_args, True)),
    "the router's logits in any batch": (router._invariant_logits, 1, lambda: (rows_of(TOKENS), rows_of(8))),
    "the router's share of dx": (router._input_grad, 1, partial(input_grad_args, 40)),
    "the router's share of dx, one token": (router._input_grad, 1, partial(input_grad_args, 1)),
    "rounding": (rounding._rounded_scores, 6, partial(rounding_args, "nearest", "softmax", False)),
    "rounding, draws": (rounding._rounded_scores, 8, partial(rounding_args, "nearest_score", "late softmax", True)),
    "rounding grad": (rounding._rounded_scores_grad, None, partial(rounding_grad_args, "softmax", False)),
    "rounding grad, sigmoid": (rounding._rounded_scores_grad, None, partial(rounding_grad_args, "sigmoid", True)),
    "plan": (count_sort, None, lambda: (indices(300, 3)[:, :2], 8)),
    "small plan": (plan_small.count_sort_small, None, lambda: (indices(300, 2), 8)),
    "to the experts": (window._to_experts, 11, partial(to_experts_args, False, False, "bf16")),
    "to the experts, pairs": (window._to_experts, 11, partial(to_experts_args, True, True, "bf16")),
    "to the experts, packed": (window._to_experts, 13, partial(to_experts_args, False, False, "fp8")),
    "to the experts again": (window._to_experts_again, 3, lambda: (rows_of(TOKENS), *places(), "bf16", a_window())),
    "to the experts again, packed": (
        window._to_experts_again,
        5,
        lambda: (rows_of(TOKENS), *places(), "fp8", a_window()),
    ),
    "from the experts": (
        window._from_experts,
        3,
        lambda: (rows_of(RANKS * TOKENS), None, *places(), "bf16", a_window()),
    ),
    "from the experts, in place": (window._from_experts, 2, results_in_the_window),
    "gradients home, in place": (window._from_experts, 3, lambda: results_in_the_window(torch.zeros(3 * TOKENS))),
    "experts whose sums have memory": (library.moe_forward, None, to_sums),
    "gradients home": (
        window._from_experts,
        4,
        lambda: (rows_of(RANKS * TOKENS), torch.zeros(3 * TOKENS), *places(), "bf16", a_window()),
    ),
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Choice("triton", by_triton, "")
    monkeypatch.setattr(window, "choose_expert_parallel", lambda *args: kernels)
    packing = Choice("triton", packed, "")
    monkeypatch.setattr(window, "choose_packing", lambda *args: packing)
    for why in ("why_not_triton", "why_no_triton"):
        monkeypatch.setattr(router, why, lambda *args: None)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", OPERATORS)
def test_other_operators(name: str) -> None:
    run, count, make = OPERATORS[name]
    (recording,) = recordings(assert_repeated(run, make))
    launched = launches(recording)
    assert launched
    assert count in (None, len(launched))
    assert all(map(is_direct, launched)), "without Triton's launcher"


@pytest.mark.parametrize("name", RUNS)
def test_nothing_to_do(name: str) -> None:
    """No tokens, and so no rows: most of it is a fill in place, which is not recorded."""
    run = repeating(RUNS[name])
    for _ in range(4):
        args = Case("triton", tokens=0).args(name)
        (expected, returned), (found, got) = watch(RUNS[name], args), watch(run, args)
        assert (found.events, got) == (expected.events, returned)


def lora_args() -> Args:
    case, rank = Case("triton"), 8
    x, w1, w2, s, b1, b2, _, _, *tail = case.args("moe")
    shapes = ((rank, case.d), (2 * case.n, rank), (rank, case.n), (case.d, rank))
    adapters = [torch.zeros(case.experts, *shape, dtype=BF16) for shape in shapes]
    return (x, w1, w2, s, *adapters, b1, b2, None, None, None, None, "dense dense", 0.5, *tail)


def lora_grad_args() -> Args:
    x, *given = lora_args()
    adapted, (_, b2, *rest) = given[:7], given[7:]
    plan, w = rest[-3], adapted[0].shape[1]
    h, u = (torch.zeros(plan.capacity, width, dtype=BF16) for width in (w, 8))
    scales, (formats, scale, *tail) = rest[:4], rest[4:]
    return (torch.zeros_like(x), x, *adapted, b2, *scales, h, u, formats, scale, *tail)


def test_operators_that_change_what_they_made() -> None:
    """In place, of views too, and a result that is a part of what was made."""
    assert_repeated(lora._run, lora_args)
    assert_repeated(lora._run_grad, lora_grad_args)


def test_rows_in_the_experts_order() -> None:
    def args(name: str) -> Args:
        case = Case()
        return case.args(name, plan_rows(torch.full((case.experts,), case.tokens // case.experts), case.tokens))

    for name in ("moe", "down_proj_dgrad_dact", "down_proj_wgrad"):
        assert_repeated(RUNS[name], partial(args, name))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, poisoned_memory])
def test_in_every_mode(mode: Callable[[], Any]) -> None:
    """In inference mode `contiguous` and `to` reach a dispatch mode whole, and may be views or copies."""
    assert_repeated(router._select, lambda: select_args(transposed=True), mode)
    assert_repeated(RUNS["moe"], lambda: CASES["hopper, x to be copied"].args("moe"), mode)
    bias = CASES["triton, bias, interleaved"]
    assert_repeated(RUNS["down_proj_bias_grad"], lambda: bias.args("down_proj_bias_grad"), mode)


def test_what_one_mode_recorded_another_repeats() -> None:
    """Memory that is not initialised is poisoned where PyTorch is asked to, and zeros stay zeros."""
    case, run = Case(), repeating(RUNS["down_proj_dgrad_dact"])
    for _ in range(2):
        run(*case.args("down_proj_dgrad_dact"))
    with poisoned_memory():
        dh, ds, a_scaled = run(*case.args("down_proj_dgrad_dact"))
    assert bool(dh.isnan().all() & a_scaled.isnan().all() & (ds == 0).all())
    with torch.inference_mode():
        assert all(t.is_inference() for t in run(*case.args("down_proj_dgrad_dact")))
    assert not any(t.is_inference() for t in run(*case.args("down_proj_dgrad_dact")))


@pytest.mark.parametrize("operator", [router.select, library.moe])
def test_registered_operators_as_compiled_code_calls_them(operator: Any) -> None:
    args = select_args(transposed=True) if operator is router.select else Case(extra=3).args("moe_inference")
    flat = operator._arguments.flatten(args)
    results = [operator.registered(*flat) for _ in range(4)]
    layouts = [[layout(t) for t in each] for each in results]
    assert layouts[1:] == layouts[:-1]
    assert len({id(t) for each in results for t in each}) == 4 * len(results[0])


@pytest.mark.parametrize("keep_h", [True, False])
def test_slices_are_given_back_in_turn(keep_h: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = [slice(0, 48), slice(48, 96), slice(96, 128)]
    for name in ("forward_slices", "inference_slices", "backward_slices"):
        monkeypatch.setattr(library, name, lambda shape: cut)
    case = Case("triton")
    moe = assert_repeated(library.moe_forward, lambda: case.args("moe" if keep_h else "moe_inference"))
    args = case.args("moe" if keep_h else "moe_inference")
    alone, _ = watch(library.moe_forward, args)
    repeated, _ = watch(moe, args)
    assert repeated.peak_bytes() <= alone.peak_bytes()
    rows = case.tokens * case.k
    of_slice = [number for number, size in enumerate(repeated.bytes) if size in (rows * 48 * 2, rows * 32 * 2)]
    a = next(number for number, size in enumerate(repeated.bytes) if size == rows * case.n * 2)
    of_slice = [number for number in of_slice if number != a]
    assert len(of_slice) == 3
    for number, later in pairwise(of_slice):
        assert number not in repeated.alive[later], "one slice of y at a time"
    assert_repeated(library.up_proj_input_grad.run, lambda: case.args("up_proj_input_grad"))


def test_operands_cut_from_one_buffer() -> None:
    case = Case()

    def in_one(shapes: list[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        flat = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype)
        parts = flat.split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def make() -> Args:
        plan = case.plan()
        token, pair = in_one([plan.token_of_row.shape, plan.pair_of_row.shape], torch.int32)
        x, w1, w2, *rest, _, spec, backend = case.args("moe", plan)
        w1, w2 = in_one([w1.shape, w2.shape], case.dtype)
        return (x, w1, w2, *rest, replace(plan, token_of_row=token, pair_of_row=pair), spec, backend)

    assert_repeated(library.moe_forward, make)


def test_operands_that_are_one_tensor() -> None:
    """Not recorded, as a pointer does not say whose it is; but what others recorded is repeated for them."""
    case = Case()
    shape = (case.tokens * case.k, case.d)
    plan = plan_topk(torch.arange(shape[0]).view(-1, 1) % case.experts, case.experts)

    def make(shared: bool) -> Args:
        do, _, *tail = case.args("down_proj_wgrad", plan)
        do = torch.zeros(shape, dtype=BF16)
        return (do, do if shared else torch.zeros(shape, dtype=BF16), *tail)

    run = library.down_proj_wgrad.run
    watch(run, make(False))  # it compiles
    operator = repeating(run)
    for shared in (False, False, True, True, False):
        args = make(shared)
        assert watch(operator, args)[0].events == watch(run, args)[0].events
    (recording,) = recordings(operator)
    assert recording
    operator = repeating(run)
    for shared in (True, True, True, False):
        args = make(shared)
        assert watch(operator, args)[0].events == watch(run, args)[0].events
    assert recordings(operator) == [None]
