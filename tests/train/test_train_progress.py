"""What a run shows: plain lines in a pipe, a bar on a terminal."""

import io
import sys

import pytest

from tilemoe.train.progress import (
    PlainReporter,
    Reporter,
    Speed,
    StepStats,
    TerminalReporter,
    duration,
    make_reporter,
    summary,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stats(step: int, load: list[float]) -> StepStats:
    return StepStats(step, 1000 * step, 1.23456, 0.0, 1e-3, 0.5, load, [0.041] * len(load))


def drive(reporter: Reporter) -> None:
    reporter.start(0, 5)
    for step in range(1, 6):
        reporter.update(stats(step, [1.1, 1.5]), Speed(34_100.0), 61.0)
    reporter.say("held-out [bold]1.20[/bold]")
    reporter.stop()


def test_plain_lines_come_every_log_every_steps_and_at_the_end() -> None:
    stream = io.StringIO()
    drive(PlainReporter(stream, 2))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["2/5", "4/5", "5/5"]
    assert lines[0] == "step 2/5  loss 1.2346  34.1k tokens/s  load 1.50x  pad 4.1%  eta 1:01"
    assert lines[-1] == "held-out [bold]1.20[/bold]"


def test_the_bar_shows_the_same_numbers() -> None:
    stream = Terminal()
    drive(TerminalReporter(stream))
    for text in ("training", "5/5", "loss 1.2346", "34.1k tokens/s", "held-out [bold]1.20[/bold]"):
        assert text in stream.getvalue()


@pytest.mark.parametrize(("stream", "kind"), [(Terminal(), TerminalReporter), (io.StringIO(), PlainReporter)])
def test_the_output_decides(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, kind: type) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    assert isinstance(make_reporter(10), kind)


def test_numbers_are_short() -> None:
    assert summary(stats(1, []), Speed(2_500_000.0)) == "loss 1.2346  2.50M tokens/s"
    assert duration(59.6) == "1:00"
    assert duration(3 * 3600 + 62) == "3:01:02"
