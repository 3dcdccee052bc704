"""The figure of ``tilemoe plan``: each step under the GPU's roofline. Needs matplotlib (tilemoe[plot])."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SUFFIXES = (".png", ".svg", ".pdf")
_MARKERS = {"forward": "o", "backward": "s"}  # apart in grey, too


def draw(plan: Mapping[str, Any], path: Path) -> None:
    """Write the figure; ValueError: another kind of file, no such folder, or matplotlib is not installed."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(_SUFFIXES)}; got {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: no such folder {path.absolute().parent}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'tilemoe[plot]'") from error
    gpu, shape = plan["gpu"], plan["shape"]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    steps = [step for step in plan["steps"] if step.get("flops")]
    intensities = [step["flop_per_byte"] for step in steps] + [gpu["ridge_flop_per_byte"]]
    ends = [min(intensities) / 3, gpu["ridge_flop_per_byte"], 3 * max(intensities)]
    axes.plot(ends, [min(gpu["tflops"], gpu["tbps"] * at) for at in ends], color="black", label="roofline")
    for part, marker in _MARKERS.items():
        here = [step for step in steps if step["part"] == part]
        rates = [step["flops"] / step["predicted_ms"] / 1e9 for step in here]
        axes.scatter([s["flop_per_byte"] for s in here], rates, marker=marker, label=f"{part}, predicted", zorder=2)
        for step, rate in zip(here, rates, strict=True):
            axes.annotate(step["step"], (step["flop_per_byte"], rate), xytext=(4, -9), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="FLOP/byte", ylabel="TFLOP/s")
    sizes = " ".join(str(shape[name]) for name in ("num_tokens", "hidden_size", "intermediate_size", "num_experts"))
    axes.set_title(f"{plan['source']} ({sizes} {shape['num_experts_per_tok']}), {shape['dtype']}, {gpu['name']}")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
