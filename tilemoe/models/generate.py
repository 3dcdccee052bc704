"""Sampling text from a decoder, one token at a time, with a key-value cache.

B sequences · S tokens of the prompt · N new tokens · V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.layers.attention import KVCache
from tilemoe.models.decoder import DecoderLM
from tilemoe.routing.replay import RoutingRecord


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # each token meets another length, for which compiled blocks would recompile
def generate(
    model: DecoderLM,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    num_ids: int | None = None,
    record: RoutingRecord | None = None,
) -> Tensor:
    """Continue input_ids (B, S) by ``max_new_tokens`` tokens: (B, S + N) int64, the prompt included.

    temperature: divides the logits; 0 takes the likeliest token. top_k: sample among the k likeliest; 0 among all.
    generator: of the model's device; with it the text is a function of the prompt and the generator's state.
    num_ids: only ids below it are taken, where the vocabulary is larger than the tokenizer's; None: any.
    record: gets the experts of every token but the last, which no layer has seen: ``record.expert_ids(B)`` are those of
        ``output[:, :-1]``.

    Raises:
        ValueError: an argument is out of range, or prompt and new tokens exceed ``model.config.max_seq_len``.
    """
    _check(model, input_ids, max_new_tokens, temperature, top_k)
    if num_ids is not None and num_ids < 1:
        raise ValueError(f"num_ids must be None or >= 1, got {num_ids}")
    if max_new_tokens == 0:
        return input_ids.long()
    total = input_ids.shape[1] + max_new_tokens
    cache = KVCache(model.config.num_layers, total)
    was_training = model.training
    model.eval()
    try:
        tokens = [input_ids.long()]
        for _ in range(max_new_tokens):
            logits = model.next_logits(tokens[-1], cache, record)[:, :num_ids]
            tokens.append(_sample(logits, temperature, top_k, generator))
        return torch.cat(tokens, dim=1)
    finally:
        model.train(was_training)


def _sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """(B, 1) token ids drawn by logits (B, V)."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k, dim=-1)
        choice = torch.multinomial(torch.softmax(best.values, dim=-1), 1, generator=generator)
        return best.indices.gather(1, choice)
    return torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)


def _check(model: DecoderLM, input_ids: Tensor, max_new_tokens: int, temperature: float, top_k: int) -> None:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids must be (B, S) with a prompt of S >= 1 tokens, got {tuple(input_ids.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be >= 0, got {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number >= 0, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be >= 0, got {top_k}")
    prompt, limit = input_ids.shape[1], model.config.max_seq_len
    if prompt > limit:
        raise ValueError(f"input_ids has {prompt} tokens, but model.max_seq_len is {limit}; shorten the prompt")
    if prompt + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens ({max_new_tokens}) after a prompt of {prompt} exceeds model.max_seq_len ({limit}); "
            f"ask for at most {limit - prompt}"
        )
