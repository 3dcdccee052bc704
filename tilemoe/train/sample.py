"""Text from a model: a prompt, continued."""

from __future__ import annotations

import torch

from tilemoe.data import Tokenizer
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate


def continue_text(
    model: DecoderLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
) -> str:
    """``prompt`` and up to ``max_new_tokens`` sampled tokens after it, ending before a document separator.

    Stops early where ``model.config.max_seq_len`` is full. The same seed gives the same text on the same device.

    Raises:
        ValueError: the prompt has no tokens, or fills the model's context.
    """
    ids = [int(token) for token in tokenizer.encode(prompt)]
    room = model.config.max_seq_len - len(ids)
    if not ids:
        raise ValueError("prompt: it has no tokens; give some text to continue")
    if room <= 0:
        raise ValueError(f"prompt: {len(ids)} tokens fill the model's {model.config.max_seq_len}; shorten it")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = generate(
        model,
        torch.tensor([ids], device=device),
        min(max_new_tokens, room),
        temperature=temperature,
        top_k=top_k,
        generator=generator,
    )
    new = tokens[0, len(ids) :].tolist()
    if tokenizer.separator_id in new:
        new = new[: new.index(tokenizer.separator_id)]
    return printable(tokenizer.decode(ids + new))


def printable(text: str) -> str:
    """``text`` with control characters (a terminal would obey them) shown as the replacement character."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
