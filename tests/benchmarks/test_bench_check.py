"""What `tilemoe bench` lets through to its stopwatch and what it stops."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilemoe.bench import check, peers
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
    run = peers.routed(peers.grouped_mm_experts, weights, SHAPE.num_experts_per_tok)
    return replace(ours(weights), name="grouped_mm", run=run)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("build", [ours, plain])
def test_correct_contestants_pass(build: Callable[[peers.Weights], peers.Contestant], weights: peers.Weights) -> None:
    before = [weight.detach().clone() for weight in (weights.router, weights.w1, weights.w2)]
    assert check.problem(build(weights), SHAPE, weights) is None
    assert_equal((weights.router, weights.w1, weights.w2), before)


def test_a_contestant_with_permuted_rows_passes_by_its_own_order(weights: peers.Weights) -> None:
    w1 = torch.nn.Parameter(peers.interleaved(weights.w1.detach()))

    def run(x: Tensor) -> Tensor:
        ordered = replace(weights, w1=peers.concatenated(w1))
        return peers.routed(peers.grouped_mm_experts, ordered, SHAPE.num_experts_per_tok)(x)

    contestant = replace(ours(weights), run=run, leaves=(weights.router, w1, weights.w2))
    assert "dw1" in str(check.problem(contestant, SHAPE, weights))
    assert check.problem(replace(contestant, w1_rows=peers.concatenated), SHAPE, weights) is None


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
    found = check.problem(replace(right, run=lambda x: spoil(right.run(x))), SHAPE, weights)
    assert found.startswith(what)


def test_build_names_the_peers_and_says_what_is_missing() -> None:
    weights = peers.make_weights(SHAPE, CPU, torch.float32)
    with pytest.raises(ValueError, match="sonic-moe"):
        peers.build("sonic", SHAPE, weights)
    named = peers.build("tilemoe[torch]", SHAPE, weights)
    assert isinstance(named, peers.Contestant)
    assert named.name == "tilemoe[torch]"
    assert peers.build("scattermoe", SHAPE, weights) == "it needs a GPU"
