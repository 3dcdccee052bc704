"""Figures from the recorded results: the whole layer against its peers, and each kernel against its roofline.

`tilemoe report` draws them. Needs matplotlib (tilemoe[plot]).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from tilemoe.bench import record
from tilemoe.bench.summary import in_order
from tilemoe.palette import SEQUENTIAL, spread


def plot_layer(mode: str, gpu: str | None, folder: Path, suffix: str = ".svg") -> Path:
    """Times of the others over ours, forward and backward, one group of bars for each case."""
    rows = record.latest("layer", mode, gpu, "case", "contestant")
    rows = {key: row for key, row in rows.items() if "baseline" in row}
    names = list(dict.fromkeys(row["case"] for row in in_order(rows.values())))
    contestants = list(dict.fromkeys(contestant for _, contestant in rows))
    figure, axes = plt.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    width = 0.8 / max(1, len(contestants))
    for axis, part in zip(axes, ("forward", "backward"), strict=True):
        for index, (contestant, style) in enumerate(zip(contestants, spread(len(contestants)), strict=True)):
            present = [
                (place, rows[case, contestant]) for place, case in enumerate(names) if (case, contestant) in rows
            ]
            places = [place + index * width for place, _ in present]
            bars = axis.bar(places, [row[f"{part}_ratio"] for _, row in present], width, label=contestant, **style.bar)
            axis.bar_label(bars, fmt="%.2f")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(f"{part}: time over ours")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(contestants))
    axes[1].set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names)
    return save(
        figure, rows, f"Layer with its router, {mode}: above 1 tilemoe is faster", folder / f"layer-{mode}{suffix}"
    )


def plot_kernels(mode: str, gpu: str | None, folder: Path, suffix: str = ".svg") -> Path:
    """Percent of its roofline for each kernel and case."""
    rows = record.latest("kernels", mode, gpu, "case", "kernel")
    rows = {key: row for key, row in rows.items() if row["of_roofline"] is not None}
    names = list(dict.fromkeys(row["case"] for row in in_order(rows.values())))
    kernels = list(dict.fromkeys(kernel for _, kernel in rows))

    def share(case: str, kernel: str) -> float:
        return 100 * rows[case, kernel]["of_roofline"] if (case, kernel) in rows else float("nan")

    grid = [[share(case, kernel) for kernel in kernels] for case in names]
    figure, axis = plt.subplots(figsize=(11, 1 + 0.6 * len(names)), layout="constrained")
    axis.imshow(grid, cmap=SEQUENTIAL, vmin=0, vmax=100, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            text, colour = "" if math.isnan(value) else f"{value:.0f}%", "white" if value < 50 else "black"
            axis.text(x, y, text, ha="center", va="center", color=colour)
    axis.set_xticks(range(len(kernels)), kernels, rotation=20)
    axis.set_yticks(range(len(names)), names)
    return save(figure, rows, f"Share of the roofline, {mode}", folder / f"kernels-{mode}{suffix}")


def save(figure: Any, rows: dict[tuple[Any, ...], dict[str, Any]], title: str, path: Path) -> Path:
    gpus = ", ".join(sorted({str(row["gpu"]) for row in rows.values()}))
    commits = ", ".join(sorted({str(row["commit"]) for row in rows.values()}))
    figure.suptitle(f"{title}\n{gpus} · {commits}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path
