"""Which recording serves which call, and who else takes part.

T tokens
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import fake_driver
import pytest
import torch
import triton
from helpers import run_in_threads
from replay_cases import CASES, DRIVER, Args, Case, recordings, repeating, select_args, tensors_of, watch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilemoe.ops import experts as library
from tilemoe.ops import router
from tilemoe.runtime import launch
from tilemoe.runtime import launch_cache as replayed
from tilemoe.runtime import launch_trace as replay
from tilemoe.testing import assert_equal

pytestmark = pytest.mark.process("fake_driver")

FOUND = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1 GiB."


def another(args: Args, position: int, change: Callable[[Any], Any]) -> Args:
    return (*args[:position], change(args[position]), *args[position + 1 :])


def shifted(t: Tensor) -> Tensor:
    """The same values and strides, one element further in memory."""
    return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)


CHANGES: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "alignment of x": (0, shifted),
    "stride of x": (0, lambda x: torch.zeros(x.shape[0], x.shape[1] + 8, dtype=x.dtype)[:, : x.shape[1]]),
    "stride of w1": (1, lambda w: torch.zeros(w.mT.shape, dtype=w.dtype).mT),
    "alignment of w2": (2, shifted),
    "dtype of the scores": (3, lambda s: s.double()),
    "alignment of the plan": (8, lambda plan: replace(plan, token_of_row=shifted(plan.token_of_row))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_is_not_served(change: str) -> None:
    case, operator = Case(), repeating(library.moe_forward)
    for _ in range(3):
        args = case.args("moe")
        other = another(case.args("moe"), *CHANGES[change])
        for given in (args, other):
            expected = watch(library.moe_forward, given)
            found = watch(operator, given)
            assert (found[0].events, found[1]) == (expected[0].events, expected[1])
    assert len(recordings(operator)) == 2
    assert all(recordings(operator))


def test_another_number_of_tokens_or_option_is_not_served() -> None:
    operator = repeating(library.moe_forward)
    cases = [Case(), Case(tokens=41), Case("triton"), Case(activation="geglu"), Case(dtype=torch.float16)]
    for _ in range(3):
        for given in [case.args(name) for case in cases for name in ("moe", "moe_inference")]:
            expected = watch(library.moe_forward, given)[0].events  # first: it compiles
            assert watch(operator, given)[0].events == expected
    assert len(recordings(operator)) == 10


def test_how_fp32_is_multiplied_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    case, operator = CASES["triton, fp32"], repeating(library.moe_forward)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "ieee", "ieee", "tf32", "tf32", "tf32", "ieee"):
            torch.backends.cuda.matmul.fp32_precision = precision
            args = case.args("moe")
            expected = watch(library.moe_forward, args)[0].events
            assert (found := watch(operator, args)[0].events) == expected
            assert any(precision in event[-1] for event in found if event[0] == "up_proj_act_kernel")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


CONSTANT = torch.zeros(4, 4)
UNREPEATABLE: dict[str, Callable[[Tensor], Any]] = {
    "in place, an operand": lambda x: x.add_(1).mul(2),
    "to another": lambda x: torch.mul(x, 2, out=x.new_empty(x.shape)),
    "of other bits": lambda x: x.view(torch.int32) + 1,
    "of a list": lambda x: torch.stack([x, x]),
    "read back": lambda x: x.new_empty(int(x.sum()) + 2),
    "several": lambda x: x.sort(),
    "a part": lambda x: x[1:],
    "of a tensor that is no operand": lambda x: x + CONSTANT,
    "of a shape that values decide": lambda x: (x.nonzero(), x.new_zeros(x.nonzero().shape[0])),
    "elsewhere": lambda x: (torch.empty(3, device="meta"), x.new_zeros(x.shape))[1],
}


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_what_cannot_be_repeated_is_never_recorded(name: str) -> None:
    run = UNREPEATABLE[name]
    operator = repeating(run)
    for index in range(4):
        x = torch.full((4, 4), float(index))
        expected, found = run(x.clone()), operator(x)
        if name != "read back":
            assert_equal(expected, found)
        assert [t.shape for t in tensors_of(expected)] == [t.shape for t in tensors_of(found)]
    assert recordings(operator) == [None]


def test_views_and_changes_in_place_are_repeated() -> None:
    def in_place(x: Tensor) -> Tensor:
        return x.new_empty(x.shape).copy_(x)

    def of_parts(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.t().mul(2)
        y[1:].add_(x[:, 2:4].sum(1), alpha=0.5)
        return y, x[1:, ::2].sum(0)

    def a_part(x: Tensor) -> Tensor:
        return (x + 1)[1:, 2:]

    for run in (in_place, of_parts, a_part):
        operator = repeating(run)
        for index in range(4):
            x = torch.arange(16.0).view(4, 4) + index
            assert_equal(run(x), operator(x), run)
        (recording,) = recordings(operator)
        assert isinstance(recording, replay.LaunchTrace), run


def test_an_operand_that_is_returned_is_each_calls_own() -> None:
    operator = repeating(lambda x: (x.new_zeros(4), x))
    for _ in range(4):
        x = torch.zeros(4, 4)
        assert operator(x)[1] is x
    assert recordings(operator) != [None]


@pytest.mark.parametrize(("first", "length", "is_inside"), [(4, 4, True), (2, 4, False), (4, 8, False), (0, 4, False)])
def test_a_pointer_must_point_into_an_operand(first: int, length: int, is_inside: bool) -> None:
    """Into the operand itself: what lies beside it in its memory may be elsewhere at another call."""
    operand = torch.zeros(12)[4:8]
    watching = replay.LaunchTracer((operand,))
    metadata = SimpleNamespace(name="kernel", global_scratch_size=0, profile_scratch_size=0)
    watching.launched(
        SimpleNamespace(metadata=metadata, run=None, function=None, packed_metadata=None),
        (1,),
        [operand.as_strided((length,), (1,), storage_offset=first)],
    )
    assert (watching.problem is None) == is_inside


def test_what_the_interpreter_runs_is_never_recorded() -> None:
    class Interpreted:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda out, x, **options: out.numpy().__setitem__(slice(None), x.numpy())

    def run(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        launch.Launch(Interpreted(), (1,), {"out": out, "x": x}, {}, num_warps=1, num_stages=1).run()
        return out

    operator = repeating(run)
    for value in range(4):
        x = torch.full((5,), float(value))
        assert torch.equal(operator(x), x)
    assert recordings(operator) == [None]


def test_whole_tensors_operators_are_repeated() -> None:
    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = (x + y).to(torch.float64)
        return total.sum(0), total.t().contiguous()

    operator = repeating(run)
    for mode in (nullcontext, torch.inference_mode, nullcontext, torch.inference_mode):
        x, y = torch.randn(3, 5), torch.randn(3, 5)
        with mode():
            assert_equal(operator(x, y), run(x, y))
    like = repeating(lambda x: torch.empty_like(x))
    assert [like(torch.zeros(3, 5).t()).stride() for _ in range(3)] == [(1, 5)] * 3
    assert all(recordings(like))


def test_hooks_of_either_kind_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    case, names, runtime = Case(), list[str](), triton.knobs.runtime
    note = lambda metadata: names.append(metadata.get()["name"])  # noqa: E731
    for _ in range(2):
        library.moe(*case.args("moe"))
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.add(note)
        try:
            library.moe(*case.args("moe"))
            assert replay.is_hooked()
        finally:
            chain.remove(note)
        assert not replay.is_hooked()
        assert chain is runtime.launch_exit_hook or (len(names), names[-1]) == (4, "combine_kernel")
        names.clear()
        library.moe(*case.args("moe"))
        assert not names
    for value, seen in ((note, True), (None, False)):
        monkeypatch.setattr(runtime, "launch_enter_hook", value)
        assert replay.is_hooked() is seen


def test_a_dispatch_mode_sees_the_operator() -> None:
    seen: list[str] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    args = select_args()
    for _ in range(3):
        router.select(*args)
    with See():
        router.select(*args)
    assert seen == ["tilemoe.select.default"]


def test_the_current_stream_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = repeating(library.moe_forward)
    for stream in (1, 2, 3, 4):
        monkeypatch.setattr(DRIVER, "stream", stream)
        args = Case().args("moe")
        found = watch(operator, args)[0].events
        assert found == watch(library.moe_forward, args)[0].events
        assert {event[4] for event in found if event[0].endswith("_kernel")} == {stream}


def test_too_little_memory_is_the_same_error() -> None:
    """Whichever allocation fails, by itself, while it is recorded or repeated; and the next call works."""
    allocations = len(watch(library.moe_forward, Case().args("moe"))[0].bytes)
    assert allocations >= 4
    for limit in range(allocations):
        args = Case(tokens=48 + limit).args("moe")  # a layout of its own
        texts = []
        for call in range(4):
            with fake_driver.tracked(tensors_of(args), limit=limit, error=torch.OutOfMemoryError(FOUND)) as tracker:
                with pytest.raises(torch.OutOfMemoryError) as error:
                    library.moe(*args, seen=True)
                assert tracker.all_expired(), "nothing is held while the error is handled"
            texts.append(str(error.value))
            library.moe(*args, seen=True)
            assert texts[0] == texts[-1], f"call {call}"
        assert texts[0].startswith("tilemoe.moe, forward: CUDA out of memory. Tried to allocate 20.00 MiB.")
        assert f"With {48 + limit} tokens" in texts[0]


def test_two_threads_repeat_one_recording_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case, operator = Case(), repeating(library.moe_forward)
    for _ in range(2):
        operator(*case.args("moe"))
    given = [case.args("moe") for _ in range(2)]
    expected = [watch(library.moe_forward, args)[0].events for args in given]
    found: list[Any] = [None, None]
    in_step = threading.Barrier(2)
    made = replay._Made.__call__

    def make(*args: Any) -> None:
        in_step.wait(timeout=20)
        made(*args)

    monkeypatch.setattr(replay._Made, "__call__", make)

    def work(index: int) -> None:
        found[index] = watch(operator, given[index])[0].events

    run_in_threads(*(partial(work, index) for index in range(2)))
    assert found == expected


def test_threads_that_forget_while_others_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replayed, "MAX_LAYOUTS", 2)
    operator = repeating(lambda x: x.new_empty(x.shape))
    for size in (1, 2, 3, 1, 2, 3, 1, 1, 1):
        operator(torch.empty(size))
        assert len(recordings(operator)) <= 2
    problems: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for index in range(3000):
                size = first + index % 3
                assert operator(torch.empty(size)).shape == (size,)
        except (KeyError, AssertionError) as error:
            problems.append(error)

    run_in_threads(*(partial(work, first) for first in (1, 2, 3)))
    assert not problems


def test_a_kernel_that_asks_for_memory_is_not_recorded() -> None:
    args, operator = Case().args("moe"), repeating(library.moe_forward)
    operator(*args)
    kernels = [compiled for known in _known_kernels() for compiled in known.values()]
    assert kernels
    try:
        for compiled in kernels:
            compiled.metadata.global_scratch_size = 16
        operator(*args)
        assert recordings(operator) == [None]
        assert watch(operator, args)[0].events == watch(library.moe_forward, args)[0].events
    finally:
        for compiled in kernels:
            compiled.metadata.global_scratch_size = 0


def _known_kernels() -> list[dict[Any, Any]]:
    from tilemoe.kernels.experts.hopper import gemm_gather_act as gemm_rows
    from tilemoe.kernels.experts.hopper import gemm_stationary
    from tilemoe.kernels.experts.triton import combine

    kernels = (gemm_stationary.gemm_stationary_kernel, gemm_rows.up_proj_act_kernel, combine.combine_kernel)
    return [launch._compiled(kernel, torch.device("cpu")) for kernel in kernels]
