"""TRL's SFTTrainer and DPOTrainer, and under them transformers' Trainer, over experts in 4 bit with PEFT's adapters."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from test_hf_quantized import EXPERTS
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tilemoe.integrations.quantized import TilemoeConfig, quantize_experts
from tilemoe.integrations.quantized_weight import FrozenWeight, quantized_weights
from tilemoe.testing import assert_equal

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_sft.py"))
STEPS = 4
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS, "learning_rate": 1e-2, "bf16": False, "use_cpu": True, "logging_steps": 1, "report_to": "none",
    "dataloader_pin_memory": False,
}  # fmt: skip


def trained(base: Path, out: Path, tokenizer: Any, resume: Path | None = None) -> tuple[list[float], list[Tensor]]:
    """Losses of the steps, and the adapters: two sequences a step, one after the other, with checkpointing."""
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=TilemoeConfig("nf4"))
    settings = SFTConfig(
        output_dir=str(out),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_length=32,
        assistant_only_loss=True,
        save_steps=2,
        **SETTINGS,
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


@pytest.mark.usefixtures("registered")
def test_dpo_comes_to_prefer_what_was_chosen(tmp_path: Path) -> None:
    """Its reference is the model without the adapters, which at first add nothing."""
    torch.manual_seed(0)
    model, tokenizer = SCRIPT["small_model"](router_aux_loss_coef=0.0)
    quantize_experts(model)
    settings = DPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, save_strategy="no", **SETTINGS)
    pairs = Dataset.from_list([{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}] * 8)
    adapters = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS)
    trainer = DPOTrainer(model, args=settings, train_dataset=pairs, processing_class=tokenizer, peft_config=adapters)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < 0.75 * losses[0]
