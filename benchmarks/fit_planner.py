"""The constants of `tilemoe.perf.predict`, by least squares of the relative error over some of the recorded kernels,
and those of `tilemoe.perf.designs`, over some of ScatterMoE's recorded layers.

    python benchmarks/fit_planner.py

prints them; tests/perf holds the modules to them, and their predictions to what is not fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from tilemoe.bench import cases, record
from tilemoe.perf.costs import is_in_fp8
from tilemoe.perf.designs import SCATTERMOE_RATES, scattermoe
from tilemoe.perf.hardware import GPUS
from tilemoe.perf.predict import KINDS, LAUNCH_MS, LAUNCHES, LAYER_BACKWARD, LAYER_FORWARD, Rate, amounts, step_ms
from tilemoe.shape import MoEShape

# Narrow and wide experts, few and many, small and large d. The other cases are for the test.
FITTED = ("7B-n256", "Qwen3-Next", "Qwen3-235B", "30B-n256")
FITTED_IN_FP8 = ("Qwen3-Next", "Qwen3-235B", "30B-n256")
FITTED_WGRADS = ("Qwen3-235B", "DeepSeek-V3, 32 experts", "d 4096, n 1024")  # in FP8
SCATTERMOE_COMMIT = "8c0611873664"  # whose rows are of all seven cases on one machine
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
    times = recorded_ms("kernels", "kernel")
    found = {
        kind: _rate("bf16", ((step, cases.MAIN[name], times[name, step]) for name in FITTED for step in steps))
        for kind, steps in KINDS.items()
    }
    fp8 = recorded_ms("fp8_rates", "step")
    for kind in ("gather_act", "rows", "dgrad_dact"):
        of_kind = ((step, cases.MAIN[name], fp8[name, f"{step} fp8"]) for name in FITTED_IN_FP8 for step in KINDS[kind])
        found[f"fp8 {kind}"] = _rate("fp8", of_kind)
    wgrads = ((step, *timed) for (name, step), timed in fp8_wgrads().items() if name in FITTED_WGRADS)
    return found | {"fp8 wgrad": _rate("fp8", wgrads)}


def recorded_ms(name: str, step: str) -> dict[tuple[str, str], float]:
    """(case, value of ``step``) to the newest sustained milliseconds in results/<name>.jsonl."""
    rows = record.newest(name, "case", step, mode="sustained")
    return {key: row["ms"]["median"] for key, row in rows.items()}


def fp8_wgrads() -> dict[tuple[str, str], tuple[MoEShape, float]]:
    """(case, step) to shape and milliseconds, with quantising, of the weight gradients that are in FP8."""
    found = {}
    for row in record.rows("kernel_variants"):
        if row["what"] == "FP8 weight gradients" and "H200" in row["gpu"]:
            shape = MoEShape(**{field.name: row[field.name] for field in fields(MoEShape)})
            for step, name in (("down_proj_wgrad", "B2 fp8"), ("up_proj_wgrad", "B4 fp8")):  # as the rows name them
                if is_in_fp8(step, shape):
                    found[row["case"], step] = shape, row["ms"][name]
    return found


def _rate(dtype: str, times: Iterable[tuple[str, MoEShape, float]]) -> Rate:
    """Of steps, shapes and milliseconds."""
    points = [
        (*amounts(step, shape, GPUS["H200"], dtype), milliseconds - LAUNCH_MS * LAUNCHES.get(step, 1))
        for step, shape, milliseconds in times
    ]
    return Rate(*(1 / cost if cost else math.inf for cost in solve(points)))


def fit_scattermoe() -> tuple[Rate, float, float]:
    """Its products' rate, TB/s of its sums, and the milliseconds that its forward waits for the host.

    From sustained layers, of which passes at the rate of ours and the router's steps as of ours are taken off.
    """
    products, sums = SCATTERMOE_RATES["products"], SCATTERMOE_RATES["sums"]
    equations, known = [], []
    for name, row in scattermoe_rows().items():
        if name not in FITTED:
            continue
        style = scattermoe(cases.MAIN[name])
        for part, steps in (("forward", style.forward), ("backward", style.backward)):
            fitted = [step for step in steps.values() if step.rate in (products, sums)]
            of_products = [step for step in fitted if step.rate == products]
            amount = (
                sum(step.flops or 0.0 for step in of_products) / 1e9,
                sum(step.cost.bytes for step in of_products) / 1e9,
                sum(step.cost.bytes for step in fitted if step.rate == sums) / 1e9,
                1.0 if part == "forward" else 0.0,
            )
            passes = [replace(step, wait_ms=0.0) for step in steps.values() if step not in fitted]
            rest = sum(step.predicted_ms(GPUS["H200"], "bf16") for step in passes) + LAUNCH_MS * len(fitted)
            time = row[f"{part}_ms"]["median"]
            equations.append([value / time for value in amount])
            known.append(1 - (rest + router_ms(cases.MAIN[name], part)) / time)
    flops, moved, summed, wait = np.linalg.lstsq(np.array(equations), np.array(known))[0]
    return Rate(1 / flops, 1 / moved), 1 / summed, wait


def scattermoe_rows() -> dict[str, dict[str, Any]]:
    """Case to its sustained row."""
    return record.newest("layer", "case", contestant="scattermoe", mode="sustained", commit=SCATTERMOE_COMMIT)


def router_ms(shape: MoEShape, part: str) -> float:
    """Predicted milliseconds of our router's forward or backward."""
    steps = LAYER_FORWARD if part == "forward" else LAYER_BACKWARD
    return sum(step_ms(step, shape, GPUS["H200"]) for step in steps if step.startswith(("logits", "route")))


if __name__ == "__main__":
    for kind, rate in fit().items():
        print(f'        "{kind}": Rate({rate.first:.4g}, {rate.second:.4g}),')
    products, sums, wait = fit_scattermoe()
    print(
        f"scattermoe: products Rate({products.first:.4g}, {products.second:.4g}), sums {sums:.4g}, wait {wait:.4g} ms"
    )
