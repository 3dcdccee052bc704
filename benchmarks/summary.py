"""Tables from the recorded results, as Markdown: the layer against its peers, and each kernel's share of its roofline.

    python benchmarks/summary.py --mode sustained

Ratios of time are theirs over ours, the median over interleaved rounds: above 1 we are faster. Ratios of memory are
ours over theirs: below 1 we need less.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

import record

TIME = ("forward_ratio", "backward_ratio")
MEMORY = ("saved_ratio", "forward_peak_ratio", "backward_peak_ratio")
HEADINGS = ("time forward", "backward", "saved", "peak forward", "backward")

Row = dict[str, Any]


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
    parser.add_argument("--mode", choices=["burst", "sustained"], default="sustained")
    parser.add_argument("--gpu", help="only rows of this GPU, by its full name")
    args = parser.parse_args()
    layer = list(record.latest("layer", args.mode, args.gpu, "case", "contestant").values())
    kernels = list(record.latest("kernels", args.mode, args.gpu, "case", "kernel").values())
    for peer in dict.fromkeys(row["contestant"] for row in layer if "baseline" in row):
        print(f"\nThe layer against {peer}, {args.mode}\n\n{layer_table(layer, peer)}")
    print(f"\nKernels, {args.mode}: ms (share of the roofline)\n\n{kernel_table(kernels)}")
    print(f"\nChoosing experts and planning, share of the layer\n\n{share_table(kernels, ('route', 'route_grad'))}")


if __name__ == "__main__":
    main()
