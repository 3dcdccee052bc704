"""Every figure of the tree is drawn by one script, and is of the newest rows."""

from pathlib import Path

import figures
from test_bench_overview import drawn_texts

from tilemoe.bench import record


def test_the_figures_in_the_tree_are_those_that_are_drawn(tmp_path: Path) -> None:
    """By the texts in them: numbers, commits, names."""
    kept = record.RESULTS / "figures"
    drawn = {path.name: path for path in figures.draw_all(tmp_path)}
    assert set(drawn) == {path.name for path in kept.iterdir()}
    for name, path in drawn.items():
        texts = [sorted(drawn_texts(each.read_text(encoding="utf-8"))) for each in (path, kept / name)]
        assert texts[0] == texts[1]
        assert len(texts[0]) > 10


def test_every_curve_is_named(tmp_path: Path) -> None:
    texts = drawn_texts(figures.end_to_end(tmp_path).read_text(encoding="utf-8"))
    names = {figures._name(row) + f" ({row['commit'][:7]})" for row in record.rows("end_to_end")}
    assert len(names) == len(record.rows("end_to_end"))
    assert names <= set(texts)
