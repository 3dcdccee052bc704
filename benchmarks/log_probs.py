"""How far the log-probabilities of training are from those of sampling, with routing replay and without.

    python benchmarks/log_probs.py --model FOLDER --dense FOLDER       # folders of transformers
    python benchmarks/log_probs.py --size large --teach 300            # random weights, taught this repository's docs

Each model samples, one token at a time with a key-value cache; then one forward over the whole sequences, as training
makes it, gives the log-probabilities of what was sampled again. A row of results/grpo.jsonl has the mean and the
largest difference, in nats: of transformers' model with tilemoe's experts, of the same weights as a `DecoderLM` in bf16
and in FP8 and with ``invariance="batch"``, and of a dense model. A row of mode "parts" says which parts of the model
give a token other bits beside other tokens.

B sequences · P tokens of a prompt · N new tokens · S = P + N · L MoE layers · K experts per token
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

import tilemoe
from tilemoe.bench import record
from tilemoe.bench.record import Row
from tilemoe.integrations import transformers as integration
from tilemoe.integrations.replay import record_routing, replay_routing
from tilemoe.layers.attention import KVCache

NAME = "grpo"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_OF_BOTH = {"vocab_size": 256, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": None}
SIZES = MappingProxyType(
    {
        "small": {
            **_OF_BOTH, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
            "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2,
        },
        "large": {  # 0.64 B
            **_OF_BOTH, "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "head_dim": 64,
            "moe_intermediate_size": 512, "num_experts": 32, "num_experts_per_tok": 4,
        },
    }
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ sampling, training


class Sampled(NamedTuple):
    """tokens (B, S) · log_probs (B, N) fp32, of the last N · expert_ids (L, B, S - 1, K), None of a dense model"""

    tokens: Tensor
    log_probs: Tensor
    expert_ids: Tensor | None


def log_probs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, N) fp32, of tokens (B, N) given logits (B, N, V)."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def sample(model: PreTrainedModel, prompts: Tensor, new: int) -> Sampled:
    """By transformers' generate."""
    has_experts = any(True for _ in integration.experts_modules(model))
    no_loss = {"output_router_logits": False} if has_experts else {}  # transformers 5.17 fails at that loss
    with record_routing(model) if has_experts else nullcontext() as routing:
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=new, max_new_tokens=new, do_sample=True,
            top_k=0, output_logits=True, return_dict_in_generate=True, **no_loss,
        )  # fmt: skip
    log_probs = log_probs_of(torch.stack(out.logits, dim=1), out.sequences[:, -new:])
    return Sampled(out.sequences, log_probs, routing.expert_ids(len(prompts)) if has_experts else None)


def sample_by_ours(model: tilemoe.DecoderLM, prompts: Tensor, new: int) -> Sampled:
    cache, routing = KVCache(model.config.num_layers, prompts.shape[1] + new), tilemoe.RoutingRecord()
    tokens, log_probs = [prompts], []
    for _ in range(new):
        logits = model.next_logits(tokens[-1], cache, routing)
        tokens.append(torch.multinomial(logits.float().softmax(-1), 1))
        log_probs.append(log_probs_of(logits[:, None], tokens[-1]))
    return Sampled(torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1), routing.expert_ids(len(prompts)))


def logits_of(model: PreTrainedModel, tokens: Tensor, expert_ids: Tensor | None) -> Tensor:
    with replay_routing(model, expert_ids) if expert_ids is not None else nullcontext():
        return model(input_ids=tokens).logits


def logits_of_ours(model: tilemoe.DecoderLM, tokens: Tensor, expert_ids: Tensor | None) -> Tensor:
    return model(tokens, expert_ids=expert_ids).logits


@torch.no_grad()
def differences(what: Row, model: Any, prompts: Tensor, new: int) -> Iterator[Row]:
    """A row without replay, and one with it where there are experts: of ``|log p|`` sampled less trained, in nats."""
    sampler, trainer = (sample, logits_of) if isinstance(model, PreTrainedModel) else (sample_by_ours, logits_of_ours)
    sampled = sampler(model.eval(), prompts, new)
    for ids in (None, sampled.expert_ids) if sampled.expert_ids is not None else (None,):
        logits = trainer(model, sampled.tokens[:, :-1], ids)[:, -new:]
        off = (log_probs_of(logits, sampled.tokens[:, -new:]) - sampled.log_probs).abs()
        row = {**what, "replay": ids is not None, "mean": float(off.mean()), "max": float(off.max())}
        parameters = sum(each.numel() for each in model.parameters())
        yield row | {"nats_per_token": -float(sampled.log_probs.mean()), "parameters": parameters}
        print(f"{row['model']:24} replay {row['replay']!s:5}  mean {row['mean']:.2e}, max {row['max']:.2e} nats")


def ours_of(model: PreTrainedModel, **changes: Any) -> tilemoe.DecoderLM:
    """The same weights as a `tilemoe.DecoderLM`, whose experts' settings are changed."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        read = tilemoe.load_hf(folder, device=DEVICE, dtype=torch.bfloat16)
    config = replace(read.config, moe=replace(read.config.moe, **changes))
    changed = tilemoe.DecoderLM(config, device=DEVICE, dtype=torch.bfloat16)
    changed.load_state_dict(read.state_dict())
    return changed


@torch.no_grad()
def parts(model: tilemoe.DecoderLM, of_theirs: torch.nn.Module, tokens: Tensor) -> dict[str, bool]:
    """Whether a token alone has the bits that it has among all of tokens (B, S), by part of the model; ``attention``:
    whether a query after a cache has those that it has in the whole sequence. of_theirs: transformers' norm.
    """
    (sequences, length), block, config = tokens.shape, model.blocks[0], model.config
    x = model.norm(model.embed(tokens).flatten(0, 1))
    of_rows = {
        "norm": model.norm,
        "norm of transformers": of_theirs,
        "projection": block.attention.q_proj,
        "router": lambda rows: block.mlp.router(rows).logits,
        "router and experts": lambda rows: block.mlp(rows).hidden,
        "head": lambda rows: F.linear(rows, model.embed.weight if model.head is None else model.head.weight),
    }
    places = range(0, len(x), max(1, len(x) // 16))
    found = {}
    for name, part in of_rows.items():
        whole = part(x)
        found[name] = all(torch.equal(part(x[at : at + 1]), whole[at : at + 1]) for at in places)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (torch.randn(sequences, each, length, config.head_dim, device=x.device, dtype=x.dtype) for each in heads)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    alone = F.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
    return {**found, "attention": torch.equal(alone, whole[:, :, -1:])}


def measure(model: PreTrainedModel, dense: PreTrainedModel | None, text: Tensor, args: argparse.Namespace) -> None:
    """Append the rows of all models."""
    starts = torch.randint(len(text) - args.prompt_tokens, (args.sequences,)).tolist()
    prompts = torch.stack([text[start : start + args.prompt_tokens] for start in starts]).to(DEVICE)
    makers: dict[str, Callable[[], Any]] = {} if dense is None else {"dense, transformers": lambda: dense}
    makers |= {
        "experts, transformers": lambda: model,
        "experts, tilemoe": lambda: ours_of(model),
        "experts, tilemoe, fp8": lambda: ours_of(model, precision="fp8"),
    }
    if DEVICE.type == "cuda":
        makers["experts, tilemoe, batch"] = lambda: ours_of(model, invariance="batch")
    where = {"source": args.model or f"{args.size}, taught {args.teach} steps", "sequences": args.sequences}
    where |= {"prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    for name, make in makers.items():
        each = make()
        rows = list(differences({"mode": "log_probs", "model": name, **where}, each, prompts, args.new_tokens))
        if isinstance(each, tilemoe.DecoderLM):
            rows.append({"mode": "parts", "model": name, **where, **parts(each, model.model.norm, prompts)})
            print({key: value for key, value in rows[-1].items() if isinstance(value, bool)}, flush=True)
        record.append(NAME, rows)


# --------------------------------------------------------------------------------------------------------- the models


def pages() -> str:
    """This repository's docs."""
    folder = Path(__file__).parents[1] / "docs"
    return "\n".join(page.read_text("utf-8") for page in sorted(folder.glob("*.md")))


def teach(model: PreTrainedModel, text: Tensor, steps: int) -> None:
    """Next tokens of random places, with fp32 weights under autocast."""
    optimizer, length = torch.optim.AdamW(model.float().train().parameters(), lr=3e-4, weight_decay=0.1), 256
    for step in range(steps):
        starts = torch.randint(len(text) - length, (32,)).tolist()
        batch = torch.stack([text[start : start + length] for start in starts]).to(DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"taught {step + 1} steps: {float(loss):.3f} nats/token", flush=True)


def made(size: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Random weights over bytes: with experts, and a dense model with as many weights for each token."""
    sizes: dict[str, Any] = dict(SIZES[size])
    experts = {name: sizes.pop(name) for name in ("moe_intermediate_size", "num_experts", "num_experts_per_tok")}
    width = experts["num_experts_per_tok"] * experts["moe_intermediate_size"]
    configs = (Qwen3MoeConfig(**sizes, **experts), Qwen3Config(**sizes, intermediate_size=width))
    return tuple(AutoModelForCausalLM.from_config(config).to(DEVICE) for config in configs)


def loaded(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the hub, of Qwen3-MoE, OLMoE or Mixtral")
    parser.add_argument("--dense", help="likewise, of a dense model with the same tokenizer; none: no dense model")
    parser.add_argument("--size", choices=SIZES, default="small", help="of random weights, where no folder is given")
    parser.add_argument("--teach", type=int, default=0, help="steps on docs/ that random weights are taught first")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=192)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    dense = None
    if args.model is None:
        text = torch.tensor(list(pages().encode()))
        model, dense = made(args.size)
        for each in (model, dense):
            teach(each, text, args.teach)
    else:
        text = torch.tensor(AutoTokenizer.from_pretrained(args.model)(pages()).input_ids)
        model, dense = loaded(args.model), None if args.dense is None else loaded(args.dense)
    integration.use(model)
    measure(model.to(torch.bfloat16), dense if dense is None else dense.to(torch.bfloat16), text, args)


if __name__ == "__main__":
    main()
