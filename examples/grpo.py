"""GRPO with routing replay: transformers samples and its experts are recorded, TRL's GRPOTrainer trains the same ones.

    pip install 'tilemoe[lora]' trl datasets
    python examples/grpo.py                                              # a small random Qwen3-MoE, on any machine
    python examples/grpo.py --model FOLDER --prompts prompts.jsonl --steps 100 --lr 1e-5

`ReplayTrainer` is what you copy; the rest is ordinary TRL code. benchmarks/log_probs.py measures what replay changes.

B sequences · S tokens of prompt and completion · L MoE layers · K experts per token
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset, load_dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_sft import small_model

from tilemoe.integrations import transformers as tilemoe_transformers
from tilemoe.integrations.replay import record_routing, replay_routing


class ReplayTrainer(GRPOTrainer):
    """Trains each token with the experts that it was sampled with. For ``num_iterations=1``, without tools, images
    or evaluation: then the old log-probabilities are those of the forward that trains.
    """

    def _generate_single_turn(self, *args: Any, **more: Any) -> Any:
        with record_routing(self.model) as self.record:
            return super()._generate_single_turn(*args, **more)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        if "old_per_token_logps" in out:
            raise ValueError("replay needs num_iterations=1 and steps_per_generation=gradient_accumulation_steps")
        ids = self.record.expert_ids(len(out["prompt_ids"]))  # (L, B, S - 1, K): none of the last token
        out["expert_ids"] = F.pad(ids, (0, 0, 0, 1)).permute(1, 2, 0, 3)  # TRL shuffles and splits along B
        return out

    def training_step(self, *args: Any, **more: Any) -> Tensor:
        with ExitStack() as self.replay:  # around the backward, too: checkpointing repeats the forward there
            return super().training_step(*args, **more)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> Tensor:
        if not self.model.training:
            raise ValueError("experts are replayed in training alone; leave eval_dataset out")
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask[:, -1] = 0
        ids = inputs["expert_ids"].permute(2, 0, 1, 3)
        self.replay.enter_context(replay_routing(self.model, ids, mask))
        return super().compute_loss(model, inputs, *args, **more)


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """A reward that any model can learn."""
    return [completion.count("e") / max(len(completion), 1) for completion in completions]


def main(arguments: list[str] | None = None) -> list[float]:
    """The mean rewards of the steps."""
    parser = argparse.ArgumentParser(description="GRPO of a transformers MoE model with routing replay.")
    parser.add_argument("--model", help="a name on the hub or a folder; none: a small random Qwen3-MoE")
    parser.add_argument("--prompts", type=Path, help='JSONL of "prompt"; none: sums of two digits')
    parser.add_argument("--out", default="runs/grpo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(arguments)

    tilemoe_transformers.register()
    if options.model is None:
        model, tokenizer = small_model()
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(  # in bf16, small steps would be lost
            options.model, dtype=torch.float32, experts_implementation="tilemoe"
        )
    if options.prompts is None:
        prompts = Dataset.from_dict({"prompt": [f"{left} + {right}?" for left in range(10) for right in range(10)]})
    else:
        prompts = load_dataset("json", data_files=str(options.prompts), split="train")
    settings = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        num_generations=4,
        max_completion_length=options.new_tokens,
        learning_rate=options.lr,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    trainer = ReplayTrainer(model, share_of_e, settings, train_dataset=prompts, processing_class=tokenizer)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


if __name__ == "__main__":
    rewards = main()
    print(f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}")
