"""Parameter groups, clipping and the named state of AdamW; learning-rate schedules against their definition."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from tilemoe.parallel.gradients import clip_gradients
from tilemoe.train.config import OptimConfig
from tilemoe.train.optim import learning_rate, make_optimizer

CONFIG = OptimConfig(lr=0.1, weight_decay=0.5)


class Toy(nn.Module):
    """One parameter of each kind that the decision on weight decay tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.linear = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.w1 = nn.Parameter(torch.randn(2, 4, 3))
        self.b1 = nn.Parameter(torch.randn(2, 4))
        self.b2 = nn.Parameter(torch.randn(2, 3))
        self.head = nn.Linear(3, 5, bias=False)


def test_only_weight_matrices_decay() -> None:
    model = Toy()
    optimizer = make_optimizer(model, CONFIG)
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = ([name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert decayed == ["w1", "linear.weight", "head.weight"]
    assert set(spared) == {"embed.weight", "linear.bias", "norm.weight", "norm.bias", "b1", "b2"}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_a_head_tied_to_the_embedding_is_not_decayed() -> None:
    model = Toy()
    model.head.weight = model.embed.weight
    groups = make_optimizer(model, CONFIG).param_groups
    assert not any(p is model.embed.weight for p in groups[0]["params"])
    assert sum(p is model.embed.weight for p in groups[1]["params"]) == 1


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2, 1, 3.0, "inf"])
def test_clipping_is_pytorch_s_in_one_process(norm_type: float, foreach: bool | None) -> None:
    models = Toy(), Toy()
    for model in models:
        for seed, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    ours, theirs = (model.parameters() for model in models)
    want = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type, True, foreach)
    assert clip_gradients(ours, 0.5, norm_type, True, foreach) == want > 0.5
    for our, their in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-6, atol=0)


def test_clipping_refuses_a_norm_that_is_none() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, float("inf")])
    with pytest.raises(RuntimeError, match="the gradients' norm of order 2 is inf"):
        clip_gradients(weight, 1.0, error_if_nonfinite=True)
    assert weight.grad[0] == 1.0
    with pytest.raises(ValueError, match="norm_type must be positive, 2 or 'inf' for example, got 0"):
        clip_gradients(weight, 1.0, norm_type=0)


BASE = OptimConfig(lr=2.0, warmup_steps=10, min_lr_ratio=0.1)
STEPS = 110


def curve(config: OptimConfig, steps: int = STEPS) -> list[float]:
    return [learning_rate(step, steps, config) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    rates = curve(replace(BASE, schedule=schedule))
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(2.0)
    assert max(rates) <= 2.0 + 1e-12


def test_cosine_passes_the_middle_and_ends_at_the_minimum() -> None:
    rates = curve(replace(BASE, schedule="cosine", warmup_steps=9))
    assert rates[9 + 50] == pytest.approx(2.0 * (0.1 + 0.9 / 2))
    assert rates[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_wsd_is_flat_and_then_falls_as_one_minus_a_square_root() -> None:
    rates = curve(replace(BASE, schedule="wsd", decay_fraction=0.2))
    assert rates[10:88] == pytest.approx([2.0] * 78)
    assert rates[88 + 11 - 1] == pytest.approx(2.0 * (0.1 + 0.9 * (1 - math.sqrt(0.5))))
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[88:]))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(1, 0, 1.0), (1, 1, 0.0), (5, 5, 1.0), (6, 5, 1.0), (3, 0, 0.1)]
)
def test_degenerate_lengths_stay_in_range(schedule: str, steps: int, warmup: int, decay: float) -> None:
    config = replace(BASE, schedule=schedule, warmup_steps=warmup, decay_fraction=decay)
    assert all(0.2 - 1e-12 <= rate <= 2.0 for rate in curve(config, steps) if warmup == 0)
    assert all(0.0 < rate <= 2.0 for rate in curve(config, steps))
