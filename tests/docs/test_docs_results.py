"""The tables of the README and of docs/results.md are those of the newest rows under results/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tilemoe.bench.record import newest

ROOT = Path(__file__).parents[2]
README, RESULTS = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs" / "results.md"))
LAYER = re.compile(r"^\| ([\w.-]+) \(([\d, ]+)\) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|(?: [^|]+ \|)?$", re.M)
ON_H200 = re.compile(r"^\| ([\w.-]+) \([\d, ]+\)(?: \| [^|]+){3} \| ([^|]+) \|$", re.M)
STEP = re.compile(r"^\| ([\w.-]+) \((\d+)\) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)
PARTS = ("forward", "backward")
SIZES = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


LAYERS = newest("layer", "case", mode="sustained", contestant="sonic-moe")
H100 = "NVIDIA H100 80GB HBM3"
STEPS = newest("hf_step", "case", implementation="tilemoe", gpu="NVIDIA H200")


@pytest.mark.parametrize(
    ("page", "rows"),
    [(README, newest("layer", "case", mode="alone", contestant="sonic-moe", gpu=H100)), (RESULTS, LAYERS)],
    ids=["README", "results"],
)
def test_the_layer_s_table_is_the_newest_recorded(page: str, rows: dict[str, dict[str, Any]]) -> None:
    told = {case: (shape, *numbers) for case, shape, *numbers in LAYER.findall(page) if "," in shape}
    assert told.keys() == rows.keys()
    for case, row in rows.items():
        ours = " / ".join(f"{row['baseline'][f'{part}_ms']['median']:.2f}" for part in PARTS)
        pairs = [" / ".join(f"{row[f'{part}_{kind}']:.2f}" for part in PARTS) for kind in ("ratio", "peak_ratio")]
        assert told[case] == (", ".join(str(row[size]) for size in SIZES), ours, *pairs), case
        assert row["commit"][:7] in page, case


def test_the_readme_s_last_column_is_the_newest_of_an_h200() -> None:
    rows = newest("layer", "case", mode="alone", contestant="sonic-moe", gpu="NVIDIA H200")
    told = {case: cell for case, cell in ON_H200.findall(README) if cell != "–"}
    assert told == {case: " / ".join(f"{row[f'{part}_ratio']:.2f}" for part in PARTS) for case, row in rows.items()}
    assert {row["commit"][:7] in README for row in rows.values()} == {True}


def test_the_steps_of_models_are_the_newest_recorded() -> None:
    told = {case: numbers for case, *numbers in STEP.findall(RESULTS)}
    assert told.keys() == STEPS.keys() - {"gpt-oss-20b"}  # two kinds of attention in a row
    for case, found in told.items():
        row = STEPS[case]
        ms = 1e3 * row["batch"] * row["sequence"] / row["tokens_per_s"]
        assert found == [str(row["layers"]), f"{ms:.1f}", f"{row['ratio']:.2f}", f"{row['memory_ratio']:.2f}"], case


def test_each_number_of_the_readme_is_on_the_list() -> None:
    """What its results say apart from the table: each is in a row of docs/results.md, with how to have it again."""
    prose = README.split("## Results")[1].split("## Why this one")[0]
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith("|"))
    listed = RESULTS.split("## The README's numbers")[1].split("## The layer")[0]
    numbers = set(re.findall(r"(?<![\w.])\d\.\d+(?![\w.]*\d)", prose)) - {"0.1"}
    assert len(numbers) >= 10
    assert [number for number in sorted(numbers) if number not in listed] == []
