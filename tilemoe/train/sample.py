"""Text from a model: it continues a prompt."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from tilemoe.data import Tokenizer
from tilemoe.data.chat_encoder import ChatEncoder
from tilemoe.data.corpus import clean_text
from tilemoe.integrations.hf_decoder import HFDecoder
from tilemoe.models.decoder import DecoderLM
from tilemoe.models.generate import generate


class Continuation(NamedTuple):
    """A prompt and its continuation.

    ``new_tokens``: tokens sampled before an end token. ``is_cut``: the model's context was full before an end token and
    before the requested number of tokens.
    """

    text: str
    new_tokens: int
    is_cut: bool


def continue_text(
    model: DecoderLM | HFDecoder,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    chat: ChatEncoder | None = None,
) -> Continuation:
    """``prompt`` and up to ``max_new_tokens`` sampled tokens after it, up to the first of `Tokenizer.end_ids`.

    With ``chat`` the prompt is a user's turn, and the text is the answer alone. Stops early if
    ``model.config.max_seq_len`` is reached. The same seed gives the same text on the same device.

    ValueError: the prompt is empty, or fills the model's context.
    """
    text, ends = (prompt, tokenizer.end_ids) if chat is None else chat.ask(prompt)
    ids = prompt_ids(tokenizer, text, model.config.max_seq_len, "prompt")
    room = model.config.max_seq_len - len(ids)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    run = model.generate if isinstance(model, HFDecoder) else partial(generate, model)
    tokens = run(
        torch.tensor([ids], device=device),
        min(max_new_tokens, room),
        temperature=temperature,
        top_k=top_k,
        generator=generator,
        num_ids=tokenizer.vocab_size,  # padding ids of the vocabulary have no text
    )
    new = tokens[0, len(ids) :].tolist()
    end = next((place for place, token in enumerate(new) if token in ends), len(new))
    is_cut = end == len(new) < max_new_tokens
    return Continuation(printable(tokenizer.decode(new[:end] if chat else ids + new[:end])), end, is_cut)


def prompt_ids(tokenizer: Tokenizer, prompt: str, max_seq_len: int, name: str) -> list[int]:
    """The ids of ``prompt``. ValueError, with ``name``: it is empty, or the context has no room for one more token.

    If the tokenizer finds no token in a text (spaces, for some), the ids are the separator, which begins a document.
    """
    if not clean_text(prompt):
        raise ValueError(f"{name}: it has no tokens; give some text to continue")
    ids = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.separator_id]
    if len(ids) >= max_seq_len:
        raise ValueError(f"{name}: {len(ids)} tokens fill the context of {max_seq_len}; shorten it")
    return ids


def printable(text: str) -> str:
    """``text`` with control characters (a terminal would obey them) shown as the replacement character."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
