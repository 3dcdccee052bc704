"""From a corpus and a tokenizer to token shards in a cache: once, atomically, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilemoe.data.corpus import SPLITS, Corpus, Split, open_corpus, split_documents
from tilemoe.data.files import only_one_process, staged_folder
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
from tilemoe.data.tokenizer import Tokenizer, load_tokenizer

_BATCH_CHARS = 1 << 22  # text encoded at once, in parallel; bounds the memory together with the longest document


@dataclass(frozen=True)
class Prepared:
    """What a run reads: the two splits and the tokenizer of their ids."""

    train: TokenShards
    heldout: TokenShards
    tokenizer: Tokenizer


def prepare(
    corpus_spec: str,
    tokenizer_spec: str,
    cache_dir: Path,
    heldout_every: int = 20,
    shard_tokens: int = SHARD_TOKENS,
    read_only: Path | None = None,
) -> Prepared:
    """The token shards of a corpus, made now or found in ``cache_dir`` with their content verified.

    ``read_only`` is another cache, which is used where it has them and ``cache_dir`` has not; nothing is written there.

    What is found is used when the files of the corpus (names, sizes, modification times), the tokenizer and
    ``heldout_every`` are those it was made from. Several processes may call this at once. ``shard_tokens`` is the size
    of a full shard where one has to be made. Raises ValueError for anything wrong with the corpus, the tokenizer or
    the cache.
    """
    cache_dir = Path(cache_dir).expanduser()
    corpus = open_corpus(corpus_spec)
    try:
        tokenizer = load_tokenizer(tokenizer_spec, corpus, cache_dir, heldout_every)
        fingerprint = _fingerprint(corpus, tokenizer, heldout_every)
        # Not by the tokenizer's name: a checkpoint's copy of the tokenizer finds the shards of its training.
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", Path(corpus.name).name)[:40] or "data"
        name = Path("shards", f"{slug}-{fingerprint[:16]}")
        folder = cache_dir / name
        if read_only is not None and not folder.exists() and (read_only / name).exists():
            folder = read_only / name
        if not folder.exists():
            with only_one_process(folder):
                if not folder.exists():
                    _build(folder, corpus, tokenizer, heldout_every, shard_tokens, fingerprint)
        if read_index(folder).get("fingerprint") != fingerprint:
            raise ValueError(f"token shards {folder}: made from another corpus or tokenizer; delete the folder")
        train, heldout = (TokenShards.open(folder, split) for split in SPLITS)
        for shards in (train, heldout):
            shards.verify()
        return Prepared(train, heldout, tokenizer)
    except OSError as error:
        raise ValueError(
            f"cache folder {cache_dir}: cannot be used ({error.strerror or error}); make room or choose another"
        ) from error


def _build(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, heldout_every: int, shard_tokens: int, fingerprint: str
) -> None:
    pairs = split_documents(corpus, heldout_every)
    with staged_folder(folder) as staging:
        with ExitStack() as stack:
            writers = {
                split: stack.enter_context(ShardWriter(staging, split, tokenizer.vocab_size, shard_tokens))
                for split in SPLITS
            }
            _write_documents(pairs, tokenizer, writers)
            entries = {split: writer.entry() for split, writer in writers.items()}
        if not entries["train"]["num_tokens"]:
            raise ValueError(f"corpus {corpus.name!r}: it is empty; put text into it")
        if not entries["heldout"]["num_tokens"]:
            raise ValueError(
                f"corpus {corpus.name!r}: too little text to hold any out; add text or lower heldout_every "
                f"({heldout_every})"
            )
        if _fingerprint(corpus, tokenizer, heldout_every) != fingerprint:
            raise ValueError(f"corpus {corpus.name!r}: its files changed while they were read; run again")
        write_index(
            staging,
            {
                "fingerprint": fingerprint,
                "corpus": corpus.name,
                "tokenizer": tokenizer.name,
                "heldout_every": heldout_every,
                "vocab_size": tokenizer.vocab_size,
                "separator_id": tokenizer.separator_id,
                "dtype": token_dtype(tokenizer.vocab_size).str,
                "splits": entries,
            },
        )


def _write_documents(
    pairs: Iterable[tuple[Split, str]], tokenizer: Tokenizer, writers: dict[Split, ShardWriter]
) -> None:
    separator = np.array([tokenizer.separator_id], dtype=np.int64)
    for batch in _batches(pairs):
        encoded = tokenizer.encode_batch([text for _, text in batch])
        for (split, text), ids in zip(batch, encoded, strict=True):
            writers[split].append(ids, len(text.encode("utf-8")))
            writers[split].append(separator, 1)


def _batches(pairs: Iterable[tuple[Split, str]]) -> Iterator[list[tuple[Split, str]]]:
    batch: list[tuple[Split, str]] = []
    chars = 0
    for split, text in pairs:
        batch.append((split, text))
        chars += len(text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _fingerprint(corpus: Corpus, tokenizer: Tokenizer, heldout_every: int) -> str:
    made_from = [FORMAT, VERSION, corpus.fingerprint(), tokenizer.fingerprint, heldout_every]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
