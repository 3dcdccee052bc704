"""Tables from the recorded results, as Markdown: the layer against its peers, and each kernel's share of its roofline.

    python benchmarks/summary.py --what layer kernels --mode sustained

Ratios of time are theirs over ours, the median over interleaved rounds: above 1 we are faster. Ratios of memory are
ours over theirs: below 1 we need less.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from tilemoe.bench import cases, record

TIME = ("forward_ratio", "backward_ratio")
MEMORY = ("saved_ratio", "forward_peak_ratio", "backward_peak_ratio")
HEADINGS = ("time forward", "backward", "saved", "peak forward", "backward")

WHAT = ["layer", "kernels"]

Row = dict[str, Any]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows by case, as `cases` lists them, and as they were recorded within a case."""
    places = {name: place for place, name in enumerate(cases.ALL)}
    return sorted(rows, key=lambda row: places[row["case"]])


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned."""
    rule = [":---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def layer_table(rows: Sequence[Row], peer: str) -> str:
    """Ours and ``peer``, a line for each case, then the geometric means and the worst cases."""
    found = [row for row in rows if row["contestant"] == peer and "baseline" in row]
    lines = []
    for row in found:
        ours = " / ".join(f"{row['baseline'][f'{part}_ms']['median']:.3f}" for part in ("forward", "backward"))
        theirs = " / ".join(f"{row[f'{part}_ms']['median']:.3f}" for part in ("forward", "backward"))
        lines.append([row["case"], ours, theirs, *(f"{row[key]:.2f}" for key in (*TIME, *MEMORY))])
    means = [f"{geometric_mean(row[key] for row in found):.3f}" for key in (*TIME, *MEMORY)]
    worst = [f"{min(row[key] for row in found):.3f}" for key in TIME]
    worst += [f"{max(row[key] for row in found):.3f}" for key in MEMORY]
    lines += [["geometric mean", "", "", *means], ["worst", "", "", *worst]]
    return table(["case", "ours, ms", f"{peer}, ms", *HEADINGS], lines)


def kernel_table(rows: Sequence[Row]) -> str:
    """Milliseconds and percent of the roofline of each kernel, a line for each case."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    by_case: dict[str, dict[str, str]] = {}
    for row in rows:
        roof = "" if row["of_roofline"] is None else f" ({100 * row['of_roofline']:.0f}%)"
        by_case.setdefault(row["case"], {})[row["kernel"]] = f"{row['ms']['median']:.3f}{roof}"
    return table(["case", *kernels], [[case, *(cells.get(k, "") for k in kernels)] for case, cells in by_case.items()])


def share_table(rows: Sequence[Row], kernels: Sequence[str]) -> str:
    """Percent of the layer's forward and backward that ``kernels`` take together, a line for each case."""
    by_case: dict[str, float] = {}
    for row in rows:
        if row["kernel"] in kernels:
            by_case[row["case"]] = by_case.get(row["case"], 0.0) + row["of_layer"]
    return table(["case", " + ".join(kernels)], [[case, f"{100 * share:.1f}%"] for case, share in by_case.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT, help="default: both")
    parser.add_argument("--mode", choices=["burst", "sustained"], default="sustained")
    parser.add_argument("--gpu", help="only rows of this GPU, by its full name")
    args = parser.parse_args()
    if "layer" in args.what:
        layer = in_order(record.latest("layer", args.mode, args.gpu, "case", "contestant").values())
        for peer in dict.fromkeys(row["contestant"] for row in layer if "baseline" in row):
            print(f"\nThe layer against {peer}, {args.mode}\n\n{layer_table(layer, peer)}")
    if "kernels" in args.what:
        kernels = in_order(record.latest("kernels", args.mode, args.gpu, "case", "kernel").values())
        print(f"\nKernels, {args.mode}: ms (share of the roofline)\n\n{kernel_table(kernels)}")
        shares = share_table(kernels, ("route", "route_grad"))
        print(f"\nChoosing experts and planning, share of the layer\n\n{shares}")


if __name__ == "__main__":
    main()
