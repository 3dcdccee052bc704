"""Every figure of the tree is drawn by one script, and is of the newest rows."""

from pathlib import Path
from typing import Any

import figures
import pytest

from tilemoe.bench import record

SIZES = {"hidden_size": 4, "intermediate_size": 2, "num_experts_per_tok": 2}


def drawn_texts(path: Path) -> list[str]:
    """matplotlib notes each text that it draws as paths in a comment."""
    lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    return sorted(line[5:-4] for line in lines if line.startswith("<!-- "))


def test_the_figures_in_the_tree_are_those_that_are_drawn(tmp_path: Path) -> None:
    """By the texts in them: numbers, commits, names."""
    kept = record.RESULTS / "figures"
    drawn = {path.name: drawn_texts(path) for path in figures.draw_all(tmp_path)}
    assert drawn == {path.name: drawn_texts(path) for path in kept.iterdir()}
    assert min(map(len, drawn.values())) > 10
    names = {f"{figures.curve_name(row)} ({row['commit'][:7]})" for row in record.rows("end_to_end")}
    assert len(names) == len(record.rows("end_to_end"))
    assert names <= set(drawn["end_to_end.svg"])
    values = {f"{value:.2f}" for bar in figures.newest_bars() for value in (bar.time, bar.memory)}
    assert values <= set(drawn["overview.svg"])


def side(forward: float, backward: float, peak: int) -> dict[str, Any]:
    times = {"forward_ms": {"median": forward}, "backward_ms": {"median": backward}}
    return {**times, "forward_peak_bytes": peak, "backward_peak_bytes": peak - 1}


def layer(case: str, peer: str, forward: float, mode: str = "sustained", tokens: int = 8) -> Any:
    given = {"case": case, "contestant": peer, "mode": mode, "num_tokens": tokens, "baseline": side(1.0, 2.0, 4)}
    return {**SIZES, **given, **side(forward, 3.0, 5)}


def test_there_is_a_bar_for_each_newest_row(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "provenance", lambda: {"commit": "0123456789ab", "gpu": figures.GPU})
    layers = [layer("large", "sonic-moe", 3.0, tokens=16), layer("small", "grouped_mm", 1.0)]
    layers += [layer("small", "sonic-moe", 9.0), layer("small", "sonic-moe", 1.5)]
    record.append("layer", [*layers, layer("small", "sonic-moe", 9.0, "burst")])
    step = {"case": "model", "attention": "sdpa", "ratio": 1.2, "memory_ratio": 0.8}
    record.append("hf_step", [{**step, "implementation": name} for name in ("tilemoe", "grouped_mm")])
    monkeypatch.setattr(record, "provenance", lambda: {"commit": "another", "gpu": "another"})
    record.append("layer", [layer("small", "sonic-moe", 9.0)])
    record.append("hf_step", [{**step, "implementation": "tilemoe", "ratio": 9.0}])
    assert figures.newest_bars() == [
        figures.Bar(0, "small", "sonic-moe", pytest.approx(1.5), 1.25, "0123456"),
        figures.Bar(0, "small", "grouped_mm", pytest.approx(4 / 3), 1.25, "0123456"),
        figures.Bar(0, "large", "sonic-moe", pytest.approx(2.0), 1.25, "0123456"),
        figures.Bar(1, "model", "grouped_mm", 1.2, 1.25, "0123456"),
    ]
