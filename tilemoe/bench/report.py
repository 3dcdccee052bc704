"""Writes the recorded results as Markdown, as PNG, and as one HTML page with everything."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tilemoe import plots
from tilemoe.bench import record, summary

MARKDOWN, PAGE = "report.md", "report.html"
MODES, KINDS = ("burst", "sustained"), ("layer", "kernels", "step")
_STYLE = "body{font:15px sans-serif;margin:2em auto;max-width:70em}td,th{padding:.2em .7em;text-align:right}"
_STYLE += (
    "td:first-child,th:first-child{text-align:left}table{border-collapse:collapse}tr{border-bottom:1px solid #ccc}"
)


@dataclass(frozen=True)
class Section:
    """A title, a table as `summary.table` writes it, and a figure."""

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


def newest_rows(name: str, mode: str, gpu: str | None, *keys: str) -> list[summary.Row]:
    """The newest row for each value of ``keys``, in the cases' order; none if nothing is recorded."""
    wanted = {"mode": mode} if gpu is None else {"mode": mode, "gpu": gpu}
    return summary.in_order(record.newest(name, *keys, **wanted).values())


def _layer(out: Path, mode: str, gpu: str | None) -> Iterator[Section]:
    rows = newest_rows("layer", mode, gpu, "case", "contestant")
    found = list(dict.fromkeys(row["contestant"] for row in rows if "baseline" in row))
    for number, peer in enumerate(found):
        figure = None
        if number == 0:
            figure = plots.save(plots.layer_figure(rows, mode), out / f"layer-{mode}.png")
        yield Section(f"The layer against {peer}, {mode}", summary.layer_table(rows, peer), figure)
    compared = {row["case"] for row in rows if "baseline" in row}
    if alone := [row for row in rows if row["case"] not in compared]:
        yield Section(f"The layer alone, {mode}", summary.alone_table(alone))


def _kernels(out: Path, mode: str, gpu: str | None) -> Iterator[Section]:
    if rows := newest_rows("kernels", mode, gpu, "case", "kernel"):
        figure = plots.save(plots.kernels_figure(rows, mode), out / f"kernels-{mode}.png")
        yield Section(f"Kernels, {mode}: ms (share of the roofline)", summary.kernel_table(rows), figure)
        shares = summary.share_table(rows, ("route", "route_grad"))
        yield Section("Choosing experts and planning, share of the layer", shares)


def _step(mode: str, gpu: str | None) -> Iterator[Section]:
    if rows := newest_rows("step", mode, gpu, "case", "contestant"):
        yield Section(f"A training step, {mode}", summary.step_table(rows))


def _files() -> str:
    lines = []
    for path in sorted(record.RESULTS.glob("*.jsonl")):
        if rows := record.rows(path.stem):
            newest = max(rows, key=lambda row: str(row.get("time", "")))
            lines.append([path.name, str(len(rows)), *(str(newest.get(key)) for key in ("time", "commit", "gpu"))])
    return summary.table(["file", "rows", "newest", "commit", "GPU"], lines)


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
