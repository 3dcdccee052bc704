"""A whole layer whose launches are repeated from recordings, on a GPU: to the bit what it gives without them.

T tokens
"""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from gpu_layers import LAYERS, aside, make_input, make_layer, never_repeated, no_host_sync, step
from helpers import run_in_threads
from torch import Tensor

from tilemoe.runtime.launch_trace import LaunchTrace
from tilemoe.testing import assert_equal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

_OPERATORS = 7  # of a step, at least: select, plan, forward, four or more of the backward


@pytest.fixture
def repeated() -> Iterator[list[LaunchTrace]]:
    """The recordings that were repeated during the test, one entry for each time."""
    calls: list[LaunchTrace] = []
    run = LaunchTrace.__call__

    def note(recording: LaunchTrace, *args: Any) -> Any:
        calls.append(recording)
        return run(recording, *args)

    with mock.patch.object(LaunchTrace, "__call__", note):
        yield calls


def alone(layer: Any, x: Tensor, do: Tensor) -> dict[str, Tensor]:
    """A step without recordings of a MoE, or of its compiled form."""
    with never_repeated():
        return step(layer, x, do)


@pytest.mark.parametrize("name", LAYERS)
def test_fresh_inputs(name: str, repeated: list[LaunchTrace]) -> None:
    layer = make_layer(name)
    for seed in range(4):
        x, do = make_input(layer, 710, seed)
        found = step(layer, x, do)
        if seed >= 2:
            assert len(repeated) >= _OPERATORS
            repeated.clear()
        assert_equal(found, alone(layer, x, do), f"step {seed}")


@pytest.mark.parametrize("name", LAYERS)
def test_inference(name: str, repeated: list[LaunchTrace]) -> None:
    layer = make_layer(name)
    for seed in range(4):
        x, _ = make_input(layer, 711, seed)
        with torch.inference_mode():
            found = layer(x).hidden
        with never_repeated(), torch.no_grad():
            assert torch.equal(found, layer(x).hidden)
    assert repeated


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_that_vary(name: str, repeated: list[LaunchTrace]) -> None:
    layer = make_layer(name)
    for seed, tokens in enumerate((712, 1, 130, 712, 130, 1, 712, 1, 130, 712)):
        x, do = make_input(layer, tokens, seed)
        assert_equal(step(layer, x, do), alone(layer, x, do), f"step {seed}")
    assert len(repeated) >= 4 * _OPERATORS


@pytest.mark.parametrize("name", LAYERS)
def test_called_by_compiled_code(name: str, repeated: list[LaunchTrace]) -> None:
    layer = make_layer(name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    for seed in range(4):
        x, do = make_input(layer, 718, seed)
        found = step(compiled, x, do)
        if seed >= 2:
            assert repeated
            repeated.clear()
        assert_equal(found, alone(compiled, x, do), f"step {seed}")


def test_operands_of_other_strides(repeated: list[LaunchTrace]) -> None:
    """x and the gradient of the output are columns of wider tensors, at addresses that TMA takes and at others."""
    layer = make_layer("softmax")
    for seed in range(4):
        for offset in (0, 8, 3):
            x, do = make_input(layer, 713, seed)
            wide = torch.randn(2, 713, x.shape[1] + 16, device="cuda").to(x.dtype)
            wide[:, :, offset : offset + x.shape[1]] = torch.stack([x.detach(), do])
            x, do = (part[:, offset : offset + do.shape[1]] for part in wide)
            x.requires_grad_()
            assert_equal(step(layer, x, do), alone(layer, x, do), f"step {seed}, offset {offset}")
    assert len(repeated) >= 4 * _OPERATORS


@pytest.mark.parametrize("name", LAYERS)
def test_in_a_captured_graph(name: str, repeated: list[LaunchTrace]) -> None:
    layer = make_layer(name)
    inputs = [make_input(layer, 714, seed) for seed in range(3)]
    expected = [alone(layer, *given) for given in inputs]
    x, do = (tensor.detach().clone() for tensor in inputs[0])
    x.requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with aside():
        for _ in range(3):
            step(layer, x, do)
    repeated.clear()
    with torch.cuda.graph(graph):
        captured = step(layer, x, do)
    assert len(repeated) >= _OPERATORS, "what is captured is repeated from recordings"
    for index in (1, 2, 0):
        with torch.no_grad():
            x.copy_(inputs[index][0])
            do.copy_(inputs[index][1])
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, expected[index], f"input {index}")


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_waits_for_the_gpu(name: str, repeated: list[LaunchTrace]) -> None:
    layer = make_layer(name)
    x, do = make_input(layer, 719)
    for _ in range(3):
        expected = step(layer, x, do)
    repeated.clear()
    with no_host_sync():
        found = step(layer, x, do)
    assert len(repeated) >= _OPERATORS
    assert_equal(found, expected)


def test_on_a_side_stream(repeated: list[LaunchTrace]) -> None:
    """The stream waits before it makes the inputs: launched on another, kernels would read what was there before."""
    layer, side = make_layer("softmax"), torch.cuda.Stream()
    inputs = [make_input(layer, 715, seed) for seed in range(4)]
    expected = [alone(layer, *given) for given in inputs]
    for _ in range(3):
        step(layer, *inputs[0])
    torch.cuda.synchronize()
    repeated.clear()
    found = []
    with torch.cuda.stream(side):
        for given in inputs:
            late = [torch.full_like(tensor, float("nan")) for tensor in given]
            torch.cuda._sleep(20_000_000)
            for tensor, value in zip(late, given, strict=True):
                tensor.copy_(value.detach())
            found.append(step(layer, late[0].requires_grad_(), late[1]))
    torch.cuda.synchronize()
    assert len(repeated) >= 4 * _OPERATORS
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_equal(actual, wanted, f"step {index}")


def test_two_threads_on_two_streams(repeated: list[LaunchTrace]) -> None:
    layer = make_layer("softmax")
    inputs = [[make_input(layer, 716, 10 * thread + seed) for seed in range(10)] for thread in range(2)]
    expected = [[alone(layer, *given) for given in each] for each in inputs]
    found: list[list[dict[str, Tensor]]] = [[], []]
    torch.cuda.synchronize()

    def work(thread: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for given in inputs[thread]:
                found[thread].append(step(layer, *given))

    run_in_threads(*(partial(work, index) for index in range(2)), timeout=120)
    torch.cuda.synchronize()
    assert repeated
    for index in range(2):
        assert len(found[index]) == 10
        for run, (actual, wanted) in enumerate(zip(found[index], expected[index], strict=True)):
            assert_equal(actual, wanted, f"thread {index}, step {run}")


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_kept_and_nothing_more_is_held(name: str, repeated: list[LaunchTrace]) -> None:
    layer = make_layer(name)
    x, do = make_input(layer, 3000)
    alone(layer, x, do)
    for _ in range(3):
        step(layer, x, do)

    def bytes_of(run: Any) -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(layer, x, do)
        # Autograd's thread answers before it has let go of all that it held; it has, when it answers again.
        leaf = x.detach().requires_grad_()
        torch.autograd.grad(leaf.view_as(leaf), leaf, do)
        del leaf
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before

    kept, peak = bytes_of(alone)
    repeated.clear()
    kept_of_repeated, peak_of_repeated = bytes_of(step)
    assert len(repeated) >= _OPERATORS
    assert kept_of_repeated <= kept
    assert peak_of_repeated <= peak


def test_a_profiler_of_launches_sees_them_all(repeated: list[LaunchTrace]) -> None:
    layer = make_layer("softmax")
    x, do = make_input(layer, 717)
    for _ in range(3):
        expected = step(layer, x, do)
    names: list[str] = []

    def note(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    repeated.clear()
    triton.knobs.runtime.launch_enter_hook.add(note)
    try:
        found = step(layer, x, do)
        assert not repeated
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(note)
    assert_equal(found, expected)
    assert {"select_kernel", "select_grad_kernel", "combine_kernel", "score_grad_kernel"} <= set(names)
