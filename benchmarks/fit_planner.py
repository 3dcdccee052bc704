"""The constants of `tilemoe.perf.predict`, by least squares of the relative error over some of the recorded kernels.

    python benchmarks/fit_planner.py

prints them; tests/perf/test_perf_predict.py holds the module to them, and its predictions to what is not fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tilemoe.bench import cases, record
from tilemoe.perf.hardware import GPUS
from tilemoe.perf.predict import KINDS, LAUNCH_MS, LAUNCHES, Rate, amounts

# Narrow and wide experts, few and many, small and large d. The other cases are for the test.
FITTED = ("7B-n256", "Qwen3-Next", "Qwen3-235B", "30B-n256")
FITTED_IN_FP8 = ("Qwen3-Next", "Qwen3-235B", "30B-n256")
Point = tuple[float, float, float]  # two amounts, and the milliseconds beyond the launch


def solve(points: Iterable[Point]) -> tuple[float, float]:
    """The (p, q) >= 0 that minimise the sum of ``((u p + v q) / t - 1)^2`` over points (u, v, t): normal equations."""
    uu = uv = vv = u1 = v1 = 0.0
    for u, v, t in points:
        uu, uv, vv, u1, v1 = uu + u * u / t / t, uv + u * v / t / t, vv + v * v / t / t, u1 + u / t, v1 + v / t
    determinant = uu * vv - uv * uv
    if uu == 0 or (u1 * vv - v1 * uv) < 0:
        return 0.0, v1 / vv
    if (v1 * uu - u1 * uv) < 0:
        return u1 / uu, 0.0
    return (u1 * vv - v1 * uv) / determinant, (v1 * uu - u1 * uv) / determinant


def fit() -> dict[str, Rate]:
    """Kind to rate, from the newest sustained rows."""
    times = {
        key: row["ms"]["median"] for key, row in record.latest("kernels", "sustained", None, "case", "kernel").items()
    }
    found = {kind: _rate(steps, "bf16", times, "{}", FITTED) for kind, steps in KINDS.items()}
    fp8 = {
        key: row["ms"]["median"] for key, row in record.latest("fp8_rates", "sustained", None, "case", "step").items()
    }
    kinds = ("gather_act", "rows", "dgrad_dact")
    return found | {f"fp8 {kind}": _rate(KINDS[kind], "fp8", fp8, "{} fp8", FITTED_IN_FP8) for kind in kinds}


def _rate(
    steps: Iterable[str], dtype: str, times: Mapping[tuple[Any, ...], float], label: str, names: Iterable[str]
) -> Rate:
    points = []
    for name in names:
        for step in steps:
            milliseconds = times[name, label.format(step)] - LAUNCH_MS * LAUNCHES.get(step, 1)
            points.append((*amounts(step, cases.MAIN[name], GPUS["H200"], dtype), milliseconds))
    return Rate(*(1 / cost if cost else math.inf for cost in solve(points)))


if __name__ == "__main__":
    for kind, rate in fit().items():
        print(f'        "{kind}": Rate({rate.first:.4g}, {rate.second:.4g}),')
