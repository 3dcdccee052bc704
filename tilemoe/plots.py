"""Every figure that the package draws, and their common style. Needs matplotlib (tilemoe[plot]), which is imported
only to draw.

Colours go from dark to light, so that they also differ in greyscale; each has its own marker, dash pattern and hatch.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches: a figure fills a column of the site at 96 pixels per inch
SEQUENTIAL = "cividis"  # the colour map for values: lightness grows with the value
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Style:
    """How one of several series is drawn, as keyword arguments for matplotlib."""

    colour: str
    marker: str
    dashes: Any  # matplotlib's linestyle
    hatch: str

    @property
    def bar(self) -> dict[str, Any]:
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": "black", "linewidth": 0.5}

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes}


STYLES = (
    Style("#1b3a6b", "o", "-", ""),
    Style("#a3263a", "s", "--", "\\\\"),
    Style("#2f7fb0", "v", "-.", "xx"),
    Style("#e08214", "D", ":", "//"),
    Style("#a6bddb", "^", (0, (5, 1)), "--"),
    Style("#d9d9d9", "P", (0, (3, 1, 1, 1)), ".."),
)
LABEL_MARGIN = 0.15  # share of an axis above the highest bar, so that its label stays inside the frame
_WHERE = MappingProxyType({"gpu": None, "commit": 7})  # number of characters shown; None: all
_LONGEST_TITLE, _MOST_LAYERS = 120, 1000  # characters and lines drawn of what a run's folder says
_PLAN_COLOURS = MappingProxyType({"forward": STYLES[4].colour, "backward": STYLES[2].colour})  # rooflines are black
_PLAN_SIZES = MappingProxyType(
    {
        "num_tokens": "tokens",
        "hidden_size": "hidden size",
        "intermediate_size": "expert width",
        "num_experts": "experts",
        "num_experts_per_tok": "experts per token",
    }
)


# ------------------------------------------------------------------------------------------- what figures share


def spread(count: int) -> tuple[Style, ...]:
    """``count`` of the `STYLES`, spread over their range of lightness; for 1 the darkest.

    ValueError: ``count`` is negative or above the number of styles.
    """
    if not 0 <= count <= len(STYLES):
        raise ValueError(f"count must be from 0 to {len(STYLES)}, got {count}; draw fewer series in a figure")
    gaps = max(1, count - 1)
    return tuple(STYLES[(index * (len(STYLES) - 1) + gaps // 2) // gaps] for index in range(count))


def save(figure: Figure, path: Path) -> Path:
    """Write the figure in the format of ``path``'s suffix, without a date; returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def png(figure: Figure) -> bytes:
    """The content of a .png file whose metadata names this package."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": "tilemoe"})
    return drawn.getvalue()


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


# ------------------------------------------------------------------------------------------- tilemoe train: plot.png


def run_figure(records: Sequence[Row], title: str) -> Figure:
    """A run's losses, throughput, balance of tokens over experts and over the processes that share them, and the
    routers' entropy.

    ``records``: the run's records, see `tilemoe.train.metrics`.
    """
    from matplotlib.figure import Figure

    evals = [record for record in records if record["kind"] == "eval"]
    load = next((record["tokens_per_expert"] for record in reversed(evals) if record["tokens_per_expert"]), None)
    train = [record for record in records if record["kind"] == "train"]
    undecided = [record for record in train if record.get("router_entropy")]  # release 0.1.0 did not record it
    shared = [record for record in train if record.get("rank_load")]
    if all(load == 1 for record in shared for load in record["rank_load"]):
        shared = []
    drawn = {"load": load, "ranks": shared, "entropy": undecided}
    panels = ["loss", "throughput", *(name for name, values in drawn.items() if values)]
    figure = Figure(figsize=(12, 8), dpi=100, layout="constrained")  # pages and chats show about 1,200 pixels
    rows = (panels[: len(panels) // 2], panels[len(panels) // 2 :])
    axes: dict[str, Any] = figure.subplot_mosaic([[name for name in row for _ in range(6 // len(row))] for row in rows])
    _draw_losses(axes["loss"], train, evals)
    _draw_throughput(axes["throughput"], train)
    if load:
        _draw_load(figure, axes["load"], load)
    if shared:
        _draw_layers(axes["ranks"], shared, "rank_load", "load of the processes", "rows of the busiest / mean")
    if undecided:  # near 1 a router is undecided, near 0 each token has one expert
        ylabel = "router entropy / log(experts)"
        _draw_layers(axes["entropy"], undecided, "router_entropy", "how undecided the routers are", ylabel)
    figure.suptitle(title[:_LONGEST_TITLE], parse_math=False)  # a recipe's name, which anybody may have written
    return figure


def _label_steps(axes: Any, title: str, ylabel: str) -> None:
    """Label axes that show a value over the steps, with numbers in full."""
    axes.set(title=title, xlabel="optimiser step", ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)  # three panels may share a row
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.grid(alpha=0.3)


def _curve(records: Sequence[Row], field: str) -> tuple[list[int], list[float]]:
    """The steps and the numbers of ``field``; of a list matplotlib would draw as many lines as it has entries."""
    return [record["step"] for record in records], [float(record[field]) for record in records]


def _draw_losses(axes: Any, train: Sequence[Row], evals: Sequence[Row]) -> None:
    """The losses; losses on a subset of the held-out text and on all of it are separate curves."""
    for label, records, style in (
        ("training", train, {"lw": 0.8, "color": STYLES[2].colour}),
        ("held-out, subset", [r for r in evals if not r["whole_split"]], STYLES[0].line),
        ("held-out, whole split", [r for r in evals if r["whole_split"]], STYLES[3].line),
    ):
        if records:
            axes.plot(*_curve(records, "nats_per_token"), label=label, **style)
    _label_steps(axes, "training and held-out loss", "loss [nats/token]")
    axes.legend()


def _draw_throughput(axes: Any, train: Sequence[Row]) -> None:
    """The throughput of all processes together, as in the progress line."""
    axes.plot(*_curve(train, "tokens_per_second"), lw=0.8, color=STYLES[0].colour)
    _label_steps(axes, "throughput of all processes", "throughput [tokens/s]")
    axes.set_ylim(0, 1.1 * max((r["tokens_per_second"] for r in train), default=1.0))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_layers(axes: Any, train: Sequence[Row], field: str, title: str, ylabel: str) -> None:
    """A line per MoE layer; the first is the darkest."""
    steps = [r["step"] for r in train]
    layers = [[*map(float, values)] for values in zip(*(r[field] for r in train), strict=True)]
    if len(layers) > _MOST_LAYERS:
        raise ValueError(f"{field} has {len(layers):,} layers")
    for layer, values in enumerate(layers):
        axes.plot(steps, values, lw=0.8, color=str(0.8 * layer / len(layers)), label=f"MoE layer {layer}")
    _label_steps(axes, title, ylabel)
    if len(layers) <= 8:
        axes.legend()


def _draw_load(figure: Any, axes: Any, tokens_per_expert: Sequence[Sequence[int]]) -> None:
    """A heat map, MoE layers x experts, of each expert's tokens over the layer's mean: 1 is perfect balance."""
    # A float first: times an integer, a list in metrics.jsonl would be repeated.
    share = [[len(layer) / max(sum(layer), 1) * count for count in layer] for layer in tokens_per_expert]
    image = axes.imshow(share, aspect="auto", cmap=SEQUENTIAL, vmin=0.0, vmax=2.0, interpolation="nearest")
    axes.set(xlabel="expert", ylabel="MoE layer", title="held-out tokens per expert / mean")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, extend="max")


# ------------------------------------------------------------------------------------------- tilemoe plan --plot


def plan_figure(plan: Row) -> Figure:
    """Each step's predicted time beside its roofline. ``plan``: as `tilemoe plan --json` prints it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    steps = plan["steps"][::-1]  # matplotlib draws the first bar at the bottom
    figure = Figure(figsize=(8, 5))  # a layout engine would draw everything twice
    axes = figure.add_axes((0.38, 0.1, 0.59, 0.8))
    places = range(len(steps))
    colours = [_PLAN_COLOURS[step["part"]] for step in steps]
    bars = axes.barh(places, [step["predicted_ms"] for step in steps], color=colours)
    axes.bar_label(bars, [f" {step['predicted_ms']:.3f}" for step in steps])
    roofs = [step.get("roofline_ms", 0.0) for step in steps]
    marks = axes.scatter(roofs, places, marker="|", s=150, color="black", label="roofline", zorder=3)
    axes.set_yticks(places, [f"{step['step']} ({step['dtype']}, {step.get('bound', 'launches')})" for step in steps])
    times = ", ".join(f"{part} {plan['times'][part]['predicted_ms']:.2f} ms" for part in _PLAN_COLOURS)
    axes.set(xlabel=f"ms, predicted ({plan['gpu']['rates']}); {times}")
    shape = plan["shape"]
    sizes = ", ".join(f"{name} {shape[size]}" for size, name in _PLAN_SIZES.items())
    figure.suptitle(f"{plan['source']}, {shape['dtype']}, {plan['gpu']['name']}\n{sizes}", fontsize=10)
    axes.margins(x=0.12)
    legend = [Rectangle((0, 0), 1, 1, color=colour, label=part) for part, colour in _PLAN_COLOURS.items()]
    axes.legend(handles=[*legend, marks], loc="lower right")
    return figure


# ------------------------------------------------------------------------------------------- tilemoe report


def layer_figure(rows: Sequence[Row], mode: str) -> Figure:
    """The other contestants' times over ours, forward and backward, with a group of bars for each case.

    ``rows``: results/layer.jsonl's newest row of each case and contestant, in the order to be shown.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if "baseline" in row]
    cases, contestants = (_distinct(row[key] for row in rows) for key in ("case", "contestant"))
    figure = Figure(figsize=(WIDTH, 5.5), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    width = 0.8 / max(1, len(contestants))
    for axis, part in zip(axes, ("forward", "backward"), strict=True):
        for index, (name, style) in enumerate(zip(contestants, spread(len(contestants)), strict=True)):
            ratios = {row["case"]: row[f"{part}_ratio"] for row in rows if row["contestant"] == name}
            places = [cases.index(case) + index * width for case in ratios]
            bars = axis.bar(places, list(ratios.values()), width, label=name, **style.bar)
            axis.bar_label(bars, fmt="%.2f", fontsize=7)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.margins(y=LABEL_MARGIN)
        axis.set_ylabel(f"{part}: time / tilemoe's")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(contestants))
    axes[1].set_xticks([place + 0.4 - width / 2 for place in range(len(cases))], cases, fontsize=8)
    title = f"Layer with its router, {mode}: above 1 tilemoe is faster. n: the width of an expert"
    figure.suptitle(_title(title, rows), fontsize=9)
    return figure


def kernels_figure(rows: Sequence[Row], mode: str) -> Figure:
    """Each kernel's percentage of its roofline, for each case. ``rows``: results/kernels.jsonl's, as in `layer_figure`.

    The roofline uses rates measured in the same rounds, so a kernel can exceed 100%.
    """
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["of_roofline"] is not None]
    cases, kernels = (_distinct(row[key] for row in rows) for key in ("case", "kernel"))
    share = {(row["case"], row["kernel"]): 100 * row["of_roofline"] for row in rows}
    grid = [[share.get((case, kernel), math.nan) for kernel in kernels] for case in cases]
    figure = Figure(figsize=(WIDTH, 1.8 + 0.4 * len(cases)), layout="constrained")
    axis = figure.subplots()
    axis.imshow(grid, cmap=SEQUENTIAL, vmin=0, vmax=100, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            text, colour = "" if math.isnan(value) else f"{value:.0f}%", "white" if value < 50 else "black"
            axis.text(x, y, text, ha="center", va="center", color=colour, fontsize=8)
    axis.set_xticks(range(len(kernels)), kernels, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    title = f"Time at the roofline / time, {mode}; n: the width of an expert. The roofline has the rates of a matrix\n"
    title += "product and a copy in the same rounds. These are yardsticks, not limits: some kernels are above 100%."
    figure.suptitle(_title(title, rows), fontsize=9)
    return figure


def _title(text: str, rows: Sequence[Row]) -> str:
    """``text``, and below it the GPUs and commits of the rows."""
    gpus, commits = (", ".join(sorted({str(row[key])[:length] for row in rows})) for key, length in _WHERE.items())
    return f"{text}\n{gpus} · {commits}"
