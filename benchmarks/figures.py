"""Every figure of results/figures, from what is recorded; the same bytes each time with the same matplotlib.

    python benchmarks/figures.py

overview: time and peak memory of each peer over ours, of the layer and of steps of transformers' models (the README's).
layer-*, kernels-*: as `tilemoe report` draws them. token-rounding: what it gains over top-K. finetune, ways: losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tilemoe import plots
from tilemoe.bench import record
from tilemoe.bench.record import Row
from tilemoe.bench.report import newest_rows
from tilemoe.plots import LABEL_MARGIN, STYLES, WIDTH, save, spread

MODE = "nearest"  # of token rounding
PEER_STYLES = MappingProxyType(dict(zip(("sonic-moe", "scattermoe", "grouped_mm"), spread(3), strict=True)))
GPU = "NVIDIA H200"  # of the overview
FULL_SIZE = 24  # layers
TITLES = (
    "One layer with its router, forward and backward (n: the width of an expert)",
    "A training step of transformers' models",
)
MEASURES = ("time", "peak memory")


def draw_all(folder: Path) -> Iterator[Path]:
    """Into ``folder``, each as it is drawn."""
    mpl.rcParams["svg.hashsalt"] = "tilemoe"
    yield overview(folder)
    for mode in ("sustained", "burst"):
        rows = newest_rows("layer", mode, None, "case", "contestant")
        yield save(plots.layer_figure(rows, mode), folder / f"layer-{mode}.svg")
    rows = newest_rows("kernels", "sustained", None, "case", "kernel")
    yield save(plots.kernels_figure(rows, "sustained"), folder / "kernels-sustained.svg")
    yield token_rounding(folder)
    yield fine_tuning(folder)
    yield ways(folder)


class Bar(NamedTuple):
    """A peer's time and peak memory over ours, in a group of bars of one of the overview's `TITLES`."""

    part: int
    group: str
    peer: str
    time: float
    memory: float
    commit: str


def overview(folder: Path) -> Path:
    bars = newest_bars()
    figure = Figure(figsize=(WIDTH, 8.5), layout="constrained")
    axes = figure.subplots(2 * len(TITLES), 1)
    for part, title in enumerate(TITLES):
        of_part = axes[2 * part : 2 * part + 2]
        groups = list(dict.fromkeys(bar.group for bar in bars if bar.part == part))
        for place, group in enumerate(groups):
            here = [bar for bar in bars if (bar.part, bar.group) == (part, group)]
            for index, bar in enumerate(here):
                at = place + 0.28 * (index - (len(here) - 1) / 2)
                for axis, value in zip(of_part, (bar.time, bar.memory), strict=True):
                    axis.bar_label(axis.bar(at, value, 0.26, **PEER_STYLES[bar.peer].bar), fmt="%.2f", fontsize=7)
        for axis, measure in zip(of_part, MEASURES, strict=True):
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.margins(y=LABEL_MARGIN)
            axis.set_ylabel(f"{measure}\n/ tilemoe's", fontsize=8)
            axis.set_xticks(range(len(groups)), groups, fontsize=7)
        of_part[0].set_title(title, fontsize=9)
    handles = [Rectangle((0, 0), 1, 1, **style.bar) for style in PEER_STYLES.values()]
    figure.legend(handles, list(PEER_STYLES), loc="outside lower center", ncols=len(PEER_STYLES), fontsize=8)
    commits = ", ".join(sorted({bar.commit for bar in bars}))
    title = f"Above 1 tilemoe is faster, or smaller · one {GPU.removeprefix('NVIDIA ')} · {commits}"
    figure.suptitle(title, fontsize=10)
    return save(figure, folder / "overview.svg")


def newest_bars() -> list[Bar]:
    """On `GPU`, of the newest sustained row of each layer and peer, by the layers' FLOPs, and of each model's step."""
    newest = record.newest("layer", "case", "contestant", mode="sustained", gpu=GPU)
    layers = [row for row in newest.values() if row["contestant"] in PEER_STYLES]
    places = {name: place for place, name in enumerate(PEER_STYLES)}
    ordered = sorted(layers, key=lambda row: (flops(row), row["case"], places[row["contestant"]]))
    bars = [Bar(0, row["case"], row["contestant"], *over_ours(row), row["commit"][:7]) for row in ordered]
    steps = record.newest("hf_step", "case", "attention", implementation="tilemoe", gpu=GPU)
    for (case, attention), row in steps.items():
        group = f"{case}\n({attention})" if sum(other == case for other, _ in steps) > 1 else case
        bars.append(Bar(1, group, "grouped_mm", row["ratio"], 1 / row["memory_ratio"], row["commit"][:7]))
    return bars


def flops(row: Row) -> int:
    """Of a layer, up to a factor."""
    return row["num_tokens"] * row["hidden_size"] * row["intermediate_size"] * row["num_experts_per_tok"]


def over_ours(row: Row) -> tuple[float, float]:
    """A peer's forward and backward together, and its peak, over ours of the same rounds."""
    ours = row["baseline"]
    time = [side["forward_ms"]["median"] + side["backward_ms"]["median"] for side in (row, ours)]
    peak = [max(side["forward_peak_bytes"], side["backward_peak_bytes"]) for side in (row, ours)]
    return time[0] / time[1], peak[0] / peak[1]


def token_rounding(folder: Path) -> Path:
    """Speed-up of `MODE` over top-K, and the rows that top-K pads, over the cases."""
    rows = record.newest("token_rounding", "case", "contestant", mode="sustained", kernels="chosen")
    cases = list(dict.fromkeys(case for case, _ in rows))
    some = next(iter(rows.values()))
    figure = Figure(figsize=(WIDTH, 7), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    places = range(len(cases))
    bars = axes[0].bar(places, [rows[case, MODE]["total_speedup"] for case in cases], 0.8, **STYLES[0].bar)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set_ylabel(f"time of top-K / of {MODE!r},\nforward and backward")
    padded = axes[1].bar(places, [rows[case, "top-K"]["waste_percent"] for case in cases], 0.8, **STYLES[-1].bar)
    axes[1].set_ylabel("padding of top-K, % of rows")
    for axis, drawn, form in zip(axes, (bars, padded), ("%.2f", "%.0f"), strict=True):
        axis.bar_label(drawn, fmt=form, fontsize=7)
        axis.margins(y=LABEL_MARGIN)
    axes[1].set_xticks(places, cases, rotation=35, ha="right", rotation_mode="anchor", fontsize=8)
    tokens = " or ".join(f"{count:,}" for count in sorted({row["num_tokens"] for row in rows.values()}))
    title = f"Token rounding, {tokens} tokens · {some['gpu'] or some['machine']} · {some['commit'][:7]}"
    figure.suptitle(f"{title}\nE experts, d hidden size, n width of an expert", fontsize=10)
    return save(figure, folder / "token-rounding.svg")


def fine_tuning(folder: Path) -> Path:
    """Losses of adapters on each full-size model, by what its experts are stored and computed in."""
    rows = [row for row in record.rows("finetune") if row["mode"] in ("sft", "train") and row["layers"] >= FULL_SIZE]
    figure = Figure(figsize=(WIDTH, 6), layout="constrained")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for axis, case in zip(figure.subplots(len(cases), 1), cases, strict=True):
        newest = {(row["mode"], row["experts"], row["implementation"]): row for row in rows if row["case"] == case}
        # Two lines nearly coincide: dark, dashed colours show both.
        for ((mode, experts, computed), row), style in zip(newest.items(), STYLES[: len(newest)], strict=True):
            name = f"{experts}, {computed}, {mode}: {row['tokens_per_second']:,} tokens/s ({row['commit'][:7]})"
            steps = range(1, len(row["losses"]) + 1)
            axis.plot(steps, row["losses"], label=name, color=style.colour, linestyle=style.dashes, lw=1.2)
        axis.set(ylabel="loss, nats/token")
        axis.set_title(f"{case}, random weights, on one {rows[0]['gpu'].removeprefix('NVIDIA ')}", fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axis.set_xlabel("optimiser step")
    return save(figure, folder / "finetune.svg")


def ways(folder: Path) -> Path:
    """A model and a text in each row: held-out losses of its ways of training, and their differences to top-K."""
    rows = list(record.rows("ways"))
    groups = dict.fromkeys(tuple(row["options"]) for row in rows)
    styles = dict(zip(dict.fromkeys((row["way"], row["seed"]) for row in rows), STYLES, strict=False))
    figure = Figure(figsize=(WIDTH, 8), layout="constrained")
    for options, (losses, apart) in zip(groups, figure.subplots(len(groups), 2), strict=True):
        runs = [row for row in rows if tuple(row["options"]) == options]
        base = dict(next(row for row in runs if (row["way"], row["seed"]) == ("top-K", 0))["heldout_nats_per_token"])
        for row in runs:
            line = styles[row["way"], row["seed"]].line
            steps, values = zip(*row["heldout_nats_per_token"], strict=True)
            run = f"{row['way']}, seed {row['seed']}, {row['commit'][:7]}: {values[-1]:.4f}"
            losses.plot(steps, values, label=run, **line)
            percent = [100 * (value / base[step] - 1) for step, value in zip(steps, values, strict=True)]
            apart.plot(steps, percent, **line)
        name = f"{runs[0]['parameters'] / 1e9:.1f} B parameters, {options[options.index('--data.corpus') + 1]}"
        losses.set(title=name, xlabel="optimiser step", ylabel="held-out loss, nats/token", yscale="log")
        losses.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        losses.legend(fontsize=7)
        losses.grid(alpha=0.3, which="both")
        apart.set(xlabel="optimiser step", ylabel="difference to top-K, seed 0, %")
        apart.grid(alpha=0.3)
    figure.suptitle(f"Recipe 1b, on one {rows[0]['gpu']} each")
    return save(figure, folder / "ways.svg")


if __name__ == "__main__":
    for drawn in draw_all(record.RESULTS / "figures"):
        print(drawn)
