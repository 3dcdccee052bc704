"""benchmarks/finetune.py: its folders are models that load, and the first step in 4 bit is the dequantised model's."""

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
