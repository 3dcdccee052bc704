"""The README's figure: time and peak memory of each peer over ours, of the layer and of steps of transformers' models.

benchmarks/figures.py draws it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from tilemoe.palette import spread

STYLES = MappingProxyType(dict(zip(("sonic-moe", "scattermoe", "grouped_mm"), spread(3), strict=True)))
GPU = "NVIDIA H200"
TITLES = ("one layer, forward and backward", "a training step of transformers' models")

Row = dict[str, Any]


class Bar(NamedTuple):
    """A peer's time and peak memory over ours, in a group of bars of one of the figure's columns."""

    column: int
    group: str
    peer: str
    time: float
    memory: float
    commit: str


def draw(results: Path, folder: Path) -> Path:
    """Draw overview.svg into ``folder``, of the rows in ``results``."""
    bars = newest_bars(results)
    figure, axes = plt.subplots(2, 2, figsize=(13, 5.6), sharex="col", sharey="row", layout="constrained")
    for column, title in enumerate(TITLES):
        groups = list(dict.fromkeys(bar.group for bar in bars if bar.column == column))
        for place, group in enumerate(groups):
            here = [bar for bar in bars if (bar.column, bar.group) == (column, group)]
            for index, bar in enumerate(here):
                at = place + 0.28 * (index - (len(here) - 1) / 2)
                for axis, value in zip(axes[:, column], (bar.time, bar.memory), strict=True):
                    axis.bar_label(axis.bar(at, value, 0.26, **STYLES[bar.peer].bar), fmt="%.2f", fontsize=7)
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xticks(range(len(groups)), groups, rotation=25, ha="right", fontsize=8)
    for axis in axes.flat:
        axis.axhline(1.0, color="black", linewidth=0.8)
    axes[0, 0].set_ylabel("time over tilemoe's")
    axes[1, 0].set_ylabel("peak memory over tilemoe's")
    handles = [plt.Rectangle((0, 0), 1, 1, **style.bar) for style in STYLES.values()]
    figure.legend(handles, list(STYLES), loc="outside lower center", ncols=len(STYLES))
    commits = ", ".join(sorted({bar.commit for bar in bars}))
    figure.suptitle(f"Above 1 tilemoe is faster, or smaller · one {GPU.removeprefix('NVIDIA ')} · {commits}")
    path = folder / "overview.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def newest_bars(results: Path) -> list[Bar]:
    """On `GPU`, of the newest sustained row of each layer and peer, by the layers' FLOPs, and of each model's step."""
    layers: dict[tuple[str, str], Row] = {}
    for row in rows(results / "layer.jsonl"):
        if row["mode"] == "sustained" and row["contestant"] in STYLES:
            layers[row["case"], row["contestant"]] = row
    places = {name: place for place, name in enumerate(STYLES)}
    ordered = sorted(layers.values(), key=lambda row: (flops(row), row["case"], places[row["contestant"]]))
    bars = [Bar(0, row["case"], row["contestant"], *over_ours(row), row["commit"][:7]) for row in ordered]
    steps = {
        (row["case"], row["attention"]): row
        for row in rows(results / "hf_step.jsonl")
        if row["implementation"] == "tilemoe"
    }
    for (case, attention), row in steps.items():
        group = f"{case}\n({attention})" if sum(other == case for other, _ in steps) > 1 else case
        bars.append(Bar(1, group, "grouped_mm", row["ratio"], 1 / row["memory_ratio"], row["commit"][:7]))
    return bars


def rows(path: Path) -> list[Row]:
    """Those measured on `GPU`."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in found if row["gpu"] == GPU]


def flops(row: Row) -> int:
    """Of a layer, up to a factor."""
    return row["num_tokens"] * row["hidden_size"] * row["intermediate_size"] * row["num_experts_per_tok"]


def over_ours(row: Row) -> tuple[float, float]:
    """A peer's forward and backward together, and its peak, over ours of the same rounds."""
    ours = row["baseline"]
    time = [side["forward_ms"]["median"] + side["backward_ms"]["median"] for side in (row, ours)]
    peak = [max(side["forward_peak_bytes"], side["backward_peak_bytes"]) for side in (row, ours)]
    return time[0] / time[1], peak[0] / peak[1]
