"""The README's figures are those of the newest rows of results/layer.jsonl, and its bounds hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([\w.-]+) \(([\d, ]+)\) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)
PARTS = ("forward", "backward")
SIZES = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


def newest() -> dict[str, dict[str, object]]:
    """Case to sonic-moe's newest sustained row."""
    rows = map(json.loads, (ROOT / "results" / "layer.jsonl").read_text().splitlines())
    return {row["case"]: row for row in rows if (row["mode"], row["contestant"]) == ("sustained", "sonic-moe")}


def test_the_table_has_every_case() -> None:
    assert {found[0] for found in ROW.findall(README)} == newest().keys()


@pytest.mark.parametrize("found", ROW.findall(README), ids=lambda found: found[0])
def test_a_row_of_the_table_is_the_newest_recorded(found: tuple[str, ...]) -> None:
    case, shape, *told = found
    row = newest()[case]
    assert shape == ", ".join(str(row[size]) for size in SIZES)
    ours = " / ".join(f"{row['baseline'][f'{part}_ms']['median']:.2f}" for part in PARTS)  # type: ignore[index]
    pairs = [" / ".join(f"{row[f'{part}_{kind}']:.2f}" for part in PARTS) for kind in ("ratio", "peak_ratio")]
    assert told == [ours, *pairs]
    assert f"{row['commit']}"[:7] in README


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 130
