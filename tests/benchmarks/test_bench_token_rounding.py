"""Token rounding's benchmark on toy cases: what it measures, records and refuses to time, without a GPU."""

from pathlib import Path

import pytest
import token_rounding

from tilemoe.bench import record, timing
from tilemoe.config import ROUNDING_MODES

TOY = ["--device", "cpu", "--rounds", "1", "--cases", "toy-E8"]


@pytest.fixture(autouse=True)
def short(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SUSTAINED_MS", 1.0)


def test_a_toy_is_measured_recorded_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Who is wrong would not be in the rows."""
    token_rounding.main([*TOY, "--modes", "all"])
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
