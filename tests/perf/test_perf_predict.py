"""Predicted times against recorded ones, fitted and not; padding against enumeration."""

import itertools
import math
from typing import Any

import fit_planner
import pytest

from tilemoe.bench import cases, record
from tilemoe.perf.costs import padded_rows, padding_waste
from tilemoe.perf.hardware import GPUS, Gpu
from tilemoe.perf.predict import (
    LAYER_BACKWARD,
    LAYER_FORWARD,
    RATES,
    costs,
    layer_ms,
    operand_dtype,
    step_ms,
)
from tilemoe.shape import MoEShape

H200 = GPUS["H200"]
WITHIN = 0.2
STEPS = (LAYER_FORWARD, LAYER_BACKWARD)


def shape_of(row: dict[str, Any]) -> MoEShape:
    sizes = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")
    return MoEShape(*(row[size] for size in sizes))


LAYER = record.newest("layer", "case", mode="sustained", contestant="tilemoe", gpu="NVIDIA H200")
# In either mode: "alone", where a slow host, which is not predicted, would bound the small cases.
FP8 = record.newest("fp8_layer", "case", contestant="tilemoe[hopper_fp8]", gpu="NVIDIA H200")
TOP_K = record.newest("token_rounding", "case", mode="sustained", contestant="top-K", kernel_set="hopper")
# Sizes of other tokens, widths and expert counts, none of which is fitted.
OTHERS = {name: row for name, row in TOP_K.items() if shape_of(row) not in cases.MAIN.values()}


def test_the_rates_are_those_that_the_fit_gives() -> None:
    found = fit_planner.fit()
    assert list(found) == list(RATES)
    for kind, rate in found.items():
        assert (rate.first, rate.second) == (
            pytest.approx(RATES[kind].first, rel=1e-3),
            pytest.approx(RATES[kind].second, rel=1e-3),
        )


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        *(pytest.param(LAYER[name], "bf16", id=name) for name in cases.MAIN),
        *(pytest.param(FP8[name], "fp8", id=f"{name}, FP8") for name in cases.MAIN),
        *(pytest.param(row, "bf16", id=name) for name, row in OTHERS.items()),
    ],
)
def test_a_layer_s_time_is_near_the_recorded_one(row: dict[str, Any], dtype: str) -> None:
    forward, backward = layer_ms(shape_of(row), H200, dtype)
    assert forward == pytest.approx(row["forward_ms"]["median"], rel=WITHIN)
    assert backward == pytest.approx(row["backward_ms"]["median"], rel=WITHIN)


def test_wide_weight_gradients_in_fp8_are_near_the_recorded_ones() -> None:
    recorded = fit_planner.fp8_wgrads()
    assert len(recorded) == 11
    assert ("OLMoE", "down_proj_wgrad") not in recorded  # 2048 x 1024
    for (_, step), (shape, milliseconds) in recorded.items():
        assert operand_dtype(step, shape, "fp8") == "fp8"
        assert step_ms(step, shape, H200, "fp8") == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_a_prediction_is_never_below_the_roofline_and_grows(gpu: Gpu) -> None:
    for experts, k in ((8, 8), (64, 8), (8192, 2)):
        shapes = [MoEShape(tokens, 8192, 1024, experts, k) for tokens in (1, 64, 4096, 262144)]
        times = [sum(layer_ms(shape, gpu)) for shape in shapes]
        assert times == sorted(times)
        for shape in shapes:
            for step, cost in costs(shape, "bf16").items():
                assert step_ms(step, shape, gpu) > cost.roofline_ms(gpu.ceilings())


def test_expected_units_enumerated() -> None:
    """Every subset of K of E experts for each of T tokens, all alike."""
    tokens, experts, k, unit = 3, 4, 2, 2
    choices = list(itertools.product(itertools.combinations(range(experts), k), repeat=tokens))
    padded = sum(
        unit * math.ceil(sum(expert in chosen for chosen in each) / unit)
        for each in choices
        for expert in range(experts)
    )
    shape = MoEShape(tokens, 8, 8, experts, k)
    assert padded_rows(shape, unit) == pytest.approx(padded / len(choices), rel=1e-12)
    assert padding_waste(shape, unit) == pytest.approx(padded / len(choices) / (tokens * k) - 1)
