"""Token rounding's benchmark on toy cases: what it measures, records and refuses to time, without a GPU."""

from pathlib import Path

import pytest
import token_rounding
import torch

import tilemoe
from tilemoe.bench import peers, record, timing
from tilemoe.config import ROUNDING_MODES, TokenRounding

TOY = ["--device", "cpu", "--rounds", "1", "--cases", "toy-E8"]


@pytest.fixture(autouse=True)
def short(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SUSTAINED_MS", 1.0)


def test_a_toy_is_measured_recorded_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    token_rounding.main([*TOY, "--modes", "nearest,down"])
    rows = {row["contestant"]: row for row in record.rows("token_rounding")}
    assert list(rows) == ["top-K", "nearest", "down"]
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


def layer_of(mode: str) -> tuple[tilemoe.MoE, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    shape = token_rounding.TOYS["toy-E8"]
    weights = peers.make_weights(shape, torch.device("cpu"), torch.float32)
    layer = token_rounding.build(shape, weights, TokenRounding(mode, 16), None)  # type: ignore[arg-type]
    x = torch.randn(shape.num_tokens, shape.hidden_size)
    return layer, x, torch.randn_like(x)


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_a_right_contestant_is_timed(mode: str) -> None:
    layer, x, do = layer_of(mode)
    assert token_rounding.problem_of(layer, x, do) is None


def test_a_wrong_mode_is_left_out_and_the_others_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = token_rounding.problem_of

    def only_down(layer: tilemoe.MoE, *args: object) -> str | None:
        rounding = layer.cfg.rounding
        wrong = rounding is not None and rounding.mode == "nearest"
        return "made up" if wrong else right(layer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(token_rounding, "problem_of", only_down)
    token_rounding.main([*TOY, "--modes", "nearest,down"])
    assert "nearest is left out: made up" in capsys.readouterr().out
    found = [row["contestant"] for row in record.rows("token_rounding")]
    assert found == ["top-K", "down"]
