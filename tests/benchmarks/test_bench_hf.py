"""The benchmarks of transformers' models on CPU, tiny ones of the same architectures: checks, rows and reports."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import hf_cases
import hf_finetune
import hf_step
import profiles
import pytest
import torch
from torch import nn

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


@pytest.mark.parametrize("name", hf_cases.MODELS)
def test_models_have_their_real_experts_and_all_layers_are_served(name: str) -> None:
    case = hf_cases.MODELS[name]
    model = hf_cases.build(case, torch.device("meta"), torch.bfloat16)
    assert integration.use(model) == case.config["num_hidden_layers"]
    found = sum(each.numel() for key, each in model.named_parameters() if ".experts." in key)
    assert found == EXPERTS[name]
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", hf_cases.MODELS)
def test_tiny_models_agree_and_every_parameter_has_its_group(name: str) -> None:
    subject = hf_step.make(hf_cases.tiny(hf_cases.MODELS[name]), CPU)
    found = hf_step.agree(subject, ["tilemoe"], exact=True)
    assert list(found) == ["grouped_mm", "tilemoe", "eager"]
    assert found["grouped_mm"]["loss_difference"] == 0
    ours, theirs = found["tilemoe"], found["grouped_mm"]
    assert ours["loss_difference"] < 2e-3
    assert all(0 < difference < 0.1 for difference in ours["grad_difference"].values())
    assert all(ours["grad_error"][group] < 1.5 * error for group, error in theirs["grad_error"].items())


def test_a_difference_is_seen_in_its_group() -> None:
    subject = hf_step.make(hf_cases.tiny(hf_cases.MODELS["Qwen3-30B-A3B"]), CPU)
    _, right = hf_step.gradients(subject, "grouped_mm")
    for key, group in (("mlp.experts.down_proj", "experts"), ("mlp.gate.weight", "router"), ("q_proj.weight", "rest")):
        name = next(name for name in right if name.endswith(key))
        found = hf_step.difference({**right, name: 1.5 * right[name]}, right)
        assert {each for each, error in found.items() if error > 0} == {group}


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
    capsys.readouterr()
    hf_step.main(["--report"])
    printed = capsys.readouterr().out
    assert "of 1.35 asked" in printed
    assert len(printed.splitlines()) == 3


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
    case = hf_cases.MODELS["OLMoE-1B-7B"]
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


def test_a_profile_is_printed_and_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profiles, "of_kernels", lambda work: [(type(work()).__name__, 2.0, 1)])
    hf_step.main(["--device", "cpu", "--profile", "OLMoE-1B-7B", "--sequence", "8"])
    assert "OLMoE-1B-7B, grouped_mm: 2.00 ms of kernels" in capsys.readouterr().out
    (path,) = (record.RESULTS / "profiles").iterdir()
    assert path.read_text().count("Tensor") == 2


FINETUNE = ("--device", "cpu", "--steps", "4", "--batch", "2", "--sequence", "24", "--layers", "1")


def test_finetuning_records_runs_and_what_lies_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    hf_finetune.main([*FINETUNE])
    *runs, comparison = record.rows("hf_finetune")
    assert [row["run"] for row in runs] == ["tilemoe", "grouped_mm", "eager", "reversed", "fp32"]
    assert all(len(row["losses"]) == 4 and row["ms_per_step"] > 0 for row in runs)
    assert len(comparison["apart"]) == 10
    assert comparison["apart"]["tilemoe~grouped_mm"]["max"] < 0.02  # the same weights, the same batches
    assert comparison["apart"]["grouped_mm~eager"]["rms"] <= comparison["apart"]["grouped_mm~eager"]["max"]
    assert isinstance(comparison["held"], bool)
    assert "within fp32's distance" in capsys.readouterr().out


def test_runs_are_held_against_references_alone() -> None:
    losses = {"tilemoe": [1.0, 1.1], "grouped_mm": [1.0, 1.0], "eager": [1.0, 1.2], "fp32": [1.0, 1.05]}
    found = hf_finetune.compare(losses)
    assert found["apart"]["tilemoe~grouped_mm"] == {
        "max": pytest.approx(0.1),
        "rms": pytest.approx(0.1 / 2**0.5, abs=1e-6),
    }
    assert found["held"] is True  # eager is 0.2 away
    assert found["held_in_bf16"] is False
    assert hf_finetune.compare({"tilemoe": [1.0], "fp32": [1.0]})["held"] is None


def test_windows_are_different_text() -> None:
    windows = hf_finetune.corpus_windows(8, 32)
    assert all(window["input_ids"].shape == (32,) and int(window["input_ids"].max()) < 256 for window in windows)
    assert len({bytes(window["input_ids"].tolist()) for window in windows}) == 8
    with pytest.raises(SystemExit, match="fewer steps"):
        hf_finetune.corpus_windows(1 << 20, 1 << 10)


def test_the_initial_model_is_left_as_it_was() -> None:
    options = argparse.Namespace(device="cpu", layers=1, batch=2, sequence=16, steps=2, lr=1e-3)
    initial: nn.Module = hf_cases.build(hf_finetune.model_of(options), CPU, torch.bfloat16)
    integration.use(initial)
    before = {name: each.clone() for name, each in initial.state_dict().items()}
    hf_finetune.train(hf_finetune.RUNS["tilemoe"], initial, hf_finetune.corpus_windows(4, 16), options)
    assert all(torch.equal(each, before[name]) for name, each in initial.state_dict().items())
