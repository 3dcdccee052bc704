"""Steps of transformers' models on CPU, tiny ones of the same architectures: their sizes, checks and rows."""

from collections.abc import Iterator
from pathlib import Path

import hf_step
import pytest
import torch

from tilemoe.bench import record
from tilemoe.integrations import transformers as integration


@pytest.fixture(autouse=True)
def aside(results: Path) -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


@pytest.mark.parametrize("name", hf_step.MODELS)
def test_tiny_models_agree_and_every_parameter_has_its_group(name: str) -> None:
    case = hf_step.tiny(hf_step.MODELS[name])
    subject = hf_step.make(case, torch.device("cpu"))
    assert integration.use(subject.model) == case.config["num_hidden_layers"]
    found = hf_step.agree(subject, ["tilemoe"])
    assert list(found) == ["grouped_mm", "tilemoe", "eager"]
    assert found["grouped_mm"]["loss_difference"] == 0
    ours = found["tilemoe"]
    assert ours["loss_difference"] < 2e-3
    assert all(0 < difference < 0.1 for difference in ours["grad_difference"].values())


def test_step_records_every_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    hf_step.main(["--device", "cpu", "--cases", "gpt-oss-20b", "--rounds", "1", "--steps", "1", "--sequence", "16"])
    rows = {row["implementation"]: row for row in record.rows("hf_step")}
    assert list(rows) == ["tilemoe", "grouped_mm", "batched_mm"]
    for row in rows.values():
        assert row["problem"] is None
        assert (row["batch"], row["sequence"], row["attention"]) == (2, 16, "eager")
        assert {"ms", "tokens_per_s", "loss", "grad_difference", "transformers", "commit"} <= row.keys()
    ours = rows["tilemoe"]
    assert ours["bar"] == 1.35
    assert ours["held"] == (ours["ratio"] >= 1.35)
    assert ours["noise"]["grad_difference"].keys() == {"experts", "router", "rest"}
    assert "of 1.35 asked" in capsys.readouterr().out


def test_a_bar_is_held_by_time_and_memory() -> None:
    case = hf_step.MODELS["OLMoE-1B-7B"]
    agreed = {
        name: {"problem": None, "loss": 1.0, "grad_difference": {}} for name in ("tilemoe", "grouped_mm", "eager")
    }
    names = ["tilemoe", "grouped_mm"]

    def held(ours_ms: float, ours_bytes: int) -> bool:
        ms = {"tilemoe": [ours_ms] * 3, "grouped_mm": [3.0] * 3}
        return hf_step.rows_of(case, agreed, ms, {"tilemoe": ours_bytes, "grouped_mm": 10}, names)[0]["held"]

    assert held(2.0, 10)
    assert not held(2.1, 10)
    assert not held(2.0, 11)
