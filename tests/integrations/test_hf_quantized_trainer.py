"""TRL's SFTTrainer, and under it transformers' Trainer, over experts in 4 bit with PEFT's adapters."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from test_hf_quantized import EXPERTS
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from tilemoe.integrations.quantized import TilemoeConfig
from tilemoe.integrations.quantized_weight import FrozenWeight, quantized_weights
from tilemoe.testing import assert_equal

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_sft.py"))
STEPS = 4


def trained(base: Path, out: Path, tokenizer: Any, resume: Path | None = None) -> tuple[list[float], list[Tensor]]:
    """Losses of the steps, and the adapters: two sequences a step, one after the other, with checkpointing."""
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=TilemoeConfig("nf4"))
    settings = SFTConfig(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-2,
        max_length=32,
        assistant_only_loss=True,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        dataloader_pin_memory=False,
    )
    adapters = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS)
    trainer = SFTTrainer(
        model, settings, train_dataset=SCRIPT["sums"](), processing_class=tokenizer, peft_config=adapters
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    weights = [weight for _, _, weight in quantized_weights(trainer.model)]
    assert len(weights) == 4
    assert {type(weight) for weight in weights} == {FrozenWeight}
    found = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return [found[step] for step in sorted(found)], [p for p in trainer.model.parameters() if p.requires_grad]


@pytest.mark.usefixtures("registered")
def test_sft_accumulates_recomputes_and_resumes(tmp_path: Path, calls: list[Any]) -> None:
    torch.manual_seed(0)
    model, tokenizer = SCRIPT["small_model"]()
    model.save_pretrained(tmp_path / "base")
    losses, adapters = trained(tmp_path / "base", tmp_path / "out", tokenizer)
    assert len(calls) == STEPS * 2 * 2 * 2  # micro-batches, layers, and again in the backward
    resumed, again = trained(tmp_path / "base", tmp_path / "resumed", tokenizer, tmp_path / "out" / "checkpoint-2")
    assert resumed[-2:] == losses[-2:]
    assert_equal(again, adapters)
    assert losses[-1] < losses[0]
