"""GRPO with routing replay: experts chosen while transformers samples are recorded, and TRL's GRPOTrainer uses them.

    pip install '.[lora]' trl datasets
    python examples/grpo.py                                              # a small random Qwen3-MoE, on any machine
    python examples/grpo.py --model FOLDER --prompts prompts.jsonl --steps 100 --lr 1e-5

Copy `ReplayTrainer`; the rest is ordinary TRL code. benchmarks/log_probs.py measures what replay changes.

B sequences · S tokens of prompt and completion · L MoE layers · K experts per token
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, ExitStack
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
    """Trains each token with the experts that it was sampled with; the old log-probabilities use these, too.

    A reference model (``beta``) chooses its own experts. ValueError: the settings do not sample by one `generate`.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for name in ("use_vllm", "use_transformers_continuous_batching", "tools", "rollout_func"):
            if getattr(self, name):
                raise ValueError(f"experts are recorded while one generate samples; leave {name} out")

    def _generate_single_turn(self, *args: Any, **more: Any) -> Any:
        with record_routing(self.model) as self.record:
            return super()._generate_single_turn(*args, **more)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        ids = self.record.expert_ids(len(out["prompt_ids"]))  # (L, B, S - 1, K): the last token has none
        padding = out["prompt_ids"].shape[1] + out["completion_ids"].shape[1] - ids.shape[2]
        if padding < 1:
            raise ValueError("tokens were recorded more than once; sample with a cache and without beams")
        out["expert_ids"] = F.pad(ids, (0, 0, 0, padding), value=-1).permute(1, 2, 0, 3)  # TRL splits along B
        if "old_per_token_logps" in out:  # with num_iterations > 1; TRL computed them with newly chosen experts
            out["old_per_token_logps"] = self._old_log_probs(out)
        return out

    @torch.no_grad()
    def _old_log_probs(self, batch: dict[str, Any]) -> Tensor:
        """The completions' log-probabilities (B, completion tokens), computed a micro-batch at a time."""
        found, size = [], self.args.per_device_train_batch_size
        for start in range(0, len(batch["prompt_ids"]), size):
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "expert_ids")
            part = {name: batch[name][start : start + size] for name in names}
            with self._replayed(part):
                tokens, mask = (
                    torch.cat([part[f"prompt_{of}"], part[f"completion_{of}"]], 1) for of in ("ids", "mask")
                )
                new = part["completion_ids"].shape[1]
                found.append(self._get_per_token_logps_and_entropies(self.model, tokens, mask, new)[0])
        return torch.cat(found)

    def _replayed(self, batch: dict[str, Any]) -> AbstractContextManager[None]:
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).bool()
        mask &= batch["expert_ids"][:, :, 0, 0] >= 0
        return replay_routing(self.model, batch["expert_ids"].permute(2, 0, 1, 3), mask)

    def training_step(self, *args: Any, **more: Any) -> Tensor:
        with ExitStack() as self.replay:  # includes the backward, where checkpointing repeats the forward
            return super().training_step(*args, **more)

    def prediction_step(self, *args: Any, **more: Any) -> Any:
        with ExitStack() as self.replay:
            return super().prediction_step(*args, **more)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> Tensor:
        self.replay.enter_context(self._replayed(inputs))
        return super().compute_loss(model, inputs, *args, **more)


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """A reward that any model can learn."""
    return [completion.count("e") / max(len(completion), 1) for completion in completions]


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the mean reward of each step."""
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
        model = AutoModelForCausalLM.from_pretrained(  # fp32, because bf16 would lose small steps
            options.model, dtype=torch.float32, experts_implementation="tilemoe"
        )
    model.config.output_router_logits = False  # else transformers' generate fails on prompts of different lengths
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
