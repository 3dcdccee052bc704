"""What ScatterMoE- and grouped_mm-style layers keep, hold at once and take, against recorded layers; padding, counted.

T tokens · E experts · K experts per token · R routed rows
"""

import re
from pathlib import Path
from typing import Any

import fit_planner
import pytest

from tilemoe.bench import cases, record
from tilemoe.perf.costs import Cost
from tilemoe.perf.designs import DESIGNS, SCATTERMOE_RATES, SCATTERMOE_WAIT_MS, Design
from tilemoe.perf.hardware import GPUS
from tilemoe.shape import MoEShape

ROOT = Path(__file__).parents[2]
H200 = GPUS["H200"]
WITHIN = 0.2
PARTS = ("forward", "backward")
# Sustained rows of the designs, each case on one machine or several.
ROWS = [row for row in record.rows("layer", mode="sustained") if row["contestant"] in DESIGNS]
IDS = [f"{row['contestant']} {row['case']} {row['commit'][:7]}" for row in ROWS]
GATED, UNGATED = MoEShape(300, 64, 48, 6, 3), MoEShape(300, 64, 48, 6, 3, is_gated=False)


def style_of(row: dict[str, Any]) -> Design:
    return DESIGNS[row["contestant"]](cases.MAIN[row["case"]])


def predicted_ms(row: dict[str, Any]) -> dict[str, float]:
    """With a router, as of ours."""
    style = style_of(row)
    return {
        part: sum(step.predicted_ms(H200, "bf16") for step in steps.values())
        + fit_planner.router_ms(cases.MAIN[row["case"]], part)
        for part, steps in zip(PARTS, (style.forward, style.backward), strict=True)
    }


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_bytes_are_those_recorded(row: dict[str, Any]) -> None:
    """Kept and at both peaks, within the allocator's step."""
    style = style_of(row)
    for key in ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes"):
        assert getattr(style, key) == pytest.approx(row[key], abs=512)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_times_are_near_those_recorded(row: dict[str, Any]) -> None:
    """Fitted are four cases of one commit of ScatterMoE, and nothing of grouped_mm."""
    style, ceilings = style_of(row), H200.ceilings()
    for part, milliseconds in predicted_ms(row).items():
        assert milliseconds == pytest.approx(row[f"{part}_ms"]["median"], rel=WITHIN)
        least = sum(step.cost.roofline_ms(ceilings) for step in getattr(style, part).values())
        assert least < row[f"{part}_ms"]["median"]


def test_the_rates_are_those_that_the_fit_gives() -> None:
    products, sums, wait = fit_planner.fit_scattermoe()
    assert (products.first, products.second) == (
        pytest.approx(SCATTERMOE_RATES["products"].first, rel=1e-3),
        pytest.approx(SCATTERMOE_RATES["products"].second, rel=1e-3),
    )
    assert sums == pytest.approx(SCATTERMOE_RATES["sums"].second, rel=1e-3)
    assert wait == pytest.approx(SCATTERMOE_WAIT_MS, rel=1e-3)


def test_the_page_has_the_errors() -> None:
    """docs/planner.md: predicted over recorded, of each design and case."""
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = fit_planner.scattermoe_rows()
    assert list(cases.MAIN) == sorted(rows, key=list(cases.MAIN).index)
    (grouped,) = [row for row in ROWS if row["contestant"] == "grouped_mm"]
    for row in (*(rows[name] for name in cases.MAIN), grouped):
        shown = " / ".join(f"{ms / row[f'{part}_ms']['median']:.2f}" for part, ms in predicted_ms(row).items())
        held = "" if row is not grouped and row["case"] in fit_planner.FITTED else "not fitted"
        assert re.search(rf"^\| {row['contestant']} \| {row['case']} \| {shown} \| {held}\s*\|$", page, flags=re.M)


def test_bytes_by_hand() -> None:
    """x 2·2·4 = 16, y 32, a 24, h 48, w1 240, w2 120 bytes; 8 of score and index for each of 4 rows; x in fp32 32."""
    shape = MoEShape(2, 4, 3, 5, 2)
    scattermoe, grouped = (DESIGNS[name](shape) for name in ("scattermoe", "grouped_mm"))
    assert scattermoe.forward["up_proj"].cost == Cost(192, 16 + 240 + 32, 48)
    assert scattermoe.backward["product's gradient"].cost == Cost(0, 48 + 24 + 24, 48)
    assert scattermoe.backward["up_proj wgrad"].cost == Cost(192, 32 + 48, 2 * 240)
    assert grouped.forward["gather x"].cost == Cost(0, 16 + 32, 32)
    assert grouped.forward["combine"].cost == Cost(0, 32 + 32 + 64, 64 + 32)
    assert grouped.backward["scatter dx"].cost == Cost(0, 32 + 32 + 32, 32 + 16)
    for style in (scattermoe, grouped):
        steps = {**style.forward, **style.backward}
        assert sum(step.cost.flops for step in steps.values()) == 18 * 4 * 4 * 3
