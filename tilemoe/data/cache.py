"""A cache of token shards, from texts or fine-tuning examples: each is written once, atomically, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tilemoe.checks import expand_user, require_choice, require_int, told
from tilemoe.data.chat_encoder import ChatEncoder, Encoded
from tilemoe.data.conversations import CHAT_SUFFIXES, read_examples
from tilemoe.data.corpus import (
    LONGEST_LINE,
    SPLITS,
    STDLIB,
    Corpus,
    Split,
    TextNumber,
    Undecodable,
    open_corpus,
    split_parts,
)
from tilemoe.data.mixture import Mixture
from tilemoe.data.packing import FLAGS, PACKINGS, PackedDocuments, Packing, flagged
from tilemoe.data.shards import (
    FORMAT,
    SHARD_TOKENS,
    VERSION,
    ShardWriter,
    TokenShards,
    read_index,
    token_dtype,
    write_index,
)
from tilemoe.data.tokenizer import BYTES, TokenIds, Tokenizer, load_tokenizer, pieces_of
from tilemoe.files import only_one_process, staged_folder

Writers = dict[Split, ShardWriter]
Text = tuple[Split, str, bool]  # whether the separator comes after it

TooLong = Literal["error", "skip", "truncate"]

_BATCH_CHARS = 1 << 22  # of text encoded at once, in parallel; with the longest document it bounds the memory
_ENCODING = 3  # of the encoding of lines: raised when the same line gives other tokens
_NAMED = 10  # examples too long that the notes name


@dataclass(frozen=True)
class Prepared:
    """The data of a run: the two splits and the tokenizer of their ids.

    ``notes``: lines on how the data differ from the corpus. ``files``: how many were read, and which were not.
    """

    train: TokenShards | PackedDocuments | Mixture
    heldout: TokenShards | PackedDocuments | Mixture
    tokenizer: Tokenizer
    notes: tuple[str, ...] = ()
    files: str = ""


def prepare(
    corpus_spec: str,
    tokenizer_spec: str,
    cache_dir: Path,
    heldout_every: int = 20,
    shard_tokens: int = SHARD_TOKENS,
    read_only: Path | None = None,
    undecodable: Undecodable = "error",
    longest_line: int = LONGEST_LINE,
) -> Prepared:
    """The token shards of a corpus, made now or found in ``cache_dir``; their content is verified.

    ``read_only`` is another cache, which is only read, and only if ``cache_dir`` does not have the shards.

    Cached shards are used if they were made from the same corpus files (names, sizes, modification times), tokenizer
    and ``heldout_every``. Several processes may call this at once. ``shard_tokens`` is the size of a full shard when
    shards are made; for ``undecodable`` and ``longest_line`` see `open_corpus`. Raises ValueError for anything wrong
    with the corpus, the tokenizer or the cache.
    """
    cache_dir = expand_user(cache_dir)
    corpus = open_corpus(corpus_spec, undecodable=undecodable, longest_line=longest_line)
    with usable_cache(cache_dir):
        tokenizer = load_tokenizer(tokenizer_spec, corpus, cache_dir, heldout_every)
        made_from = [tokenizer.fingerprint, heldout_every]
        if corpus.name != STDLIB:  # older shards of other corpora may hold replaced bytes unreported
            made_from.append(undecodable)
        if tokenizer.name != BYTES:  # older shards of other tokenizers have other ids where a text was cut
            made_from.append("ids of whole texts")

        def write(writers: Writers) -> dict[str, Any]:
            _write_documents(split_parts(corpus, heldout_every), tokenizer, writers)
            if writers["train"].num_tokens and not writers["heldout"].num_tokens:
                raise ValueError(
                    f"corpus {corpus.name!r}: too little text to hold any out; add text or lower data.heldout_every "
                    f"({heldout_every})"
                )
            return {"heldout_every": heldout_every}

        caches = cache_dir, read_only
        folder = cached_shards(caches, corpus, tokenizer, made_from, write, tokenizer.vocab_size, shard_tokens)
        train, heldout = open_splits(folder)
        return Prepared(train, heldout, tokenizer, files=corpus.read_and_skipped(read_index(folder)))


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
    Raises ValueError for an invalid argument, or anything wrong with the corpus (naming file and line), the tokenizer
    or the cache.
    """
    require_int("seq_len", seq_len, 1)
    require_int("heldout_every", heldout_every, 2)
    require_choice("too_long", too_long, get_args(TooLong))
    require_choice("packing", packing, PACKINGS)
    cache_dir = expand_user(cache_dir)
    corpus = open_corpus(corpus_spec, CHAT_SUFFIXES, undecodable, longest_line)
    with usable_cache(cache_dir):
        tokenizer = load_tokenizer(tokenizer_spec)
        encoder = ChatEncoder(tokenizer)
        template = None if tokenizer.chat_template is None else tokenizer.chat_template.config()
        made_from = [
            "chat",
            _ENCODING,
            tokenizer.fingerprint,
            template,
            seq_len,
            heldout_every,
            too_long,
            undecodable,
        ]

        def write(writers: Writers) -> dict[str, Any]:
            return _write_examples(corpus, encoder, writers, seq_len, heldout_every, too_long)

        folder = cached_shards(
            (cache_dir, read_only), corpus, tokenizer, made_from, write, FLAGS * tokenizer.vocab_size
        )
        train, heldout = (PackedDocuments(shards, seq_len, packing) for shards in open_splits(folder))
        index = read_index(folder)
        notes = tuple(map(told, index.get("notes", ())))  # which name files
        return Prepared(train, heldout, tokenizer, notes, corpus.read_and_skipped(index))


@contextmanager
def usable_cache(cache_dir: Path) -> Iterator[None]:
    """Within the block an OSError becomes a ValueError that names the cache."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cache folder {cache_dir}: cannot be used ({error.strerror or error}); make room or correct its "
            "permissions, or choose another (data.cache_dir, TILEMOE_CACHE)"
        ) from error


def cached_shards(
    caches: tuple[Path, Path | None],
    corpus: Corpus,
    tokenizer: Tokenizer,
    made_from: Sequence[Any],
    write: Callable[[Writers], dict[str, Any]],
    num_values: int,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """The folder of shards of ``corpus``, found by a digest of ``made_from``, or made now by ``write``.

    ``caches``: the cache to write to, and maybe one that is read if the first has no such shards, see `prepare`.
    ``write`` appends each split's tokens, all below ``num_values``, to its writer, and returns more index fields.
    """

    def fingerprint_now() -> str:
        content = json.dumps([FORMAT, VERSION, corpus.fingerprint(), *made_from])
        return hashlib.sha256(content.encode()).hexdigest()

    fingerprint = fingerprint_now()
    # The tokenizer's name is left out, so that a checkpoint's copy of the tokenizer finds its training's shards.
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", Path(corpus.name).name)[:40] or "data"
    name = Path("shards", f"{slug}-{fingerprint[:16]}")
    cache_dir, read_only = caches
    folder = cache_dir / name
    if read_only is not None and not folder.exists() and (read_only / name).exists():
        folder = read_only / name
    if not folder.exists():
        with only_one_process(folder), _made_once(folder):
            if not folder.exists():
                with staged_folder(folder) as staging:
                    fields = _build(staging, corpus, write, num_values, shard_tokens)
                    if fingerprint_now() != fingerprint:
                        raise ValueError(f"corpus {corpus.name!r}: its files changed while they were read; run again")
                    made = {"fingerprint": fingerprint, "corpus": corpus.name, "tokenizer": tokenizer.name}
                    ids = {"vocab_size": tokenizer.vocab_size, "separator_id": tokenizer.separator_id}
                    write_index(staging, {**made, **ids, **fields})
    if read_index(folder).get("fingerprint") != fingerprint:
        raise ValueError(f"token shards {folder}: made from another corpus or tokenizer; delete the folder")
    return folder


@contextmanager
def _made_once(folder: Path) -> Iterator[None]:
    """Where files have no locks, two processes may make ``folder``: the second one's error is none."""
    try:
        yield
    except OSError:
        if not folder.exists():
            raise


def open_splits(folder: Path) -> tuple[TokenShards, TokenShards]:
    """The training and the held-out shards of a folder; their content is verified."""
    train, heldout = (TokenShards(folder, split) for split in SPLITS)
    for shards in (train, heldout):
        shards.verify()
    return train, heldout


def _build(
    staging: Path,
    corpus: Corpus,
    write: Callable[[Writers], dict[str, Any]],
    num_values: int,
    shard_tokens: int,
) -> dict[str, Any]:
    """Write both splits' shards; returns their fields of the index."""
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(ShardWriter(staging, split, num_values, shard_tokens)) for split in SPLITS
        }
        fields = write(writers)
        entries = {split: writer.entry() for split, writer in writers.items()}
    if not entries["train"]["num_tokens"]:
        raise ValueError(f"corpus {corpus.name!r}: it is empty; put text into it")
    replaced = corpus.undecodable_bytes() if corpus.undecodable == "replace" else 0
    return {**fields, "undecodable_bytes": replaced, "dtype": token_dtype(num_values).str, "splits": entries}


def _write_documents(parts: Iterable[tuple[TextNumber, Split, str]], tokenizer: Tokenizer, writers: Writers) -> None:
    separator = np.array([tokenizer.separator_id], dtype=np.int64)
    whole: list[Text] = []  # uncut texts, which are encoded in batches
    chars = 0

    def write(texts: Iterable[Text], encode: Callable[[Iterator[str]], Iterable[TokenIds]]) -> None:
        taken: deque[tuple[Split, int, bool]] = deque()

        def read() -> Iterator[str]:
            for split, text, is_end in texts:
                taken.append((split, len(text.encode("utf-8")), is_end))
                yield text

        for ids in encode(read()):
            split, num_bytes, is_end = taken.popleft()
            writers[split].append(ids, num_bytes)
            if is_end:
                writers[split].append(separator, 1)

    for _, numbered in groupby(parts, itemgetter(0)):
        text = ((split, part) for _, split, part in numbered)
        begin = list(islice(text, 2))
        is_cut = len(begin) > 1 or len(begin[0][1]) > _BATCH_CHARS
        if not is_cut:
            whole += ((*pair, True) for pair in begin)
            chars += len(begin[0][1])
        if is_cut or chars >= _BATCH_CHARS:
            write(whole, tokenizer.encode_batch)
            whole, chars = [], 0
        if is_cut:
            write(_pieces(chain(begin, text)), tokenizer.encode_parts)
    write(whole, tokenizer.encode_batch)


def _pieces(texts: Iterable[tuple[Split, str]]) -> Iterator[Text]:
    """The texts in pieces, because the ids of a long text take many times its memory."""
    for split, text in texts:
        end = 0
        for piece in pieces_of(text):
            end += len(piece)
            yield split, piece, end == len(text)


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
            f"corpus {corpus.name!r}: too few examples to hold any out; add some or lower data.heldout_every "
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
