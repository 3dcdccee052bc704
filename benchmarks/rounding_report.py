"""What `token_rounding` has recorded: a line, a table, a figure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tilemoe.bench import record
from tilemoe.config import ROUNDING_MODES
from tilemoe.palette import STYLES, spread

NAME = "token_rounding"
TOPK, FULL = "top-K", "full tiles"
WHOLE = ("forward", "backward")
PARTS = ("logits", "routing", "experts", "experts_grad", "routing_grad", "logits_grad")
CHOSEN = "chosen"  # the backend that a user gets

Row = dict[str, Any]


def describe(row: Row) -> str:
    parts = " ".join(f"{part} {row[f'{part}_ms']['median']:.3f}" for part in PARTS)
    line = f"{row['case']} {row['kernels']} {row['contestant']}: {parts} ms, host {row['host_ms']:.2f}"
    if row["contestant"] == FULL:
        return line
    speed = " ".join(f"{row[f'{part}_speedup']:.3f}x" for part in ("forward", "backward", "total"))
    return (
        f"{line}; whole {row['forward_ms']['median']:.3f} + {row['backward_ms']['median']:.3f} ms, {speed}, "
        f"routing {row['routing_percent']:.1f}%, waste {row['waste_percent']:.1f}%{recovers(row)}"
    )


def recovers(row: Row) -> str:
    """Nothing where padding costs nothing that could be measured."""
    return "" if row["recovered"] is None else f", recovers {100 * row['recovered']:.0f}%"


def latest(gpu_name: str | None) -> dict[tuple[Any, ...], Row]:
    """The last recorded row of each (case, kernels, contestant)."""
    return record.latest(NAME, "sustained", gpu_name, "case", "kernels", "contestant")


def table(args: argparse.Namespace) -> None:
    """The last recorded row of each case, backend and contestant, as Markdown."""
    rows = latest(args.gpu)
    header = ["case", "kernels", "routing", "rows", "padding to tiles / halves", "forward", "backward", "routing"]
    header += ["of the layer", "forward / both against top-K", "padding costs", "recovers"]
    print("| " + " | ".join(header) + " |")
    print("| :--- | :--- | :--- |" + " ---: |" * (len(header) - 3))
    for (case, of_set, contestant), row in rows.items():
        if contestant == FULL:
            continue
        routing = row["routing_ms"]["median"] + row["routing_grad_ms"]["median"]
        speed = " / ".join(f"{row[f'{part}_speedup']:.3f}" for part in ("forward", "total"))
        cells = [
            case, row["kernel_set"] if of_set == CHOSEN else f"{of_set} alone", contestant,
            f"{100 * row['rows'] / rows[case, of_set, TOPK]['rows'] - 100:+.1f}%",
            f"{row['waste_percent']:.1f}% / {row['waste_half_tile_percent']:.1f}%",
            *(f"{row[f'{part}_ms']['median']:.3f} ms" for part in WHOLE),
            f"{routing:.3f} ms", f"{row['routing_percent']:.1f}%", speed, f"{row['padding_ms']['median']:.3f} ms",
            "" if contestant == TOPK else recovers(row).removeprefix(", recovers "),
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")


def plot(args: argparse.Namespace) -> Path:
    """Speed-up of forward + backward over top-K, and the rows that top-K pads, over the cases."""
    import matplotlib.pyplot as plt

    every = latest(args.gpu)
    rows = {(case, contestant): row for (case, of_set, contestant), row in every.items() if of_set == args.kernels}
    if not rows:
        raise SystemExit(f"results/{NAME}.jsonl has no row of kernels {args.kernels!r}")
    cases = list(dict.fromkeys(case for case, _ in rows))
    names = [name for name in (*ROUNDING_MODES,) if any(found == name for _, found in rows)]
    figure, axes = plt.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    width = 0.8 / max(1, len(names))
    for index, (name, style) in enumerate(zip(names, spread(len(names)), strict=True)):
        here = [(place, rows[case, name]) for place, case in enumerate(cases) if (case, name) in rows]
        places = [place + index * width for place, _ in here]
        axes[0].bar(places, [row["total_speedup"] for _, row in here], width, label=name, **style.bar)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set_ylabel("forward + backward: top-K over this")
    axes[0].legend(ncols=len(names))
    centres = [place + 0.4 - width / 2 for place in range(len(cases))]
    padded = [rows[case, TOPK]["waste_percent"] if (case, TOPK) in rows else 0.0 for case in cases]
    axes[1].bar(centres, padded, 0.8, **STYLES[-1].bar)
    axes[1].set_ylabel("rows that top-K pads, %")
    axes[1].set_xticks(centres, cases, rotation=30, ha="right")
    some = next(iter(rows.values()))
    figure.suptitle(f"Token rounding · {some['gpu'] or some['machine']} · {some['commit']}")
    path = Path(args.out) / "token-rounding.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(path)
    return path
