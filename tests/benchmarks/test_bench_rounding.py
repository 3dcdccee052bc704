"""Token rounding's benchmarks on toy cases: what they measure, record, print and draw without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import record
import token_rounding
import torch


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def rows_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_toy_is_measured_recorded_tabled_and_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--device", "cpu", "--rounds", "2", "--settle", "1", "--calls", "2"]
    token_rounding.main(["run", *common, "--cases", "toy-E8", "--modes", "nearest,down"])
    rows = {row["contestant"]: row for row in rows_of(results / "token_rounding.jsonl")}
    assert list(rows) == ["top-K", "nearest", "down", "full tiles"]
    for row in rows.values():
        assert row["case"] == "toy-E8"
        parts = [row[f"{part}_ms"]["median"] for part in token_rounding.PARTS]  # type: ignore[index]
        assert all(part >= 0 for part in parts)
        assert row["rows"] == rows["top-K"]["rows"] + row["added"] - row["dropped"]  # type: ignore[operator]
    assert rows["top-K"]["waste_percent"] > 0  # type: ignore[operator]
    assert rows["nearest"]["waste_percent"] == rows["full tiles"]["waste_percent"] == 0.0
    assert rows["down"]["added"] == 0
    assert rows["top-K"]["total_speedup"] == 1.0
    capsys.readouterr()
    token_rounding.main(["table"])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 3
    assert all(line.count("|") == table[0].count("|") for line in table)
    token_rounding.main(["plot", "--out", str(results)])
    assert (results / "token-rounding.svg").exists()


def test_waste_is_what_padding_adds() -> None:
    assert token_rounding.waste(torch.tensor([16, 32, 0]), 16) == 0.0
    assert token_rounding.waste(torch.tensor([8, 8]), 16) == 100.0


def test_ratios_and_recovered_padding() -> None:
    def sample(routing: float, experts: float) -> dict[str, float]:
        return {**dict.fromkeys(token_rounding.PARTS, 1e-9), "routing": routing, "experts": experts}

    samples = {"top-K": [sample(1.0, 10.0)], "nearest": [sample(1.5, 8.0)], "full tiles": [sample(0.0, 8.0)]}
    counts = dict.fromkeys(samples, torch.tensor([16, 16]))
    rows = {row["contestant"]: row for row in token_rounding.summarise(samples, counts, 16)}
    assert rows["nearest"]["recovered"] == pytest.approx(0.75)
    assert rows["nearest"]["total_speedup"] == pytest.approx(11 / 9.5, abs=1e-4)
    assert rows["nearest"]["routing_percent"] == pytest.approx(100 * 1.5 / 9.5, abs=1e-3)


def test_an_unknown_case_is_one_line(results: Path) -> None:
    with pytest.raises(SystemExit, match="no case called 'x'; known are toy-E8"):
        token_rounding.main(["run", "--device", "cpu", "--cases", "x"])
