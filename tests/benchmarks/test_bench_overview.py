"""The README's figure has each peer's newest row, and is the one in the tree."""

import json
from pathlib import Path
from typing import Any

import overview
import pytest

from tilemoe.bench import record

SIZES = {"num_tokens": 8, "hidden_size": 4, "intermediate_size": 2, "num_experts_per_tok": 2}


def side(forward: float, backward: float, peak: int) -> dict[str, Any]:
    times = {"forward_ms": {"median": forward}, "backward_ms": {"median": backward}}
    return {**times, "forward_peak_bytes": peak, "backward_peak_bytes": peak - 1}


def layer(case: str, peer: str, forward: float, mode: str = "sustained", tokens: int = 8) -> dict[str, Any]:
    given = {"case": case, "contestant": peer, "mode": mode, "commit": "0123456789", "baseline": side(1.0, 2.0, 4)}
    given["gpu"] = overview.GPU
    return {**SIZES, "num_tokens": tokens, **given, **side(forward, 3.0, 5)}


def test_there_is_a_bar_for_each_newest_row(tmp_path: Path) -> None:
    layers = [layer("large", "sonic-moe", 3.0, tokens=16), layer("small", "grouped_mm", 1.0)]
    layers += [
        layer("small", "sonic-moe", 9.0),
        layer("small", "sonic-moe", 1.5),
        layer("small", "sonic-moe", 9.0, "burst"),
        {**layer("small", "sonic-moe", 9.0), "gpu": "another"},
    ]
    step = {"case": "model", "attention": "sdpa", "ratio": 1.2, "memory_ratio": 0.8, "commit": "abcdefabcd"}
    steps = [{**step, "gpu": overview.GPU, "implementation": name} for name in ("tilemoe", "grouped_mm")]
    steps.append({**steps[0], "ratio": 9.0, "gpu": "another"})
    for name, found in (("layer", layers), ("hf_step", steps)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)) + "\n")
    assert overview.newest_bars(tmp_path) == [
        overview.Bar(0, "small", "sonic-moe", pytest.approx(1.5), 1.25, "0123456"),
        overview.Bar(0, "small", "grouped_mm", pytest.approx(4 / 3), 1.25, "0123456"),
        overview.Bar(0, "large", "sonic-moe", pytest.approx(2.0), 1.25, "0123456"),
        overview.Bar(1, "model", "grouped_mm", 1.2, 1.25, "abcdefa"),
    ]
    assert overview.draw(tmp_path, tmp_path).read_text().count("<svg") == 1


def test_the_figure_in_the_tree_is_of_the_newest_rows() -> None:
    drawn = (record.RESULTS / "figures" / "overview.svg").read_text(encoding="utf-8")
    values = [f"{value:.2f}" for bar in overview.newest_bars(record.RESULTS) for value in (bar.time, bar.memory)]
    assert sorted(values) == sorted(value for value in drawn_texts(drawn) if value in values)


def drawn_texts(svg: str) -> list[str]:
    """matplotlib notes each text that it draws as paths in a comment."""
    return [line.strip()[5:-4] for line in svg.splitlines() if line.strip().startswith("<!-- ")]
