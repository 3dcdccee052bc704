"""Markdown tables of the recorded results: the layer against its peers, and each kernel's share of its roofline.

Ratios of time are theirs over ours, the median over interleaved rounds: above 1 we are faster. Ratios of memory are
ours over theirs: below 1 we need less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import Any

from tilemoe.bench import cases

TIME = ("forward_ratio", "backward_ratio")
_BYTES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
MEMORY = ("saved_ratio", "forward_peak_ratio", "backward_peak_ratio")
HEADINGS = ("time forward", "backward", "saved", "peak forward", "backward")

Row = dict[str, Any]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows sorted by case, in the order of `cases`, the user's own last; within a case as recorded."""
    places = {name: place for place, name in enumerate(cases.ALL)}
    return sorted(rows, key=lambda row: places.get(row["case"], len(places)))


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is left-aligned."""
    rule = [":---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def layer_table(rows: Sequence[Row], peer: str) -> str:
    """Our layer and ``peer``: a line for each case, then the geometric means and the worst cases."""
    found = [row for row in rows if row["contestant"] == peer and "baseline" in row]
    lines = []
    for row in found:
        ours = " / ".join(f"{row['baseline'][f'{part}_ms']['median']:.3f}" for part in ("forward", "backward"))
        theirs = " / ".join(f"{row[f'{part}_ms']['median']:.3f}" for part in ("forward", "backward"))
        lines.append([row["case"], ours, theirs, *(_shown(row[key], 2) for key in (*TIME, *MEMORY))])
    columns = {key: [row[key] for row in found if row[key] is not None] for key in (*TIME, *MEMORY)}
    means = [_shown(geometric_mean(column) if column else None, 3) for column in columns.values()]
    worst = [_shown(min(columns[key], default=None), 3) for key in TIME]
    worst += [_shown(max(columns[key], default=None), 3) for key in MEMORY]
    lines += [["geometric mean", "", "", *means], ["worst", "", "", *worst]]
    return table(["case", "ours, ms", f"{peer}, ms", *HEADINGS], lines)


def alone_table(rows: Sequence[Row]) -> str:
    """Milliseconds and MiB, a line for each case and contestant, of cases that were timed without a peer."""
    lines = []
    for row in rows:
        times = [f"{row[f'{part}_ms']['median']:.3f}" for part in ("forward", "backward")]
        memory = ["-" if row[key] is None else f"{row[key] / 2**20:,.0f}" for key in _BYTES]
        lines.append([row["case"], row["contestant"], *times, *memory])
    heading = ["forward, ms", "backward", "saved, MiB", "peak forward", "backward"]
    return table(["case", "contestant", *heading], lines)


def _shown(value: float | None, digits: int) -> str:
    """A ratio; a dash if it was not measured, such as memory without a GPU."""
    return "-" if value is None else f"{value:.{digits}f}"


def step_table(rows: Sequence[Row]) -> str:
    """Milliseconds and tokens/s of a training step, and its time over the first contestant's, a line for each."""
    lines = [
        [
            row["case"],
            row["contestant"],
            f"{row['step_ms']['median']:.1f}",
            f"{row['tokens_per_s']:,.0f}",
            _shown(row.get("step_ratio"), 2),
        ]
        for row in rows
    ]
    return table(["case", "contestant", "step, ms", "tokens/s", "time over the first's"], lines)


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
