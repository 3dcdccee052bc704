"""Fine-tune a mixture-of-experts model on conversations: TRL's SFTTrainer, PEFT's adapters, tilemoe's experts.

    pip install '.[lora]' trl
    python examples/trl_sft.py                                       # a small random Qwen3-MoE, on any machine
    python examples/trl_sft.py --model Qwen/Qwen3-30B-A3B --data chat.jsonl --seq-len 2048

The lines that matter are ``register()`` and ``experts_implementation="tilemoe"``; the rest is ordinary TRL code. The
data is JSONL of ``messages``, and the loss counts only the assistant's turns. A model's chat template marks these with
``{% generation %}``; TRL has such templates for some models.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from trl import SFTConfig, SFTTrainer

from tilemoe.integrations import transformers as tilemoe_transformers

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<end>{% endgeneration %}"
    "{% else %}{{ message.content }}<end>{% endif %}{% endfor %}"
)
SPECIAL = ["<end>", "<user>", "<assistant>"]


def small_model(**changes: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model over bytes with random weights, and its tokenizer; ``changes`` override its configuration."""
    vocabulary = {letter: id_ for id_, letter in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[0], pad_token=SPECIAL[0], chat_template=TEMPLATE
    )
    sizes = {
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "initializer_range": 0.2,  # large enough for adapters to learn
    }  # fmt: skip
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{**sizes, **changes},
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation="tilemoe"), tokenizer


def sums() -> Dataset:
    """Conversations to learn if none are given."""
    pairs = [(left, right) for left in range(10) for right in range(10)]
    turns = [(f"{left} + {right}?", f"{left + right}") for left, right in pairs]
    roles = ("user", "assistant")
    return Dataset.from_list(
        [
            {"messages": [{"role": role, "content": text} for role, text in zip(roles, turn, strict=True)]}
            for turn in turns
        ]
    )


def main(arguments: list[str] | None = None) -> list[float]:
    """Train the adapters and write them; returns the losses logged."""
    parser = argparse.ArgumentParser(description="Fine-tune a transformers MoE model on conversations with TRL.")
    parser.add_argument("--model", help="a name on the hub or a folder; none: a small random Qwen3-MoE")
    parser.add_argument("--data", type=Path, help='JSONL of "messages"; none: sums of two digits')
    parser.add_argument("--out", default="runs/trl-sft")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, help="1e-2 for the small model, 2e-4 otherwise")
    options = parser.parse_args(arguments)

    tilemoe_transformers.register()
    if options.model is None:
        model, tokenizer = small_model()
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16, experts_implementation="tilemoe"
        )
    tilemoe_transformers.use(model)  # else PEFT adds the adapters to the experts' weights in each forward
    data = sums() if options.data is None else load_dataset("json", data_files=str(options.data), split="train")
    adapters = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    training = SFTConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr or (1e-2 if options.model is None else 2e-4),
        max_length=options.seq_len,
        assistant_only_loss=True,
        bf16=torch.cuda.is_available(),
        logging_steps=min(10, options.steps),
        save_strategy="no",
        report_to="none",
    )
    trainer = SFTTrainer(model, training, train_dataset=data, processing_class=tokenizer, peft_config=adapters)
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats/token")
