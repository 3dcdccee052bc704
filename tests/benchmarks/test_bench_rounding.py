"""Token rounding's benchmarks on toy cases: what they measure, record, print and draw without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import record
import rounding_quality
import token_rounding
import torch

from tilemoe.config import ROUNDING_MODES
from tilemoe.train.config import load_recipe


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


def small_recipe(folder: Path) -> None:
    """rounding-smoke on a text of its own, four steps long."""
    text = folder / "text"
    text.mkdir()
    for index in range(6):
        (text / f"{index}.txt").write_text(f"{index} tokens and {index + 1} experts. " * 60)
    recipe = json.loads((rounding_quality.RECIPES / "rounding-smoke.json").read_text())
    recipe["data"] |= {"corpus": str(text), "cache_dir": str(folder / "cache"), "heldout_every": 3}
    recipe["train"] |= {"steps": 4, "eval_batches": 2}
    (folder / "small.json").write_text(json.dumps(recipe))


def test_missing_runs_are_trained_recorded_and_not_repeated(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_recipe(results)
    monkeypatch.setattr(rounding_quality, "RECIPES", results)
    arguments = ["run", "--device", "cpu", "--recipes", "small", "--modes", "nearest,down", "--seeds"]
    rounding_quality.main([*arguments, "1"])
    rounding_quality.main([*arguments, "2"])
    rows = rows_of(results / "rounding_quality.jsonl")
    assert [(row["routing"], row["seed"]) for row in rows] == [
        (routing, seed) for seed in (0, 1) for routing in ("top-K", "nearest", "down")
    ]
    top_k, nearest, down = rows[:3]
    assert top_k["dropped_percent"] == top_k["added_percent"] == down["added_percent"] == 0
    assert down["dropped_percent"] > 0  # type: ignore[operator]
    assert len({row["heldout_nats"] for row in rows}) == len(rows)
    assert nearest["heldout_tokens"] == top_k["heldout_tokens"]
    capsys.readouterr()
    rounding_quality.main(["table"])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 3
    assert "±" in table[2]


def test_no_run_is_begun_that_would_end_too_late(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_recipe(results)
    monkeypatch.setattr(rounding_quality, "RECIPES", results)
    rounding_quality.main(["run", "--device", "cpu", "--recipes", "small", "--seconds", "1e-9"])
    assert not (results / "rounding_quality.jsonl").exists()


def test_entropy() -> None:
    assert rounding_quality.entropy([5, 5, 5, 5]) == pytest.approx(1.0)
    assert rounding_quality.entropy([7, 0, 0]) == 0.0


@pytest.mark.parametrize("path", sorted(rounding_quality.RECIPES.glob("*.json")), ids=lambda path: path.stem)
def test_recipes_give_each_expert_two_tiles(path: Path) -> None:
    recipe = load_recipe(str(path))
    moe = recipe.model.moe
    assert moe is not None
    assert moe.rounding is not None
    pairs = recipe.data.seq_len * recipe.data.batch_size * moe.num_experts_per_tok
    assert pairs / moe.num_experts >= 2 * moe.rounding.tile
    assert recipe.name == path.stem
    for routing in ("top-K", *ROUNDING_MODES):
        found = rounding_quality.variant(recipe, routing, 5)
        assert found.train.seed == 5
        assert found.model.moe is not None
        assert (found.model.moe.rounding is None) == (routing == "top-K")
