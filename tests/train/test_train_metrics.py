"""metrics.jsonl: appended, cut back on resuming, told to trackers, drawn; and what a run shows of itself."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers import raises_one_line, run_python

from tilemoe.config import to_dict
from tilemoe.plots import run_figure
from tilemoe.train.checkpoints.folder import find_latest
from tilemoe.train.config import Recipe
from tilemoe.train.metrics import MetricsWriter, TensorBoard, WandB, read_metrics, truncate_metrics
from tilemoe.train.progress import Phases, Reporter, Speed, StepStats, TerminalReporter
from tilemoe.train.run import draw, train


def write_run(folder: Path, steps: int = 6) -> Path:
    writer = MetricsWriter(folder)
    for step in range(1, steps + 1):
        entropy = [1.0 - 0.1 * step, 0.5]
        numbers = {"nats_per_token": 5.0 / step, "tokens_per_second": 1000.0 * step, "router_entropy": entropy}
        writer.write("train", {"step": step, **numbers})
        if step % 2 == 0:
            loss = {"nats_per_token": 5.0 / step, "whole_split": step == steps}
            writer.write("eval", {"step": step, **loss, "tokens_per_expert": [[3, 1], [2, 2]]})
    writer.sync()
    writer.close()
    return folder / "metrics.jsonl"


@pytest.mark.parametrize("torn", [b"", b'{"kind": "train", "st'])
def test_resuming_cuts_to_the_checkpoint(tmp_path: Path, torn: bytes) -> None:
    path = write_run(tmp_path)
    with path.open("ab") as file:
        file.write(torn)
    (tmp_path / "copy").hardlink_to(path)
    copied = path.read_bytes()
    path.chmod(0o600)
    truncate_metrics(path, 4)
    assert (tmp_path / "copy").read_bytes() == copied
    assert path.stat().st_mode & 0o777 == 0o600
    assert [(r["kind"], r["step"]) for r in read_metrics(path)] == [
        ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4),
    ]  # fmt: skip
    assert path.read_bytes().endswith(b"}\n")
    truncate_metrics(path, 0)
    assert path.read_bytes() == b""
    truncate_metrics(tmp_path / "absent.jsonl", 3)
    assert not (tmp_path / "absent.jsonl").exists()


def test_a_record_of_the_first_release_has_the_present_names(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1, "loss": 2.5}\n')
    assert list(read_metrics(path)) == [{"kind": "train", "step": 1, "nats_per_token": 2.5}]


@pytest.mark.parametrize("line", [b"{oops}\n", b"[]\n", b'{"kind": "train"}\n', b'{"kind": "eval", "step": "1"}\n'])
def test_a_foreign_line_is_named_and_nothing_is_cut(tmp_path: Path, line: bytes) -> None:
    path = write_run(tmp_path, steps=2)
    content = path.read_bytes() + line
    path.write_bytes(content)
    for use in (lambda: list(read_metrics(path)), lambda: truncate_metrics(path, 9)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl line 4 .*move the file away"):
            use()
    assert path.read_bytes() == content


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, [TensorBoard(tmp_path, 1)])
    writer.write("train", {"step": 3, "nats_per_token": 2.5, "dead_experts": [0, 1], "tokens_per_expert": [[3, 1]]})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["train/nats_per_token", "train/dead_experts/0", "train/dead_experts/1"]
    assert [(event.step, event.value) for event in events.Scalars("train/dead_experts/1")] == [(3, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("train/nats_per_token")] == [(3, 2.5)]


def test_the_plot_tells_a_subset_from_the_whole_split(tmp_path: Path) -> None:
    axes = run_figure(list(read_metrics(write_run(tmp_path))), "title").axes[0]
    assert axes.get_ylabel() == "loss [nats/token]"
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    assert lines == {
        "training": [1, 2, 3, 4, 5, 6],
        "held-out, subset": [2, 4],
        "held-out, whole split": [6],
    }
    (tmp_path / "other").mkdir()
    axes = run_figure(list(read_metrics(write_run(tmp_path / "other", steps=2))), "title").axes[0]
    assert [line.get_label() for line in axes.get_lines()] == ["training", "held-out, whole split"]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.pop("nats_per_token"),
        lambda record: record.update(nats_per_token=10**400),
        lambda record: record.update(tokens_per_second="x"),
        lambda record: record.update(rank_load=3),
        lambda record: record.update(router_entropy=[1, 2, 3]),
    ],
)
def test_records_that_cannot_be_drawn_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = write_run(tmp_path)
    first, *others = path.read_text().splitlines()
    record = json.loads(first)
    change(record)
    path.write_text("\n".join([json.dumps(record), *others, ""]))
    with raises_one_line("metrics.jsonl cannot be drawn"):
        draw(tmp_path, "title")


@pytest.mark.parametrize(("name", "value"), [("router_entropy", 1), ("router_entropy", [1] * 9), ("nats_per_token", 1)])
def test_no_more_lines_are_drawn_than_a_run_has(tmp_path: Path, name: str, value: object) -> None:
    """matplotlib takes minutes for 100,000."""
    record = {"kind": "train", "step": 1, "nats_per_token": 5.0, "tokens_per_second": 9.0, name: [value] * 2000}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    with raises_one_line("metrics.jsonl cannot be drawn"):
        draw(tmp_path, "title")


def test_a_title_is_no_formula(tmp_path: Path) -> None:
    write_run(tmp_path)
    draw(tmp_path, "$" + r"\sqrt{" * 60 + "}" * 60 + "$")  # matplotlib's parser recurses
    draw(tmp_path, "$a_b$" + "c" * 100_000)


class FakeWandB(ModuleType):
    """Keeps what a run is started with, what it is told, and its end."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: list[dict[str, Any]] = []
        self.told: list[object] = []
        self.id, self.has_login = "a1b2", True

    def init(self, **options: Any) -> FakeWandB:
        if not self.has_login:
            raise self.Error("No API key\nconfigured.")
        self.started.append(options)
        return self

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.told.append((step, numbers))

    def finish(self) -> None:
        self.told.append("finished")


def test_weights_and_biases_gets_the_numbers_and_one_run(
    moe_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for steps in (3, 6):  # the second goes on
        recipe = replace(moe_recipe, train=replace(moe_recipe.train, steps=steps, wandb=True))
        train(recipe, find_latest(Path(recipe.train.out_dir)))
    first, second = fake.started
    assert (first["project"], first["name"], first["id"], first["resume"]) == ("tilemoe", "run", None, "allow")
    assert (second["id"], second["config"]) == ("a1b2", to_dict(recipe))
    assert fake.told[-1] == "finished"
    logged = [entry for entry in fake.told if isinstance(entry, tuple)]
    assert [step for step, numbers in logged if "train/nats_per_token" in numbers] == [1, 2, 3, 4, 5, 6]
    assert [step for step, numbers in logged if "eval/nats_per_byte" in numbers] == [2, 3, 4, 6]
    assert {"train/dead_experts/0", "train/expert_load/1"} <= logged[0][1].keys()
    fake.has_login = False
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with pytest.raises(ValueError, match=r"^train\.wandb: No API key configured; run wandb login, or set WANDB_MODE"):
        WandB(tmp_path / "run", recipe)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_without_an_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1}\n')
    with path.open("ab") as file:
        file.truncate(1 << 40)
    with raises_one_line(r"metrics\.jsonl line 2 is longer than any line of a run; move the file away"):
        list(read_metrics(path))


def stats(step: int, load: list[float]) -> StepStats:
    none, waste = [0.0] * len(load), [0.041] * len(load)
    return StepStats(step, 1000 * step, 1.23456, 0.0, 1e-3, 0.5, load, load, none, none, none, waste, none, none)


def drive(reporter: Reporter) -> None:
    reporter.start(0, 5)
    for step in range(1, 6):
        reporter.update(stats(step, [1.1, 1.5]), Speed(34_100.0), 61.0)
    reporter.say("held-out [bold]1.20[/bold]")
    reporter.stop()


def test_plain_lines_come_every_log_every_steps_and_at_the_end() -> None:
    stream = io.StringIO()
    drive(Reporter(stream, 2))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["2/5", "4/5", "5/5"]
    assert lines[0] == "step 2/5  loss 1.2346 nats/token  34.1k tokens/s  load 1.50x  pad 4.1%  eta 1:01"
    assert lines[-1] == "held-out [bold]1.20[/bold]"


def test_the_bar_shows_the_same_numbers() -> None:
    stream = Terminal()
    drive(TerminalReporter(stream))
    for text in ("step", "5/5", "loss 1.2346 nats/token", "34.1k tokens/s", "held-out [bold]1.20[/bold]"):
        assert text in stream.getvalue()


def test_phases_add_up_to_what_a_run_takes(moe_recipe: Recipe) -> None:
    begun = time.perf_counter()
    train(moe_recipe)
    took = time.perf_counter() - begun
    result = json.loads((moe_recipe.train.out_path / "result.json").read_bytes())
    (phases,) = result["phases"]
    assert list(phases) == [
        "checks", "data", "processes", "weights", "folder", "first step", "steps", "evaluation", "saves", "sample",
    ]  # fmt: skip
    assert took - 0.1 < sum(phases.values()) < took
    assert len(result["seconds_of_saves"]) == 2
    assert phases["saves"] == pytest.approx(sum(result["seconds_of_saves"]), abs=0.002)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads when a process was made from Linux' /proc")
def test_the_first_phases_begin_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the other's torchrun. The system counts in hundredths of a second."""
    code = (
        "import time; time.sleep(.2); from tilemoe.train.progress import Phases; p = Phases.since_command();"
        "p.end('imports'); print(*p.seconds, sum(p.seconds.values()), p.seconds['imports'])"
    )
    begun, age = time.perf_counter(), sum(Phases.since_command().seconds.values())
    assert age == 0.0, "no phase has ended, and nobody's torchrun has started this"
    name, together, imports = run_python(code).split()
    took = time.perf_counter() - begun
    assert (name, together) == ("imports", imports)
    assert 0.2 < float(imports) < took + 0.02
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first, _, together, imports = run_python(code).split()
    assert first == "torchrun"
    own = Phases.since_command()
    own.end("all")
    assert float(imports) < float(together) < own.seconds["all"] + 0.02
