"""What the checks before the stopwatch let through and what they stop: layers, few tokens, experts on two processes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import expert_parallel
import pytest
import small_tokens
import torch
from ranks import run_on_ranks
from torch import Tensor, nn

from tilemoe.bench import gate, peers
from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.integrations import transformers as integration
from tilemoe.shape import MoEShape
from tilemoe.testing import assert_equal

SHAPE = MoEShape(50, 24, 16, 6, 3)
CPU = torch.device("cpu")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def weights(request: pytest.FixtureRequest) -> peers.Weights:
    torch.manual_seed(0)
    return peers.make_weights(SHAPE, CPU, request.param)


def ours(weights: peers.Weights) -> peers.Contestant:
    return peers.tilemoe_layer(SHAPE, weights)


def plain(weights: peers.Weights) -> peers.Contestant:
    """`grouped_mm` without torch.compile."""
    run = lambda x: peers.grouped_mm_layer(x, weights, SHAPE.num_experts_per_tok)  # noqa: E731
    return replace(ours(weights), name="grouped_mm", run=run)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("build", [ours, plain])
def test_correct_contestants_pass(build: Callable[[peers.Weights], peers.Contestant], weights: peers.Weights) -> None:
    before = [weight.detach().clone() for weight in (weights.router, weights.w1, weights.w2)]
    assert gate.problem(build(weights), SHAPE, weights) is None
    assert_equal((weights.router, weights.w1, weights.w2), before)


def test_one_expert_per_token_whose_score_is_always_one() -> None:
    """The router's gradient is zero, which no error is relative to."""
    shape = replace(SHAPE, num_experts_per_tok=1)
    weights = peers.make_weights(shape, CPU, torch.float32)
    contestant = peers.tilemoe_layer(shape, weights)
    assert gate.problem(contestant, shape, weights) is None

    def run(x: Tensor) -> Tensor:
        return contestant.run(x) + weights.router.sum() - weights.router.detach().sum()

    assert "drouter is off by inf" in str(gate.problem(replace(contestant, run=run), shape, weights))


def test_a_contestant_with_permuted_rows_passes_by_its_own_order(weights: peers.Weights) -> None:
    w1 = torch.nn.Parameter(peers.interleaved(weights.w1.detach()))

    def run(x: Tensor) -> Tensor:
        return peers.grouped_mm_layer(x, replace(weights, w1=peers.concatenated(w1)), SHAPE.num_experts_per_tok)

    contestant = replace(ours(weights), run=run, leaves=(weights.router, w1, weights.w2))
    assert "dw1" in str(gate.problem(contestant, SHAPE, weights))
    assert gate.problem(replace(contestant, w1_rows=peers.concatenated), SHAPE, weights) is None


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is 5% too large."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dx: Tensor) -> Tensor:
        return 1.05 * dx


def _first_row_unwritten(out: Tensor) -> Tensor:
    row = torch.full_like(out[:1], float("nan"))
    return torch.cat([row, out[1:]])


WRONG = {
    "zeros": (lambda out: out * 0, "output"),
    "5% too large": (lambda out: 1.05 * out, "output"),
    "rows of other tokens": (lambda out: out.roll(1, dims=0), "output"),
    "an unwritten row": (_first_row_unwritten, "output"),
    "gradients 5% too large": (_Scaled.apply, "dx"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_contestants_are_named_with_what_is_wrong(wrong: str, weights: peers.Weights) -> None:
    spoil, what = WRONG[wrong]
    right = ours(weights)
    found = gate.problem(replace(right, run=lambda x: spoil(right.run(x))), SHAPE, weights)
    assert found.startswith(what)


def test_up_in_the_place_of_gate_is_wrong(weights: peers.Weights) -> None:
    swapped = replace(weights, w1=torch.nn.Parameter(weights.w1.detach().roll(SHAPE.intermediate_size, dims=1)))
    assert "output" in str(gate.problem(ours(swapped), SHAPE, weights))


def test_the_router_is_put_back_when_a_contestant_raises(weights: peers.Weights) -> None:
    kept = weights.router.detach().clone()

    def run(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        gate.problem(replace(ours(weights), run=run), SHAPE, weights)
    assert torch.equal(weights.router, kept)


def test_row_orders_are_inverse() -> None:
    w1 = torch.arange(2 * 6 * 3).view(2, 6, 3)
    assert peers.interleaved(w1)[0, :, 0].tolist() == [w1[0, row, 0].item() for row in (0, 3, 1, 4, 2, 5)]
    assert torch.equal(peers.concatenated(peers.interleaved(w1)), w1)


def test_build_names_the_peers_and_says_what_is_missing() -> None:
    weights = peers.make_weights(SHAPE, CPU, torch.float32)
    with pytest.raises(ValueError, match="sonic-moe"):
        peers.build("sonic", SHAPE, weights)
    named = peers.build("tilemoe[torch]", SHAPE, weights)
    assert isinstance(named, peers.Contestant)
    assert named.name == "tilemoe[torch]"
    assert "not importable" in str(peers.build("scattermoe", SHAPE, weights))


FEW_TOKENS = MoEShape(5, 32, 16, 8, 3)


@pytest.fixture
def layers() -> Iterator[list[nn.Module]]:
    integration.register()
    with torch.no_grad():
        yield small_tokens.make_layers(FEW_TOKENS, 2, torch.device("cpu"), torch.bfloat16)
    integration.unregister()


@pytest.mark.parametrize("name", small_tokens.IMPLEMENTATIONS)
def test_contestants_pass_the_gate_and_a_wrong_one_does_not(name: str, layers: list[nn.Module]) -> None:
    calls = small_tokens.make_calls(layers, 5)
    outputs = small_tokens.run(layers, calls, name)
    assert small_tokens.problem(outputs, layers, calls) is None
    wrong = [outputs[0], 1.1 * outputs[1]]
    assert "layer 1 is off by " in str(small_tokens.problem(wrong, layers, calls))
    small_tokens.poison(outputs)
    assert small_tokens.problem(outputs, layers, calls) is not None


def test_layers_are_routed_differently_and_tokens_to_different_experts(layers: list[nn.Module]) -> None:
    (_, first, scores), (_, second, _) = small_tokens.make_calls(layers, 5)
    assert not torch.equal(first, second)
    assert all(len(set(ids)) == 3 for ids in first.tolist())
    assert scores.dtype == torch.bfloat16


def test_bytes_are_those_of_the_chosen_experts(layers: list[nn.Module]) -> None:
    (call, other) = small_tokens.make_calls(layers, 1)
    of_expert = (2 * 16 * 32 + 32 * 16) * 2
    assert small_tokens.bytes_of_weights(layers, [call, other]) == 3 * of_expert
    repeated = (call[0].repeat(4, 1), call[1].repeat(4, 1), call[2].repeat(4, 1))
    assert small_tokens.bytes_of_weights(layers, [repeated, repeated]) == 3 * of_expert


def test_a_row_compares_with_the_best_peer() -> None:
    ms = {"tilemoe": [0.1, 0.2, 0.1], "grouped_mm": [0.15, 0.3, 0.2], "batched_mm": [0.4, 0.1, 0.4]}
    row = small_tokens.row_of(ms, 10**8)
    assert (row["best_peer"], row["ratio"], row["gb_per_s"]) == ("grouped_mm", 1.5, 1000.0)
    text = small_tokens.describe({**row, "mode": "graph", "tokens": 4, "wrong": {"other": "off"}})
    assert "tilemoe 100.0" in text
    assert "grouped_mm over ours 1.50; other: off" in text
    alone = small_tokens.row_of({"grouped_mm": [1.0]}, 1)
    assert alone.keys() == {"ms"}


OF_RANKS = MoEShape(64, 32, 16, 8, 3)


def check_row() -> None:
    row = expert_parallel.measure(OF_RANKS, 2, 1, 0.001)
    assert row["ranks"] == 2
    # Nearly every token has an expert on the other process: twice T d elements out, twice back, of two bytes.
    most = 4 * 64 * 32 * 2
    assert 0.7 * most < row["bytes"] <= most
    assert row["link_ms"] == pytest.approx(row["bytes"] / 1e3)
    assert row["bound_ms"] == pytest.approx(row["compute_ms"]["median"] + row["link_ms"], rel=1e-3)
    assert row["over_bound"] == pytest.approx(row["layer_ms"]["median"] / row["bound_ms"], rel=1e-2)


def check_gate() -> None:
    """A layer whose sums come back wrong is not timed."""
    combine = AllToAllDispatcher.combine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllToAllDispatcher, "combine", lambda *args: 1.05 * combine(*args))
        with pytest.raises(AssertionError, match=r"the layer is off by 0\.0.*: not timed"):
            expert_parallel.measure(OF_RANKS, 2, 1, 0.001)


@pytest.fixture(scope="module")
def found_by_ranks(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected([check_row, check_gate]), 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["check_row", "check_gate"])
def test_two_processes(name: str, found_by_ranks: dict[str, str]) -> None:
    assert not found_by_ranks[name], found_by_ranks[name]
