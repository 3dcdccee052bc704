"""Fine-tune a mixture-of-experts checkpoint through low-rank adapters on its experts, and write the merged model.

    python examples/lora.py                                     # a small random Mixtral, on any machine
    python examples/lora.py --model path/to/olmoe --text notes.txt --out path/to/olmoe-tuned

Reads and writes folders of Hugging Face's Qwen3-MoE, OLMoE and Mixtral. The base stays frozen in its dtype. Each of an
expert's two matrices has a trained pair of rank r; no merged matrix and no gradient of a base matrix is ever made.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import tokenizers
import torch

from tilemoe import DecoderLM, ModelConfig, MoEConfig
from tilemoe.layers.lora import add_lora, merge_lora
from tilemoe.models.huggingface import load_hf, save_hf


def load(folder: Path | None) -> DecoderLM:
    """The model in ``folder``, in bf16 on a GPU. None: a small random model over bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if folder is not None:
        return load_hf(folder, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    moe = MoEConfig(64, 32, num_experts=8, num_experts_per_tok=2, initializer_range=0.1)
    config = ModelConfig(256, 64, 2, 4, 2, 16, 512, moe=moe, initializer_range=0.1, qk_norm="none")
    return DecoderLM(config, device=device)


def token_ids(folder: Path | None, text: str) -> torch.Tensor:
    if folder is None:
        return torch.tensor(list(text.encode()))
    return torch.tensor(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step."""
    parser = argparse.ArgumentParser(description="Fine-tune an MoE checkpoint by adapters on its experts.")
    parser.add_argument("--model", type=Path, help="a folder with config.json, safetensors and tokenizer.json")
    parser.add_argument("--text", type=Path, default=Path(os.__file__), help="the text to train on")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="where the merged model goes")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args(arguments)

    model = load(options.model)
    device = model.embed.weight.device
    ids = token_ids(options.model, options.text.read_text(encoding="utf-8"))
    adapters = add_lora(model, rank=options.rank, alpha=2.0 * options.rank, dtype=torch.float32)
    optimizer = torch.optim.AdamW(adapters, lr=options.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(options.steps):
        starts = torch.randint(len(ids) - options.seq_len, (options.batch_size,), generator=generator)
        batch = torch.stack([ids[start : start + options.seq_len + 1] for start in starts.tolist()]).to(device)
        loss = model(batch[:, :-1], batch[:, 1:]).loss
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}  loss {losses[-1]:.3f} nats/token")
    merge_lora(model)
    save_hf(model, options.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if options.model is not None and (options.model / name).exists():
            shutil.copy(options.model / name, options.out)
    print(f"wrote {options.out}")
    return losses


if __name__ == "__main__":
    main()
