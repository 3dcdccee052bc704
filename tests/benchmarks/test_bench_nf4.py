"""The comparison of 4-bit experts with bf16's on a toy: what is recorded, and that a wrong layer is not timed."""

from pathlib import Path

import nf4_adapters
import pytest

from tilemoe.bench import record


def test_rows_of_a_toy(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nf4_adapters.main(["--device", "cpu", "--rounds", "2", "--milliseconds", "1", "--spell", "1"])
    plain, ours = record.rows(nf4_adapters.NAME)
    assert (plain["storage"], ours["storage"]) == ("bf16", "nf4")
    for row in (plain, ours):
        assert row["problem"] is None
        assert row["errors"].keys() >= {"o", "dx", "experts.up_a", "experts.down_b"}
        assert row["ms"]["median"] > 0
    assert ours["bytes"] == 0.2812
    assert ours["held"] == (ours["speed"] >= nf4_adapters.LEAST_SPEED)
    capsys.readouterr()
    nf4_adapters.main(["--report"])
    assert f"speed {ours['speed']:.3f}, bytes 0.281" in capsys.readouterr().out


def test_what_is_wrong_is_recorded_and_not_timed(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4_adapters, "LIMIT", 1e-6)
    nf4_adapters.main(["--device", "cpu"])
    for row in record.rows(nf4_adapters.NAME):
        assert row["problem"].endswith("is wrong")
        assert "ms" not in row


def test_an_unknown_size_is_one_line() -> None:
    with pytest.raises(SystemExit, match="no size called 'OLMoE'; known are all, toy"):
        nf4_adapters.main(["--device", "cpu", "--sizes", "OLMoE"])
