"""The figure of ``tilemoe plan``: each step's predicted time beside its roofline. Needs matplotlib (tilemoe[plot])."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilemoe.palette import STYLES

_SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = MappingProxyType({"forward": STYLES[4].colour, "backward": STYLES[2].colour})  # rooflines are black on them
_SIZES = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


def draw(plan: Mapping[str, Any], path: Path) -> None:
    """Write the figure; ValueError: another kind of file, no such folder, or matplotlib is not installed."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(_SUFFIXES)}; got {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: no such folder {path.absolute().parent}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'tilemoe[plot]'") from error
    steps = plan["steps"][::-1]  # matplotlib draws the first bar at the bottom
    figure = Figure(figsize=(8, 5))  # a layout engine would draw everything twice
    axes = figure.add_axes((0.38, 0.1, 0.59, 0.82))
    places = range(len(steps))
    colours = [_COLOURS[step["part"]] for step in steps]
    bars = axes.barh(places, [step["predicted_ms"] for step in steps], color=colours)
    axes.bar_label(bars, [f" {step['predicted_ms']:.3f}" for step in steps])
    roofs = [step.get("roofline_ms", 0.0) for step in steps]
    marks = axes.scatter(roofs, places, marker="|", s=150, color="black", label="roofline", zorder=3)
    axes.set_yticks(places, [f"{step['step']} ({step['dtype']}, {step.get('bound', 'launches')})" for step in steps])
    times = ", ".join(f"{part} {plan['times'][part]['predicted_ms']:.2f} ms" for part in _COLOURS)
    axes.set(xlabel=f"ms, predicted ({plan['gpu']['rates']}); {times}")
    shape = plan["shape"]
    sizes = ", ".join(str(shape[size]) for size in _SIZES)
    figure.suptitle(f"{plan['source']} ({sizes}), {shape['dtype']}, {plan['gpu']['name']}")
    axes.margins(x=0.12)
    legend = [Rectangle((0, 0), 1, 1, color=colour, label=part) for part, colour in _COLOURS.items()]
    axes.legend(handles=[*legend, marks], loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
