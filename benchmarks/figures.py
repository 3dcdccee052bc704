"""Every figure of results/figures, from what is recorded; the same bytes each time with the same matplotlib.

python benchmarks/figures.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import overview
import rounding_report

from tilemoe.bench import plots, record
from tilemoe.palette import STYLES


def draw_all(folder: Path) -> Iterator[Path]:
    """Into ``folder``, each as it is drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = "tilemoe"
    yield overview.draw(record.RESULTS, folder)
    for mode in ("sustained", "burst"):
        yield plots.plot_layer(mode, None, folder)
    yield plots.plot_kernels("sustained", None, folder)
    yield rounding_report.plot(argparse.Namespace(gpu=None, kernels=rounding_report.CHOSEN, out=folder))
    yield end_to_end(folder)


def end_to_end(folder: Path) -> Path:
    """Losses of each recorded pre-training: in training a thin line, held out its marks."""
    rows = record.rows("end_to_end")
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for row, style in zip(rows, STYLES, strict=False):
        training, heldout = row["pretrain"]["training"], row["pretrain"]["heldout"]
        axis.plot(*zip(*training, strict=True), lw=0.6, color=style.colour)
        points = [(step, loss) for step, loss, *_ in heldout]
        axis.plot(*zip(*points, strict=True), label=f"{_name(row)} ({row['commit'][:7]})", **style.line)
    axis.set(xlabel="optimiser step", ylabel="loss, nats/token", ylim=(1, None))
    axis.grid(alpha=0.3)
    axis.legend(title="held out; thin lines: in training")
    tokens = sorted({row["training_tokens"] for row in rows})
    figure.suptitle(
        f"Pre-training of {rows[0]['recipe']}, {', '.join(f'{count / 1e6:.1f} M' for count in tokens)} tokens"
    )
    path = folder / "end_to_end.svg"
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _name(row: dict[str, Any]) -> str:
    """Optimiser and rate, of the command's arguments."""
    given = dict(zip(row["arguments"][::2], row["arguments"][1::2], strict=True))
    optimiser = {"muon": "Muon", "adamw": "AdamW"}[given.get("--optim.name", "adamw")]
    return f"{optimiser}, {float(given['--optim.lr']):g}"


if __name__ == "__main__":
    for drawn in draw_all(record.RESULTS / "figures"):
        print(drawn)
