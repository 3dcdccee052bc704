"""Every figure of the tree is drawn by one script, and is of the newest rows."""

import re
from pathlib import Path

import figures
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tilemoe import plots
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
    runs = [label[1] for text in drawn["ways.svg"] if (label := re.match(r"(.+, seed \d+), \w+: ", text))]
    assert sorted(runs) == sorted(f"{row['way']}, seed {row['seed']}" for row in record.rows("ways"))
    values = {f"{value:.2f}" for bar in figures.newest_bars() for value in (bar.time, bar.memory)}
    assert values <= set(drawn["overview.svg"])


def test_labels_keep_clear_of_frames_and_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no figure is wider than the site's column, where its texts would shrink."""
    drawn: dict[Path, Figure] = {}
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.update({path: figure}) or path)
    assert len(list(figures.draw_all(tmp_path))) == len(drawn)
    for path, figure in drawn.items():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        assert figure.get_figwidth() <= plots.WIDTH, path.name
        for axes in figure.axes:
            frame = axes.get_window_extent()
            boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
            assert all(frame.y0 < box.y0 and box.y1 < frame.y1 for box in boxes), path.name
            ticks = [label.get_window_extent() for label in axes.get_xticklabels() if not label.get_rotation()]
            for row in (boxes, ticks):
                assert not any(one.overlaps(other) for at, one in enumerate(row) for other in row[:at]), path.name
