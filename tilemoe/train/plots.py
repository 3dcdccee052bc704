"""``plot.png``: the losses, the throughput, how evenly tokens fall on experts, and the routers' entropy.

Needs matplotlib (tilemoe[plot]).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilemoe.data.files import write_atomic
from tilemoe.palette import SEQUENTIAL, STYLES
from tilemoe.train.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_FILE = "plot.png"


def draw(run_dir: Path, title: str) -> Path:
    """Draw ``run_dir``'s metrics into ``plot.png`` and return its path.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(make_figure(list(read_metrics(run_dir / METRICS_FILE)), title))
    drawn = io.BytesIO()
    canvas.print_png(drawn, metadata={"Software": "tilemoe"})
    target = run_dir / PLOT_FILE
    write_atomic(target, drawn.getvalue())
    return target


def make_figure(records: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """The figure of a run's records, as `tilemoe.train.metrics` describes them."""
    from matplotlib.figure import Figure

    evals = [record for record in records if record["kind"] == "eval"]
    load = next((record["tokens_per_expert"] for record in reversed(evals) if record["tokens_per_expert"]), None)
    train = [record for record in records if record["kind"] == "train"]
    undecided = [record for record in train if record.get("router_entropy")]  # not recorded by release 0.1.0
    panels = ["loss", "throughput", *(["load"] if load else []), *(["entropy"] if undecided else [])]
    if len(panels) == 3:
        panels.insert(0, "loss")  # which has the first row to itself
    figure = Figure(figsize=(12, 8), dpi=100, layout="constrained")  # pages and chats show about 1,200 pixels
    axes: dict[str, Any] = figure.subplot_mosaic([panels[: len(panels) // 2], panels[len(panels) // 2 :]])
    _draw_losses(axes["loss"], train, evals)
    _draw_throughput(axes["throughput"], train)
    if load:
        _draw_load(figure, axes["load"], load)
    if undecided:
        _draw_entropy(axes["entropy"], undecided)
    figure.suptitle(title)
    return figure


def _label_steps(axes: Any, title: str, ylabel: str) -> None:
    """The axes of what is drawn over the steps, its numbers in full."""
    axes.set(title=title, xlabel="optimiser step", ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.grid(alpha=0.3)


def _draw_losses(axes: Any, train: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]) -> None:
    """The losses; those of a subset of the held-out text and those of all of it are no one curve."""
    for label, records, style in (
        ("training", train, {"lw": 0.8, "color": STYLES[2].colour}),
        ("held-out, subset", [r for r in evals if not r["whole_split"]], STYLES[0].line),
        ("held-out, whole split", [r for r in evals if r["whole_split"]], STYLES[3].line),
    ):
        if records:
            axes.plot([r["step"] for r in records], [r["nats_per_token"] for r in records], label=label, **style)
    _label_steps(axes, "training and held-out loss", "loss [nats/token]")
    axes.legend()


def _draw_throughput(axes: Any, train: Sequence[Mapping[str, Any]]) -> None:
    """Of all processes together, as the progress line shows it."""
    axes.plot([r["step"] for r in train], [r["tokens_per_second"] for r in train], lw=0.8, color=STYLES[0].colour)
    _label_steps(axes, "throughput of all processes", "throughput [tokens/s]")
    axes.set_ylim(0, 1.1 * max((r["tokens_per_second"] for r in train), default=1.0))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_entropy(axes: Any, train: Sequence[Mapping[str, Any]]) -> None:
    """A line per MoE layer, the first the darkest: near 1 the router is undecided, near 0 each token has one expert."""
    steps, layers = [r["step"] for r in train], list(zip(*(r["router_entropy"] for r in train), strict=True))
    for layer, values in enumerate(layers):
        axes.plot(steps, values, lw=0.8, color=str(0.8 * layer / len(layers)), label=f"MoE layer {layer}")
    _label_steps(axes, "how undecided the routers are", "router entropy / log(experts)")
    if len(layers) <= 8:
        axes.legend()


def _draw_load(figure: Any, axes: Any, tokens_per_expert: Sequence[Sequence[int]]) -> None:
    """A heat map, MoE layers x experts, of each expert's share over the layer's mean: 1 is perfect balance."""
    share = [[len(layer) * count / max(sum(layer), 1) for count in layer] for layer in tokens_per_expert]
    image = axes.imshow(share, aspect="auto", cmap=SEQUENTIAL, vmin=0.0, vmax=2.0, interpolation="nearest")
    axes.set(xlabel="expert", ylabel="MoE layer", title="held-out tokens per expert / mean")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, extend="max")
