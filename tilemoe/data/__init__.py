"""Text in, batches of tokens out: corpora, tokenizers, token shards, deterministic sampling. No torch."""

from __future__ import annotations

from tilemoe.data.cache import Prepared as Prepared
from tilemoe.data.cache import prepare as prepare
from tilemoe.data.chat_cache import prepare_chat as prepare_chat
from tilemoe.data.corpus import Corpus as Corpus
from tilemoe.data.corpus import Document as Document
from tilemoe.data.corpus import open_corpus as open_corpus
from tilemoe.data.mixture import MixedSampler as MixedSampler
from tilemoe.data.mixture import Mixture as Mixture
from tilemoe.data.packing import PackedBatch as PackedBatch
from tilemoe.data.packing import PackedDocuments as PackedDocuments
from tilemoe.data.packing import PackedSampler as PackedSampler
from tilemoe.data.sampler import Sampler as Sampler
from tilemoe.data.sampler import sequential_windows as sequential_windows
from tilemoe.data.shards import TokenShards as TokenShards
from tilemoe.data.tokenizer import Tokenizer as Tokenizer
from tilemoe.data.tokenizer import load_tokenizer as load_tokenizer
