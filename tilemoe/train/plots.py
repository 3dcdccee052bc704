"""``plot.png``: the loss curves, and how evenly the tokens fall on the experts. Needs matplotlib (tilemoe[plot])."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilemoe.train.metrics import METRICS_FILE, read_metrics

PLOT_FILE = "plot.png"


def draw(run_dir: Path, title: str) -> Path:
    """Draw ``run_dir``'s metrics into ``plot.png`` and return its path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = list(read_metrics(run_dir / METRICS_FILE))
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    load = next((record["tokens_per_expert"] for record in reversed(evals) if record["tokens_per_expert"]), None)

    figure = Figure(figsize=(11.0 if load else 6.5, 4.2), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if load else 1, squeeze=False)[0]
    left = axes[0]
    left.plot(
        [r["step"] for r in train], [r["nats_per_token"] for r in train], lw=0.8, color="tab:blue", label="training"
    )
    held_out = [r["step"] for r in evals], [r["nats_per_token"] for r in evals]
    left.plot(*held_out, "o-", color="tab:orange", label="held-out")
    left.set(xlabel="optimiser step", ylabel="loss [nats/token]")
    left.grid(alpha=0.3)
    left.legend()
    if load:
        _draw_load(figure, axes[1], load)
    figure.suptitle(title)
    target = run_dir / PLOT_FILE
    canvas.print_png(str(target))
    return target


def _draw_load(figure: Any, axes: Any, tokens_per_expert: Sequence[Sequence[int]]) -> None:
    """A heat map, MoE layers x experts, of each expert's share over the layer's mean: 1 is perfect balance."""
    share = [[len(layer) * count / max(sum(layer), 1) for count in layer] for layer in tokens_per_expert]
    image = axes.imshow(share, aspect="auto", cmap="coolwarm", vmin=0.0, vmax=2.0, interpolation="nearest")
    axes.set(xlabel="expert", ylabel="MoE layer", title="held-out tokens per expert / mean")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, extend="max")
