"""Text in, batches of tokens out: corpora, tokenizers, token shards, deterministic sampling. No torch."""

from tilemoe.data.cache import Prepared, prepare, prepare_chat
from tilemoe.data.corpus import Corpus, open_corpus
from tilemoe.data.mixture import MixedSampler, Mixture
from tilemoe.data.packing import PackedBatch, PackedDocuments, PackedSampler
from tilemoe.data.sampler import Sampler, sequential_windows
from tilemoe.data.shards import TokenShards
from tilemoe.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Corpus", "MixedSampler", "Mixture", "PackedBatch", "PackedDocuments", "PackedSampler", "Prepared", "Sampler",
    "TokenShards", "Tokenizer", "load_tokenizer", "open_corpus", "prepare", "prepare_chat", "sequential_windows",
]  # fmt: skip
