"""Three scripts of benchmarks/ on small sizes and a CPU: expert parallelism, log-probabilities and token rounding."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import expert_parallel
import log_probs
import pytest
import token_rounding
from ranks import run_on_ranks

from tilemoe.bench import record, timing
from tilemoe.config import ROUNDING_MODES
from tilemoe.integrations import transformers as integration
from tilemoe.shape import MoEShape

SHAPE = MoEShape(64, 32, 16, 8, 3)


def check_row() -> None:
    options = {"rounds": 2, "calls": 1, "exchange": "auto", "keep_received": False, "link_gb_per_s": 0.001}
    row = expert_parallel.measure(SHAPE, argparse.Namespace(**options))
    assert row["ranks"] == 2
    # Nearly every token has an expert on the other process: twice T d elements out, twice back, of two bytes.
    most = 4 * 64 * 32 * 2
    assert 0.7 * most < row["bytes"] <= most
    assert row["link_ms"] == pytest.approx(row["bytes"] / 1e3)
    assert row["bound_ms"] == pytest.approx(row["ms"]["compute"][0] + row["link_ms"], rel=1e-3)
    assert row["over_bound"] == pytest.approx(sum(row["ms"]["eager"]) / row["bound_ms"], rel=1e-2)


@pytest.mark.dist
def test_a_row_of_two_processes(tmp_path: Path) -> None:
    assert run_on_ranks([check_row], 2, tmp_path) == {"check_row": ""}


@pytest.fixture
def registered(results: Path) -> Iterator[None]:
    """What is registered with transformers is gone after."""
    yield
    integration.unregister()


@pytest.mark.usefixtures("registered")
def test_sampling_and_training_differ_by_rounding_alone() -> None:
    log_probs.main(["--sequences", "4", "--prompt-tokens", "8", "--new-tokens", "6", "--teach", "1"])
    found = record.rows("grpo")
    rows = [row for row in found if row["mode"] == "log_probs"]
    experts = [f"experts, {program}" for program in ("transformers", "tilemoe", "tilemoe, fp8")]
    expected = [("dense, transformers", False), *((name, replay) for name in experts for replay in (False, True))]
    assert [(row["model"], row["replay"]) for row in rows] == expected
    for row in rows:  # another token's log-probability would be off by a nat
        assert row["mean"] < 0.05 < 1 < row["nats_per_token"]
    whole = [row for row in found if row["mode"] == "parts"]
    assert [row["model"] for row in whole] == ["experts, tilemoe", "experts, tilemoe, fp8"]
    assert {"norm", "router", "router and experts", "projection", "head", "attention"} <= whole[0].keys()


@pytest.mark.usefixtures("results")
def test_a_toy_is_measured_recorded_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is wrong would not be in the rows."""
    monkeypatch.setattr(timing, "SUSTAINED_MS", 1.0)
    token_rounding.main(["--device", "cpu", "--rounds", "1", "--cases", "toy-E8", "--modes", "all"])
    rows = {row["contestant"]: row for row in record.rows("token_rounding")}
    assert list(rows) == ["top-K", *ROUNDING_MODES]
    for row in rows.values():
        assert (row["case"], row["kernels"], row["kernel_set"]) == ("toy-E8", "chosen", "torch")
        for what in (*token_rounding.WHOLE, *token_rounding.PARTS, "total"):
            assert row[f"{what}_ms"]["median"] > 0
        assert row["rows"] == rows["top-K"]["rows"] + row["added"] - row["dropped"]
        assert row["host_ms"] > 0
    assert rows["top-K"]["waste_percent"] > rows["nearest"]["waste_percent"] == rows["down"]["added"] == 0
    assert rows["top-K"]["total_speedup"] == 1.0
    lines = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if ": round " not in line]
    assert [line for line in lines if " chosen " in line] == [f"toy-E8 chosen {name}" for name in rows]
