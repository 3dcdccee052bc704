"""The trainer's speed: jobs of two processes as users start them, and what they record."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import train_throughput

from tilemoe.bench import record
from tilemoe.config import to_dict
from tilemoe.train.config import Recipe, load_recipe


def run(*arguments: str) -> None:
    train_throughput.run(train_throughput.parse([*arguments]))


@pytest.fixture
def recipe() -> Recipe:
    """cpu-4 without expert parallelism."""
    found = load_recipe("cpu-4")
    train = replace(found.train, threads=0)
    return replace(found, name="small", train=train, parallel=replace(found.parallel, expert=1))


@pytest.fixture
def path(results: Path, recipe: Recipe) -> Path:
    """The recipe's file."""
    found = results / "small.json"
    found.write_text(json.dumps(to_dict(recipe)))
    return found


@pytest.mark.thorough
@pytest.mark.dist
def test_jobs_are_measured_and_recorded(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two processes through torchrun, then one in this process: the same steps by ours and by PyTorch alone."""
    options = ["--recipe", path, "--peers", "tilemoe,scattermoe,grouped_mm", "--steps", 2, "--warmup", 1]
    arguments = [str(option) for option in [*options, "--device", "cpu"]]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    script = str(Path(train_throughput.__file__).resolve())
    subprocess.run([sys.executable, *launcher, script, *arguments, "--accumulation", "2"], check=True)
    said = capfd.readouterr().out
    assert "scattermoe is left out: not importable here" in said
    assert said.count("tilemoe: step 3, loss") == 1, "only rank 0 speaks"
    run(*arguments)
    rows = record.rows("train_throughput")
    assert [(row["contestant"], row["processes"], row["sharded"]) for row in rows] == [
        ("tilemoe", 2, True), ("grouped_mm", 2, True), ("tilemoe", 1, False), ("grouped_mm", 1, False),
    ]  # fmt: skip
    for ours, theirs in (rows[:2], rows[2:]):
        for what in ("losses", "grad_norms"):
            assert len(ours[what]) == 3
            assert theirs[what] == pytest.approx(ours[what], rel=1e-3)
    for row in rows:
        assert row["steps"] == 2
        assert row["tokens_per_second"] > 0
        assert row["mfu"] is row["peak_bytes"] is None, "nobody states a CPU's rate"
        assert row["commit"] == "0123456789ab"
    assert [row["accumulation"] for row in rows] == [2, 2, 1, 1]


def test_precisions_take_turns_on_the_same_weights(
    path: Path, recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recipe.model.moe is not None
    widths = replace(recipe.model.moe, hidden_size=128, intermediate_size=128)  # that FP8 takes
    model = replace(recipe.model, hidden_size=128, moe=widths)
    path.write_text(json.dumps(to_dict(replace(recipe, model=model))))
    peers = ["tilemoe", "tilemoe[fp8]", "tilemoe[fp8+dense]"]
    options = ["--peers", ",".join(peers), "--rounds", "2", "--steps", "1", "--warmup", "1", "--device", "cpu"]
    run("--recipe", str(path), *options)
    turns = [line.partition(": step")[0] for line in capsys.readouterr().out.splitlines() if ": step " in line]
    assert turns == peers * 2 + peers[::-1], "each warmed up, then two rounds"
    rows = record.rows("train_throughput")
    assert [(row["contestant"], row["rounds"], row["steps"]) for row in rows] == [(name, 2, 2) for name in peers]
    firsts = [row["losses"][0] for row in rows]
    assert len(set(firsts)) == 3, "each computes something else"
    assert firsts == pytest.approx([firsts[0]] * 3, rel=1e-3)
    with pytest.raises(ValueError, match="no precision called 'fp4'; known are bf16, fp8, fp8"):
        train_throughput.peer_and_recipe("tilemoe[fp4]", recipe)
