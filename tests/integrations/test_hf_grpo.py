"""TRL's GRPOTrainer over tilemoe's experts: it samples from the model and trains it."""

import runpy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tilemoe.integrations import transformers as integration

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trl_sft.py"))
STEPS = 3


def count_of_a(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("a")) for completion in completions]


def steps_of(implementation: str, folder: Path) -> list[tuple[float, float, float]]:
    """Loss, reward and gradient norm of each step, from one seed."""
    torch.manual_seed(0)
    model, tokenizer = SCRIPT["small_model"]()
    model.set_experts_implementation(implementation)
    settings = GRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    prompts = Dataset.from_dict({"prompt": ["1+1=", "2+2="] * 4})
    trainer = GRPOTrainer(model, count_of_a, settings, train_dataset=prompts, processing_class=tokenizer)
    trainer.train()
    return [(entry["loss"], entry["reward"], entry["grad_norm"]) for entry in trainer.state.log_history[:STEPS]]


@pytest.mark.usefixtures("registered")
def test_grpo_takes_the_same_steps_as_with_eager_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, moe = [], integration.moe
    monkeypatch.setattr(integration, "moe", lambda *args, **more: calls.append(1) or moe(*args, **more))
    eager = steps_of("eager", tmp_path / "eager")
    assert not calls
    ours = steps_of("tilemoe", tmp_path / "tilemoe")
    assert len(calls) >= 2 * STEPS * 2  # sampled and trained by each of two layers
    assert any(reward for _, reward, _ in ours)
    assert len(ours) == STEPS
    for told, expected in zip(ours, eager, strict=True):
        assert told == pytest.approx(expected, rel=1e-3, abs=1e-5)
