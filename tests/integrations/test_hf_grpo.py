"""TRL's GRPOTrainer over tilemoe's experts: it samples from the model and trains it."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tilemoe.integrations import transformers as integration
from tilemoe.integrations.replay import record_routing

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = runpy.run_path(str(EXAMPLES / "trl_sft.py"))
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


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """examples/grpo.py, beside which trl_sft.py is."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / "grpo.py"))


@pytest.mark.usefixtures("registered")
def test_grpo_trains_each_token_with_the_experts_that_it_was_sampled_with(
    example: dict[str, Any], tmp_path: Path
) -> None:
    """Routers that move between sampling and training, checkpointing and prompts of two lengths notwithstanding."""
    seen = []

    class Moving(example["ReplayTrainer"]):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> torch.Tensor:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.endswith("gate.weight"):
                        parameter.add_(torch.randn_like(parameter))
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)[:, :-1].bool()
            tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            with record_routing(model) as free, torch.no_grad():
                model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
            with record_routing(model) as record:
                loss = super().compute_loss(model, inputs, *args, **more)
            found = [each.expert_ids(len(mask)).permute(1, 2, 0, 3)[:, :-1][mask] for each in (record, free)]
            seen.append((inputs["expert_ids"][:, :-1][mask], *found))
            return loss

    model, tokenizer = SCRIPT["small_model"]()
    settings = GRPOConfig(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=6, save_strategy="no", report_to="none", bf16=False, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    assert settings.gradient_checkpointing
    prompts = Dataset.from_dict({"prompt": ["1+1=", "20+20="] * 4})
    trainer = Moving(model, count_of_a, settings, train_dataset=prompts, processing_class=tokenizer)
    trainer.train()
    assert len(seen) == 2
    for sampled, trained, free in seen:
        assert torch.equal(trained, sampled)
        assert not torch.equal(free, sampled)
    with pytest.raises(ValueError, match="replayed in training alone; leave eval_dataset out"):
        trainer.evaluate(prompts)


@pytest.mark.usefixtures("registered")
def test_the_example_runs(example: dict[str, Any], tmp_path: Path) -> None:
    options = ["--steps", "2", "--new-tokens", "4", "--batch-size", "4", "--out", str(tmp_path)]
    assert len(example["main"](options)) == 2
