"""Learning-rate schedules against their definition."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from tilemoe.train.config import OptimConfig
from tilemoe.train.optim import learning_rate

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


def test_constant_stays() -> None:
    assert curve(replace(BASE, schedule="constant"))[10:] == [2.0] * 100


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(
    ("steps", "warmup", "decay"), [(1, 0, 1.0), (1, 1, 0.0), (5, 5, 1.0), (6, 5, 1.0), (3, 0, 0.1)]
)
def test_degenerate_lengths_stay_in_range(schedule: str, steps: int, warmup: int, decay: float) -> None:
    config = replace(BASE, schedule=schedule, warmup_steps=warmup, decay_fraction=decay)
    assert all(0.2 - 1e-12 <= rate <= 2.0 for rate in curve(config, steps) if warmup == 0)
    assert all(0.0 < rate <= 2.0 for rate in curve(config, steps))


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_run_shorter_than_its_warm_up_ends_within_it(schedule: str) -> None:
    assert curve(replace(BASE, schedule=schedule), steps=3) == pytest.approx([0.2, 0.4, 0.6])
