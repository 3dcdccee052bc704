"""Steps of transformers' models on CPU, tiny ones of the same architectures: their sizes, checks and rows."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import hf_step
import pytest
import torch

from tilemoe.bench import record
from tilemoe.integrations import transformers as integration

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def aside(results: Path) -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


# Experts' weights of all layers, in millions, from the models' published widths.
EXPERTS = {
    "Qwen3-30B-A3B": 4 * 128 * 3 * 2048 * 768,
    "OLMoE-1B-7B": 6 * 64 * 3 * 2048 * 1024,
    "Mixtral-8x7B": 2 * 8 * 3 * 4096 * 14336,
    "gpt-oss-20b": 4 * 32 * (3 * 2880 * 2880 + 3 * 2880),
    "GLM-4.5-Air": 2 * 128 * 3 * 4096 * 1408,
    "Granite-3b-a800m": 8 * 40 * 3 * 1536 * 512,
    "DeepSeek-V3": 256 * 3 * 7168 * 2048,
}


@pytest.mark.parametrize("name", hf_step.MODELS)
def test_models_have_their_real_experts_and_all_layers_are_served(name: str) -> None:
    case = hf_step.MODELS[name]
    model = hf_step.build(case, torch.device("meta"), torch.bfloat16)
    assert integration.use(model) == case.config["num_hidden_layers"]
    found = sum(each.numel() for key, each in model.named_parameters() if ".experts." in key)
    assert found == EXPERTS[name]
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", hf_step.MODELS)
def test_tiny_models_agree_and_every_parameter_has_its_group(name: str) -> None:
    subject = hf_step.make(hf_step.tiny(hf_step.MODELS[name]), CPU)
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


def test_what_runs_out_of_memory_is_recorded_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = hf_step.Subject.step

    def exhausted(self: hf_step.Subject, implementation: str) -> torch.Tensor:
        if implementation == "batched_mm":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 768.00 GiB. GPU 0 has less")
        return step(self, implementation)

    monkeypatch.setattr(hf_step.Subject, "step", exhausted)
    hf_step.main(["--device", "cpu", "--cases", "Mixtral-8x7B", "--rounds", "1", "--steps", "1", "--sequence", "8"])
    row = record.rows("hf_step")[-1]
    assert row["problem"] == "CUDA out of memory. Tried to allocate 768.00 GiB"
    assert "ms" not in row


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


def test_options_change_the_cases() -> None:
    options = {"batch": 1, "sequence": None, "attention": "flex_attention", "layers": 3, "vocabulary": 512}
    case = hf_step.cases_of(argparse.Namespace(device="cuda", **options), "gpt-oss-20b")["gpt-oss-20b"]
    assert (case.batch, case.sequence, case.attention) == (1, 1024, "flex_attention")
    assert (case.config["num_hidden_layers"], case.config["vocab_size"]) == (3, 512)
    with pytest.raises(SystemExit, match="no case called 'qwen'; known are all, Qwen3-30B-A3B"):
        hf_step.cases_of(argparse.Namespace(device="cuda", **options), "qwen")
