"""benchmarks/finetune.py: its folders are models that load, and the first step in 4 bit is the dequantised model's."""

import argparse
import json
from pathlib import Path

import finetune
import pytest
import torch
from transformers import AutoModelForCausalLM

from tilemoe.bench import record
from tilemoe.models.huggingface import load_hf


@pytest.mark.parametrize(("case", "experts"), [("Qwen3-30B-A3B", "nf4_double"), ("gpt-oss-20b", "mxfp4")])
def test_a_folder_and_its_first_step(case: str, experts: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "DEVICE", "cpu")
    monkeypatch.setattr(finetune, "sources", lambda: [f"def f{number}(): return {number}\n" for number in range(4000)])
    folder = results / "model"
    finetune.main(["make", str(folder), "--case", case])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    if case == "Qwen3-30B-A3B":
        ids = torch.arange(12)[None]
        with torch.no_grad():
            torch.testing.assert_close(load_hf(folder)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    finetune.main(["first", str(folder), "--case", case, "--experts", experts, "--tokens", "32", "--length", "16"])
    (row,) = record.rows("finetune")
    assert row["loss_difference"] < 1e-3
    assert row["gradients_apart"] < 3e-2  # bf16
    assert 0 < row["noise"] < 3e-2, "as far as transformers' own experts are"


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(finetune, "DEVICE", "cpu")
    monkeypatch.setattr(finetune, "sources", lambda: ["def f(): return 1\n"])
    monkeypatch.setattr(finetune, "write", full)
    with pytest.raises(OSError, match="no space left"):
        finetune.main(["make", str(tmp_path), "--case", "Qwen3-30B-A3B"])
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_quality_trains_each_storage_on_the_batches_of_each_seed(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path, args: argparse.Namespace) -> record.Row:
        texts = [json.loads(line)["text"] for line in args.corpus.read_text().splitlines()]
        assert len(set(texts)) == len(texts) > 50
        return {"losses": [1.0], "heldout": [1.0], "out": args.out}

    monkeypatch.setattr(finetune, "train", train)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    finetune.main(["quality", str(tmp_path), "--seeds", "2", "--out", str(tmp_path / "runs")])
    rows = record.rows("finetune")
    expected = [(seed, experts) for seed in (0, 1) for experts in ("bf16", "nf4", "nf4_double")]
    assert [(row["seed"], row["experts"]) for row in rows] == expected
    assert len({row["out"] for row in rows}) == 6
    assert {(row["mode"], row["case"]) for row in rows} == {("quality", tmp_path.name)}
