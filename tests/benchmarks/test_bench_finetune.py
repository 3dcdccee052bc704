"""benchmarks/finetune.py: its folders are models that load."""

from pathlib import Path

import finetune
import pytest
import torch
from transformers import AutoModelForCausalLM

from tilemoe.models.huggingface import load_hf


@pytest.mark.parametrize("case", ["Qwen3-30B-A3B", "gpt-oss-20b"])
def test_a_folder_is_a_model(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "DEVICE", "cpu")
    monkeypatch.setattr(finetune, "sources", lambda: [f"def f{number}(): return {number}\n" for number in range(4000)])
    folder = tmp_path / "model"
    finetune.main(["make", str(folder), "--case", case])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    if case == "Qwen3-30B-A3B":
        ids = torch.arange(12)[None]
        with torch.no_grad():
            torch.testing.assert_close(load_hf(folder)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
