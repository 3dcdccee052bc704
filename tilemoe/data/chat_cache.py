"""Packed documents of fine-tuning examples, tokenized and stored as token shards in the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from tilemoe.checks import expand_user, require_choice, require_int
from tilemoe.data.cache import Prepared, Writers, cached_shards, open_splits, usable_cache
from tilemoe.data.chat_encoder import ChatEncoder, Encoded
from tilemoe.data.conversations import CHAT_SUFFIXES, read_examples
from tilemoe.data.corpus import Corpus, open_corpus
from tilemoe.data.packing import FLAGS, PACKINGS, PackedDocuments, Packing, flagged
from tilemoe.data.shards import read_index
from tilemoe.data.text_files import LONGEST_LINE, Undecodable
from tilemoe.data.tokenizer import load_tokenizer

TooLong = Literal["error", "skip", "truncate"]
TOO_LONG = ("error", "skip", "truncate")
_VERSION = 3  # of the encoding of lines: raised when the same line gives other tokens
_NAMED = 10  # examples too long that the notes name


def prepare_chat(
    corpus_spec: str,
    tokenizer_spec: str,
    cache_dir: Path,
    *,
    seq_len: int,
    heldout_every: int = 20,
    too_long: TooLong = "error",
    packing: Packing = "best_fit",
    read_only: Path | None = None,
    undecodable: Undecodable = "error",
    longest_line: int = LONGEST_LINE,
) -> Prepared:
    """The examples of .jsonl files (`tilemoe.data.conversations`), in windows of ``seq_len``, by ``packing``.

    Every ``heldout_every``-th example is held out. An example of more than seq_len + 1 tokens (the last is only a
    target) is an error, left out ("skip") or cut at its end ("truncate"; left out if nothing to learn remains); the
    notes name the first ones. For ``undecodable`` and ``longest_line`` see `open_corpus`, for the cache `prepare`.
    Raises ValueError for anything wrong with the corpus (naming file and line), the tokenizer or the cache.
    """
    require_int("seq_len", seq_len, 1)
    require_int("heldout_every", heldout_every, 2)
    require_choice("too_long", too_long, TOO_LONG)
    require_choice("packing", packing, PACKINGS)
    cache_dir = expand_user(cache_dir)
    corpus = open_corpus(corpus_spec, CHAT_SUFFIXES, undecodable, longest_line)
    with usable_cache(cache_dir):
        tokenizer = load_tokenizer(tokenizer_spec)
        encoder = ChatEncoder(tokenizer)
        template = None if tokenizer.chat_template is None else tokenizer.chat_template.config()
        made_from = ["chat", _VERSION, tokenizer.fingerprint, template, seq_len, heldout_every, too_long, undecodable]

        def write(writers: Writers) -> dict[str, Any]:
            return _write_examples(corpus, encoder, writers, seq_len, heldout_every, too_long)

        folder = cached_shards(
            (cache_dir, read_only), corpus, tokenizer, made_from, write, FLAGS * tokenizer.vocab_size
        )
        train, heldout = (PackedDocuments(shards, seq_len, packing) for shards in open_splits(folder))
        index = read_index(folder)
        return Prepared(train, heldout, tokenizer, tuple(index["notes"]), corpus.read_and_skipped(index))


def _write_examples(
    corpus: Corpus, encoder: ChatEncoder, writers: Writers, seq_len: int, heldout_every: int, too_long: TooLong
) -> dict[str, Any]:
    """Write each split's examples; returns the notes for the index."""
    names: list[str] = []
    left_out = 0
    for number, example in enumerate(read_examples(corpus)):
        encoded = encoder.encode(example)
        kept: Encoded | None = encoded
        if encoded[0].size > seq_len + 1:
            names.append(example.name)
            kept = _shortened(encoded, example.name, seq_len, too_long)
            left_out += kept is None
        if kept is not None:
            is_heldout = number % heldout_every == heldout_every - 1
            writers["heldout" if is_heldout else "train"].append(flagged(kept), 0)
    if names and not writers["train"].num_tokens:
        raise ValueError(
            f"corpus {corpus.name!r}: every training example has more than {seq_len + 1} tokens; raise data.seq_len "
            f"({seq_len})"
        )
    if writers["train"].num_tokens and not writers["heldout"].num_tokens:
        raise ValueError(
            f"corpus {corpus.name!r}: too few examples to hold any out; add some or lower heldout_every "
            f"({heldout_every})"
        )
    return {"notes": _notes(names, left_out, seq_len)}


def _shortened(encoded: Encoded, name: str, seq_len: int, too_long: TooLong) -> Encoded | None:
    """The example cut to ``seq_len`` + 1 tokens; None: it is left out."""
    ids, learnt = encoded
    if too_long == "error":
        raise ValueError(
            f"{name}: {ids.size} tokens, more than the {seq_len + 1} that seq_len {seq_len} has room for; raise "
            "data.seq_len, shorten it, or set data.too_long to skip or truncate"
        )
    cut = ids[: seq_len + 1], learnt[: seq_len + 1]
    return cut if too_long == "truncate" and cut[1][1:].any() else None


def _notes(names: list[str], left_out: int, seq_len: int) -> list[str]:
    if not names:
        return []
    parts = [f"{count} {done}" for count, done in ((len(names) - left_out, "cut"), (left_out, "left out")) if count]
    shown = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    return [f"examples of more than {seq_len + 1} tokens, {' and '.join(parts)}: {shown}"]
