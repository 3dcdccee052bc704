"""Hostile routings through the router and the torch backend in fp64, forward and backward, against plain loops.

T tokens · d hidden_size · n intermediate_size · E experts · w = 2n gated, n ungated
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fuzzing import Cases, judge_cases, seed_of
from routings import Drawn, Layer, draw_routing, layer_oracle, layers
from torch import Tensor

from tilemoe.ops.moe import moe
from tilemoe.testing import ERROR_CAPS

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned_memory")

FP64 = torch.float64
CASES = Cases(1_000_000, parts=320, short=20, each=20)  # each: of a layer, which hypothesis draws
LIMIT = ERROR_CAPS[FP64]


def assert_near(name: str, found: Tensor, expected: Tensor, limit: float = LIMIT) -> None:
    """Of numbers about 1, or as many times larger."""
    assert found.shape == expected.shape, name
    if not expected.numel():
        return
    error, most = (float(t.detach().abs().max()) for t in (found - expected, expected))
    assert error <= limit * max(1.0, most), f"{name}: off by {error:.1e}"  # NaN is off, too


def judge(layer: Layer, generator: torch.Generator) -> None:
    """One routing: experts' rows, scores, losses, output and all gradients."""
    drawn = draw_routing(layer, generator, FP64)
    assert drawn.plan.rows_per_expert.tolist() == drawn.rows
    assert_near("scores", drawn.found_dense, drawn.dense)
    cfg = layer.cfg
    shapes = {
        "x": (layer.tokens, cfg.hidden_size),
        "w1": (cfg.num_experts, cfg.up_rows, cfg.hidden_size),
        "w2": (cfg.num_experts, cfg.hidden_size, cfg.intermediate_size),
        "b1": (cfg.num_experts, cfg.up_rows),
        "b2": (cfg.num_experts, cfg.hidden_size),
    }
    given = {name: torch.randn(shape, generator=generator, dtype=FP64) for name, shape in shapes.items()}
    for name, wanted in zip(("b1", "b2"), layer.biases, strict=True):
        if not wanted:
            del given[name]
    do = torch.randn(shapes["x"], generator=generator, dtype=FP64)
    ours = {name: t.clone().requires_grad_() for name, t in given.items()}
    # Nobody reads the tokens that no expert computes.
    ours["x"] = given["x"].masked_fill(~_has_rows(drawn)[:, None], float("nan")).requires_grad_()
    theirs = {name: t.clone().requires_grad_() for name, t in given.items()}
    out = moe(plan=drawn.plan, scores=drawn.scores, recompute=layer.recompute, **ours, **layer.options)
    expected = layer_oracle(theirs, drawn.dense, layer)
    assert_near("o", out, expected)
    assert_near("loss", drawn.loss, drawn.oracle_loss.to(drawn.loss.dtype), 1e-6)
    found = torch.autograd.grad((out * do).sum() + drawn.loss, [*ours.values(), drawn.leaf], allow_unused=True)
    objective = (expected * do).sum() + drawn.oracle_loss
    exact = torch.autograd.grad(objective, [*theirs.values(), drawn.oracle_leaf], allow_unused=True)
    for name, ours_grad, theirs_grad, like in zip(
        [*ours, "routing"], found, exact, [*theirs.values(), drawn.oracle_leaf], strict=True
    ):
        assert_near(f"d{name}", _or_zero(ours_grad, like), _or_zero(theirs_grad, like))


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _has_rows(drawn: Drawn) -> Tensor:
    """(T,) whether an expert computes the token, be its score 0."""
    has = torch.zeros(drawn.plan.num_tokens, dtype=torch.bool)
    has[drawn.plan.token_of_row[: sum(drawn.rows)].long()] = True
    return has


@pytest.mark.parametrize("part", CASES.numbers)
def test_torch_backend(part: int, record_property: Callable[..., None]) -> None:
    def judge_layer(layer: Layer) -> None:
        for generator in layer.generators(CASES.each):
            judge(layer, generator)

    number = seed_of("torch", FP64, part)
    judge_cases(judge_layer, layers((1, 2, 3, 5, 7), 9, number), record_property, CASES, number)
