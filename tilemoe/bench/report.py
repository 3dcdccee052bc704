"""Writes the recorded results as Markdown, as PNG, and as one HTML page with everything.

Ratios of time are theirs over ours, the median over interleaved rounds: above 1 we are faster. Ratios of memory are
ours over theirs: below 1 we need less.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from tilemoe import plots
from tilemoe.bench import cases, record
from tilemoe.bench.record import Row

MARKDOWN, PAGE = "report.md", "report.html"
MODES, KINDS = ("burst", "sustained"), ("layer", "kernels", "step")
TIME = ("forward_ratio", "backward_ratio")
_BYTES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
MEMORY = ("saved_ratio", "forward_peak_ratio", "backward_peak_ratio")
HEADINGS = ("theirs / ours: forward", "backward", "ours / theirs: saved", "peak forward", "peak backward")
_STYLE = "body{font:15px sans-serif;margin:2em auto;max-width:70em}td,th{padding:.2em .7em;text-align:right}"
_STYLE += (
    "td:first-child,th:first-child{text-align:left}table{border-collapse:collapse}tr{border-bottom:1px solid #ccc}"
)


@dataclass(frozen=True)
class Section:
    """A title, a table as `table` writes it, and a figure."""

    title: str
    table: str
    figure: Path | None = None


def write(out: Path, mode: str, gpu: str | None) -> list[Path]:
    """Write report.md, report.html and a .png for each figure to ``out``; returns their paths.

    ``mode``: "burst" or "sustained". gpu: only rows of the GPU with this full name. ValueError: there are no such rows.
    """
    sections = [*_layer(out, mode, gpu), *_kernels(out, mode, gpu), *_step(mode, gpu)]
    if not sections:
        others = [
            other for other in MODES if other != mode and any(newest_rows(name, other, gpu, "case") for name in KINDS)
        ]
        do = f"pass --mode {others[0]}, which has rows" if others else "run tilemoe bench"
        raise ValueError(f"{record.RESULTS} has no rows of mode {mode!r}{f' on {gpu}' if gpu else ''}; {do}")
    sections.append(Section("Files of results, and their newest rows", _files()))
    out.mkdir(parents=True, exist_ok=True)
    markdown, page = out / MARKDOWN, out / PAGE
    markdown.write_text("# Results\n" + "".join(map(_markdown, sections)), encoding="utf-8")
    body = "".join(map(_html, sections))
    head = f"<!doctype html><meta charset=utf-8><title>Results</title><style>{_STYLE}</style><h1>Results</h1>"
    page.write_text(head + body + "\n", encoding="utf-8")
    return [markdown, page, *(section.figure for section in sections if section.figure is not None)]


def newest_rows(name: str, mode: str, gpu: str | None, *keys: str) -> list[Row]:
    """The newest row for each value of ``keys``, in the cases' order; none if nothing is recorded."""
    wanted = {"mode": mode} if gpu is None else {"mode": mode, "gpu": gpu}
    try:
        return in_order(record.newest(name, *keys, **wanted).values())
    except ValueError:
        return []


def _layer(out: Path, mode: str, gpu: str | None) -> Iterator[Section]:
    rows = newest_rows("layer", mode, gpu, "case", "contestant")
    found = list(dict.fromkeys(row["contestant"] for row in rows if "baseline" in row))
    for number, peer in enumerate(found):
        figure = None
        if number == 0:
            figure = plots.save(plots.layer_figure(rows, mode), out / f"layer-{mode}.png")
        yield Section(f"The layer against {peer}, {mode}", layer_table(rows, peer), figure)
    compared = {row["case"] for row in rows if "baseline" in row}
    if alone := [row for row in rows if row["case"] not in compared]:
        yield Section(f"The layer alone, {mode}", alone_table(alone))


def _kernels(out: Path, mode: str, gpu: str | None) -> Iterator[Section]:
    if rows := newest_rows("kernels", mode, gpu, "case", "kernel"):
        figure = plots.save(plots.kernels_figure(rows, mode), out / f"kernels-{mode}.png")
        yield Section(f"Kernels, {mode}: ms (share of the roofline)", kernel_table(rows), figure)
        shares = share_table(rows, ("route", "route_grad"))
        yield Section("Choosing experts and planning, share of the layer", shares)


def _step(mode: str, gpu: str | None) -> Iterator[Section]:
    if rows := newest_rows("step", mode, gpu, "case", "contestant"):
        yield Section(f"A training step, {mode}", step_table(rows))


def _files() -> str:
    lines = []
    for path in sorted(record.RESULTS.glob("*.jsonl")):
        if rows := record.rows(path.stem):
            newest = max(rows, key=lambda row: str(row.get("time", "")))
            lines.append([path.name, str(len(rows)), *(str(newest.get(key)) for key in ("time", "commit", "gpu"))])
    return table(["file", "rows", "newest", "commit", "GPU"], lines)


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
    heading = ["forward, ms", "backward", "saved, MiB", "peak forward", "peak backward"]
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


def _markdown(section: Section) -> str:
    figure = f"\n![{section.title}]({section.figure.name})\n" if section.figure is not None else ""
    return f"\n## {section.title}\n{figure}\n{section.table}\n"


def _html(section: Section) -> str:
    header, _rule, *lines = section.table.splitlines()
    rows = _cells(header, "th") + "".join(_cells(line, "td") for line in lines)
    figure = ""
    if section.figure is not None:
        data = base64.b64encode(section.figure.read_bytes()).decode()
        figure = f'<img style="max-width:100%" alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">'
    return f"<h2>{html.escape(section.title)}</h2>{figure}<table>{rows}</table>"


def _cells(line: str, tag: str) -> str:
    cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
