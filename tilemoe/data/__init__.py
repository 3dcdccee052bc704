"""Text in, batches of tokens out: corpora, tokenizers, memory-mapped token shards, deterministic sampling. No torch."""

from __future__ import annotations

from tilemoe.data.cache import Prepared, prepare
from tilemoe.data.corpus import Corpus, Document, open_corpus
from tilemoe.data.sampler import Sampler, sequential_windows
from tilemoe.data.shards import TokenShards
from tilemoe.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Corpus",
    "Document",
    "Prepared",
    "Sampler",
    "TokenShards",
    "Tokenizer",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "sequential_windows",
]
