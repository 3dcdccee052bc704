"""TRL's GRPOTrainer over tilemoe's experts: it samples from the model and trains it."""

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from helpers import raises_one_line
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tilemoe.integrations.replay import record_routing

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = runpy.run_path(str(EXAMPLES / "trl_sft.py"))
STEPS = 3
PROMPTS = Dataset.from_dict({"prompt": ["1+1=", "20+20="] * 4})


def count_of_a(completions: list[str], **_: object) -> list[float]:
    return [float(completion.count("a")) for completion in completions]


def settings_of(folder: Path, **more: Any) -> GRPOConfig:
    """Two completions of six tokens of each prompt, on the CPU."""
    quiet = {"save_strategy": "no", "report_to": "none", "bf16": False, "use_cpu": True, "disable_tqdm": True}
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6}
    return GRPOConfig(output_dir=str(folder), **{**quiet, **sizes, **more})


def steps_of(implementation: str, folder: Path) -> list[tuple[float, float, float]]:
    """Loss, reward and gradient norm of each step, from one seed."""
    torch.manual_seed(0)
    model, tokenizer = SCRIPT["small_model"]()
    model.set_experts_implementation(implementation)
    settings = settings_of(
        folder,
        max_steps=STEPS,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(model, count_of_a, settings, train_dataset=PROMPTS, processing_class=tokenizer)
    trainer.train()
    return [(entry["loss"], entry["reward"], entry["grad_norm"]) for entry in trainer.state.log_history[:STEPS]]


@pytest.mark.usefixtures("registered")
def test_grpo_takes_the_same_steps_as_with_eager_experts(tmp_path: Path, calls: list[Any]) -> None:
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


class Seen(NamedTuple):
    """expert_ids (tokens, L, K), of all but padding: sampled, of a forward with replay, and of one without."""

    sampled: torch.Tensor
    replayed: torch.Tensor
    free: torch.Tensor


def moving(trainer: type, seen: list[Seen]) -> type:
    """``trainer`` with routers that move before every forward for old log-probabilities and for a loss."""

    class Moving(trainer):
        def _replayed(self, batch: dict[str, Any]) -> Any:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if name.endswith("gate.weight"):
                        parameter.add_(torch.randn_like(parameter))
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
            mask &= batch["expert_ids"][:, :, 0, 0] >= 0  # each sequence's last token was in no forward of sampling
            tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            with record_routing(self.model) as free, torch.no_grad():
                self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
            return self.checked(super()._replayed(batch), batch, mask, free)

        @contextmanager
        def checked(self, replay: Any, batch: dict[str, Any], mask: torch.Tensor, free: Any) -> Iterator[None]:
            with record_routing(self.model) as record, replay:
                yield
            found = [each.expert_ids(len(mask)).permute(1, 2, 0, 3)[mask] for each in (record, free)]
            seen.append(Seen(batch["expert_ids"][mask], *found))

    return Moving


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 2),
        # 2 micro-batches a step, used in 2 of them: 2 for old log-probabilities, 4 for steps.
        ({"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "beta": 0.1}, 6),
        ({"pad_to_multiple_of": 8}, 2),
    ],
    ids=["plain", "iterations", "multiple"],
)
def test_grpo_trains_each_token_with_the_experts_that_it_was_sampled_with(
    example: dict[str, Any], tmp_path: Path, changes: dict[str, Any], forwards: int
) -> None:
    """Routers that move between sampling and training, checkpointing and prompts of two lengths notwithstanding."""
    seen: list[Seen] = []
    made, tokenizer = SCRIPT["small_model"]()
    made.save_pretrained(tmp_path / "base")  # where TRL finds the reference model
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", experts_implementation="tilemoe")
    settings = settings_of(tmp_path, max_steps=2, **changes)
    assert settings.gradient_checkpointing
    trainer = moving(example["ReplayTrainer"], seen)(
        model, count_of_a, settings, train_dataset=PROMPTS, eval_dataset=PROMPTS, processing_class=tokenizer
    )
    trainer.train()
    assert len(seen) == forwards
    trainer.evaluate()
    assert len(seen) > forwards
    for each in seen:
        assert torch.equal(each.replayed, each.sampled)
        assert not torch.equal(each.free, each.sampled)


@pytest.mark.usefixtures("registered")
def test_the_old_log_probabilities_are_those_of_the_first_forward_that_trains(
    example: dict[str, Any], tmp_path: Path
) -> None:
    """They are of the same weights and, replayed, of the same experts: all ratios are 1, and no token is clipped."""
    model, tokenizer = SCRIPT["small_model"]()
    settings = settings_of(tmp_path, max_steps=1, num_iterations=2)
    found = []

    class Kept(example["ReplayTrainer"]):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, *args: Any, **more: Any) -> Any:
            out = super()._get_per_token_logps_and_entropies(*args, **more)
            found.append(out[0].detach())
            return out

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> torch.Tensor:
            loss = super().compute_loss(model, inputs, *args, **more)
            mask = inputs["completion_mask"].bool()
            torch.testing.assert_close(found[-1][mask], inputs["old_per_token_logps"][mask], rtol=1e-5, atol=1e-5)
            return loss

    Kept(model, count_of_a, settings, train_dataset=PROMPTS, processing_class=tokenizer).train()
    assert len(found) == 3  # TRL's, ours, the step's


@pytest.mark.usefixtures("registered")
def test_what_samples_otherwise_is_refused(example: dict[str, Any], tmp_path: Path) -> None:
    model, tokenizer = SCRIPT["small_model"]()
    with raises_one_line("leave rollout_func out"):
        example["ReplayTrainer"](
            model, count_of_a, settings_of(tmp_path), processing_class=tokenizer, rollout_func=lambda *_: {},
            train_dataset=PROMPTS,
        )  # fmt: skip
    for more in ({"num_beams": 2, "do_sample": False}, {"use_cache": False}):
        settings = settings_of(tmp_path, max_steps=1, generation_kwargs=more)
        with raises_one_line("sample with a cache and without beams"):
            example["ReplayTrainer"](
                model, count_of_a, settings, train_dataset=PROMPTS, processing_class=tokenizer
            ).train()


@pytest.mark.usefixtures("registered")
def test_the_example_runs(example: dict[str, Any], tmp_path: Path) -> None:
    """A model that has an auxiliary loss, as exported runs have, and prompts of several lengths."""
    for saved in SCRIPT["small_model"](output_router_logits=True):
        saved.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{"1" * length}"}}\n' for length in range(1, 9)))
    options = ["--model", tmp_path / "model", "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "run"]
    sizes = ["--steps", "2", "--new-tokens", "4", "--batch-size", "8"]
    assert len(example["main"]([*map(str, options), *sizes])) == 2
