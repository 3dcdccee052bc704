"""Fine-tune a mixture-of-experts model of Hugging Face's transformers, with its experts computed by tilemoe.

    pip install '.[hf]'
    python examples/hf_finetune.py                                     # a small model from scratch, on any machine
    python examples/hf_finetune.py --model allenai/OLMoE-1B-7B-0924 --text notes.txt --seq-len 2048

The one line that matters is ``experts_implementation="tilemoe"``, after ``register()``. Everything else is ordinary
transformers code. Weights are fp32, because bf16 would lose AdamW's small steps; on a GPU autocast multiplies in bf16.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    OlmoeConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from tilemoe.integrations import transformers as tilemoe_transformers

BYTES = 256


def model_and_ids(name: str | None, text: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, torch.Tensor]:
    """The model, its tokenizer and the text's ids. name None: a small OLMoE over bytes, without a tokenizer."""
    if name is None:
        config = OlmoeConfig(
            vocab_size=BYTES,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_experts=16,
            num_experts_per_tok=4,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config, experts_implementation="tilemoe")
        return model, None, torch.tensor(list(text.encode()))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, experts_implementation="tilemoe")
    tokenizer = AutoTokenizer.from_pretrained(name)
    return model, tokenizer, tokenizer(text, return_tensors="pt").input_ids[0]


def windows(ids: torch.Tensor, length: int) -> list[dict[str, torch.Tensor]]:
    if len(ids) < length:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than --seq-len {length}")
    return [{"input_ids": window, "labels": window} for window in ids[: len(ids) // length * length].view(-1, length)]


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the losses logged."""
    parser = argparse.ArgumentParser(description="Fine-tune a transformers MoE model with tilemoe's experts.")
    parser.add_argument("--model", help="a name on the hub or a folder; none: a small OLMoE from scratch")
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="the text to train on")
    parser.add_argument("--out", default="runs/hf-finetune")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, help="2e-3 from scratch, 1e-5 otherwise")
    options = parser.parse_args(arguments)

    tilemoe_transformers.register()
    model, tokenizer, ids = model_and_ids(options.model, options.text.read_text(encoding="utf-8"))
    tilemoe_transformers.use(model)  # optional: says at once, and not in the first step, if a model is not supported
    training = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr or (2e-3 if options.model is None else 1e-5),
        bf16=torch.cuda.is_available(),
        logging_steps=min(10, options.steps),
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model=model, args=training, train_dataset=windows(ids, options.seq_len))
    trainer.train()
    trainer.save_model()  # loads anywhere, with tilemoe or without
    if tokenizer is not None:
        tokenizer.save_pretrained(options.out)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats/token")
