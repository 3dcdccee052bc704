"""Every figure of the tree is drawn by one script, and is of the newest rows."""

from pathlib import Path

import figures

from tilemoe.bench import record


def drawn_texts(path: Path) -> list[str]:
    """matplotlib notes each text that it draws as paths in a comment."""
    lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    return sorted(line[5:-4] for line in lines if line.startswith("<!-- "))


def test_the_figures_in_the_tree_are_those_that_are_drawn(tmp_path: Path) -> None:
    """By the texts in them: numbers, commits, names."""
    kept = record.RESULTS / "figures"
    drawn = {path.name: drawn_texts(path) for path in figures.draw_all(tmp_path)}
    assert drawn == {path.name: drawn_texts(path) for path in kept.iterdir()}
    assert min(map(len, drawn.values())) > 10
    names = {f"{figures.curve_name(row)} ({row['commit'][:7]})" for row in record.rows("end_to_end")}
    assert len(names) == len(record.rows("end_to_end"))
    assert names <= set(drawn["end_to_end.svg"])
    values = {f"{value:.2f}" for bar in figures.newest_bars() for value in (bar.time, bar.memory)}
    assert values <= set(drawn["overview.svg"])
