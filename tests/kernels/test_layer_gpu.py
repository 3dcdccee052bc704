"""Promises of the whole layer on a GPU, router included, forward and backward: it repeats itself to the bit, also where
launches are repeated from recordings, waits for nothing, can be captured and compiled, shares the GPU with other work,
compiles no kernel twice, and names mistakes.

T tokens
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_layers
import pytest
import torch
from gpu_layers import (
    LAYERS,
    LAYERS_IN_FP8,
    aside,
    compilations,
    make_input,
    make_layer,
    never_repeated,
    no_host_sync,
    step,
)
from torch import Tensor
from torch._dynamo.utils import counters

from tilemoe.layers.moe import MoE
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.runtime.launch_trace import LaunchTrace
from tilemoe.testing import assert_equal, forward_and_grads, make_inputs, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

_OPERATORS = 7  # of a step, at least: select, plan, forward, four or more of the backward
# RMS-relative, of a value that is rounded once more or once less.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


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


@pytest.mark.parametrize("name", LAYERS | LAYERS_IN_FP8)
def test_twenty_runs_are_bit_equal_repeated_from_recordings_and_wait_for_nothing(
    name: str, repeated: list[LaunchTrace]
) -> None:
    layer = make_layer(name)
    x, do = make_input(layer, 3000)
    first = alone(layer, x, do)
    assert all(bool(tensor.isfinite().all()) and bool(tensor.any()) for tensor in first.values())
    for run in range(19):  # compiled, recorded, repeated
        repeated.clear()
        with no_host_sync() if run else nullcontext():
            found = step(layer, x, do)
        assert_equal(found, first, f"run {run}")
        assert run < 2 or len(repeated) >= _OPERATORS


@pytest.mark.parametrize("name", LAYERS | LAYERS_IN_FP8)
def test_tokens_that_vary(name: str, repeated: list[LaunchTrace]) -> None:
    """With fresh inputs each time, forward and backward, and in inference."""
    layer = make_layer(name)
    for seed, tokens in enumerate((712, 1, 130, 712, 130, 1, 712, 1, 130, 712)):
        x, do = make_input(layer, tokens, seed)
        assert_equal(step(layer, x, do), alone(layer, x, do), f"step {seed}")
        with torch.inference_mode():
            found = layer(x).hidden
        with never_repeated(), torch.no_grad():
            assert torch.equal(found, layer(x).hidden)
    assert len(repeated) >= 4 * _OPERATORS


@pytest.mark.parametrize("name", [*LAYERS, "h in fp8"])
def test_a_captured_training_step_trains_as_it_does_without_capture(name: str, repeated: list[LaunchTrace]) -> None:
    """Forward, losses, backward and the optimiser in one graph, which routes what it is given; the weights that it
    leaves are the same to the bit."""
    layers = [make_layer(name) for _ in range(2)]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-3, eps=1e-3, capturable=True) for layer in layers]
    batches = [tuple(tensor.detach() for tensor in make_input(layers[0], 500, seed)) for seed in range(4)]
    x, target = (tensor.clone() for tensor in batches[0])
    for _ in range(2):
        training_step(layers[1], optimizers[1], x, target)
    graph = torch.cuda.CUDAGraph()
    with aside():
        for _ in range(2):
            training_step(layers[0], optimizers[0], x, target)
    repeated.clear()
    with torch.cuda.graph(graph):
        loss = training_step(layers[0], optimizers[0], x, target)
    assert len(repeated) >= _OPERATORS, "what is captured is repeated from recordings"
    losses = []
    for given in batches[1:] + batches[:1]:
        x.copy_(given[0])
        target.copy_(given[1])
        graph.replay()
        losses.append(float(loss))
        assert losses[-1] == float(training_step(layers[1], optimizers[1], x, target))
    assert len(set(losses)) == len(losses)
    captured, expected = (layer.state_dict() for layer in layers)
    assert_equal(captured, expected)
    assert not torch.equal(captured["experts.w1"], make_layer(name).state_dict()["experts.w1"])


def training_step(layer: MoE, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=True)
    out = layer(x)
    loss = (out.hidden.float() - target.float()).square().mean() + out.aux_loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_streams_at_once(repeated: list[LaunchTrace]) -> None:
    layers = [make_layer("softmax"), make_layer("softmax"), make_layer("grouped")]
    layers[1] = layers[0]  # one module on two streams, and another on a third
    inputs = [make_input(layer, tokens, tokens) for layer, tokens in zip(layers, (3000, 2500, 2000), strict=True)]
    expected = [alone(layer, *given) for layer, given in zip(layers, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in layers]
    for run in range(10):
        # The streams fill behind a pause, so that they start together.
        torch.cuda._sleep(20_000_000)
        gate = torch.cuda.current_stream().record_event()
        found = []
        for layer, given, stream in zip(layers, inputs, streams, strict=True):
            stream.wait_event(gate)
            with torch.cuda.stream(stream):
                found.append(step(layer, *given))
        torch.cuda.synchronize()
        for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_equal(actual, wanted, f"run {run}, stream {index}")
    assert len(repeated) >= 10 * _OPERATORS


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
def test_nothing_is_kept_and_nothing_more_is_held_where_launches_are_repeated(
    name: str, repeated: list[LaunchTrace]
) -> None:
    layer = make_layer(name)
    x, do = make_input(layer, 3000)
    alone(layer, x, do)
    for _ in range(3):
        step(layer, x, do)

    def held() -> int:
        # Autograd's thread answers before it has let go of all that it held; it has, when it answers again.
        leaf = x.detach().requires_grad_()
        torch.autograd.grad(leaf.view_as(leaf), leaf, do)
        del leaf
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def bytes_of(run: Any) -> tuple[int, int]:
        before = held()
        torch.cuda.reset_peak_memory_stats()
        run(layer, x, do)
        return held() - before, torch.cuda.max_memory_allocated() - before

    kept, peak = bytes_of(alone)
    repeated.clear()
    kept_of_repeated, peak_of_repeated = bytes_of(step)
    assert len(repeated) >= _OPERATORS
    assert kept_of_repeated <= kept
    assert peak_of_repeated <= peak


@pytest.mark.parametrize("name", LAYERS)
def test_compiled_in_one_graph(name: str, repeated: list[LaunchTrace]) -> None:
    """Bit-equal to eager, but for what Inductor fuses and so rounds less often or adds up in another order.

    Deterministic, for Inductor would time the router's fp32 products, whose E = 5 is no multiple of 4, against the same
    ones padded, and run whichever was faster that day: another cuBLAS kernel, which adds up in another order.
    """
    layer = make_layer(name)
    compiled = torch.compile(layer, fullgraph=True, options={"deterministic": True})
    for seed in range(4):
        x, do = make_input(layer, 600, seed)
        expected = step(layer, x, do)
        repeated.clear()
        found = step(compiled, x, do)
        assert repeated or seed < 2
        assert_equal(step(layer, x, do), expected, "eager, again")
        found = {key.removeprefix("_orig_mod."): tensor for key, tensor in found.items()}
        # dx is the sum of the router's and the experts' part; a shared expert is ordinary PyTorch throughout.
        fused = {"dx", "aux_loss"} if layer.shared is None else expected.keys() - {"tokens_per_expert"}
        assert_close({key: found.pop(key) for key in fused}, {key: expected.pop(key) for key in fused}, name)
        assert_equal(found, expected)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    for key, wanted in expected.items():
        actual = found[key]
        assert actual.dtype == wanted.dtype, (where, key)
        if wanted.dtype.is_floating_point:
            assert relative_error(actual, wanted.double()) <= ROUNDING[wanted.dtype], (where, key)
        else:
            assert torch.equal(actual, wanted), (where, key)


def run(compiled: torch.nn.Module, x: Tensor, do: Tensor) -> dict[str, Tensor]:
    """Copies: the next run of a graph writes over its results."""
    return {key.removeprefix("_orig_mod."): tensor.clone() for key, tensor in step(compiled, x, do).items()}


@pytest.mark.parametrize("name", LAYERS)
def test_reduce_overhead_captures_forward_and_backward(name: str) -> None:
    layer = make_layer(name)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for seed in range(5):  # run, recorded, replayed from then on
        x, do = make_input(layer, 600, seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(run(compiled, x, do), step(layer, x, do), f"step {seed}")
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_that_vary_compile_one_graph_more(name: str) -> None:
    """The second number of tokens makes the graph dynamic, and it serves all others."""
    layer = make_layer(name)
    compiled = torch.compile(layer, fullgraph=True)
    graphs = []
    for seed, tokens in enumerate((600, 700, 1001, 650, 3000)):
        x, do = make_input(layer, tokens, seed)
        assert_close(run(compiled, x, do), step(layer, x, do), f"T = {tokens}")
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * 4
    assert graphs[1] <= 2


def test_another_number_of_tokens_compiles_nothing() -> None:
    layers = [make_layer(name) for name in LAYERS]

    def train(tokens: int) -> None:
        for layer in layers:
            step(layer, *make_input(layer, tokens))

    def infer(tokens: int) -> None:
        for layer in layers:
            with torch.no_grad():
                layer(make_input(layer, tokens)[0])

    for use, first in ((train, (2048,)), (infer, (2048, 75, 20))):  # inference has tiles of three heights
        for tokens in first:
            use(tokens)
        with compilations() as names:
            for tokens in (1, 2, 16, 17, 100, 128, 1000, 1001, 4096, 30000, 65536):
                use(tokens)
                assert names == {"compiled": [], "cached": []}, f"{use.__name__} at T = {tokens}"


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, gpu_layers.__file__],
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    first, second = found
    assert len(first["compiled"]) > 20
    assert second["compiled"] == []
    assert sorted(second["cached"]) == sorted(first["compiled"] + first["cached"])


IDS = torch.tensor([[0, 1], [2, 1], [0, 2]])


def test_ids_out_of_range_are_reported_when_asked() -> None:
    for plan in (
        plan_topk(torch.where(IDS == 2, -3, IDS).cuda(), 3),
        plan_pairs(torch.tensor([0, 5]).cuda(), torch.tensor([1, 1]).cuda(), 4, 3),
        plan_pairs(torch.tensor([0, -1]).cuda(), torch.tensor([1, 1]).cuda(), 4, 3),
    ):
        given = make_inputs(plan, 16, 8, dtype=torch.bfloat16)
        out = forward_and_grads(moe, {name: tensor.nan_to_num(0.5) for name, tensor in given.items()}, plan)
        assert all(bool(tensor.isfinite().all()) for tensor in out.values()), "the bad pairs are skipped"
        with pytest.raises(ValueError, match="; found "):
            plan.check()
    plan_topk(IDS.cuda(), 3).check()


def test_too_little_memory_is_an_error_and_nothing_is_lost() -> None:
    plan = plan_topk(torch.arange(2 * 4096, device="cuda").view(4096, 2) % 4, 4)
    inputs = make_inputs(plan, 1024, 512, dtype=torch.bfloat16)
    expected = forward_and_grads(moe, inputs, plan)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            forward_and_grads(moe, inputs, plan)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_equal(forward_and_grads(moe, inputs, plan), expected)
