"""Sizes of a whole model of any architecture that determine its parameters, FLOPs and memory. Imports no torch.

d model width · H, H_kv, D heads and their width · n intermediate_size · E experts · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilemoe.config import ModelConfig, MoEConfig


@dataclass(frozen=True)
class Mixer:
    """A layer's token mixer: attention, or what replaces it.

    Attributes:
        matrices: weights of the matrices that every token is multiplied by.
        vectors: all other parameters.
        products: multiplications and additions per token and key that it sees.
        kept: 16-bit elements saved per token for the backward.
        kept_fp32: fp32 elements saved per token for the backward.
        window: a token sees at most this many keys, its own the last; None: all keys up to its own.
        chunk: if given, a token sees only keys of its own chunk of this many tokens.
        scores: 16-bit elements per token and key that transformers' eager attention keeps, where its class has no SDPA.
        working: 16-bit elements per token that its backward has beside what is kept.
        normed: 16-bit elements per token of the projected queries and keys that are normalised.
        per_token: multiplications and additions per token, apart from matrices and keys.
    """

    matrices: int
    vectors: int
    products: int
    kept: int
    kept_fp32: int
    window: int | None = None
    per_token: int = 0
    chunk: int | None = None
    scores: int = 0
    working: int = 0
    normed: int = 0

    def keys(self, length: int) -> float:
        """Keys that a query sees, on average over a sequence of ``length``."""
        if self.chunk is not None and length > self.chunk:
            rest = length % self.chunk
            return (length // self.chunk * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / length
        window = length if self.window is None else min(self.window, length)
        return window - window * (window - 1) / 2 / length


@dataclass(frozen=True)
class ModelSizes:
    """Embedding, layers, a last norm and a head. A layer is a mixer and an MLP or experts, with a norm before either.

    mixers: (number of layers, their mixer), in any order. Layers without experts have a gated MLP. vectors: parameters
    of the whole model that are in no layer's mixer, matrix, norm or bias.
    """

    vocab_size: int
    hidden_size: int
    max_seq_len: int
    mixers: tuple[tuple[int, Mixer], ...]
    moe: MoEConfig | None
    num_dense_layers: int = 0
    dense_intermediate_size: int = 0
    tie_embeddings: bool = False
    vectors: int = 0

    @property
    def num_layers(self) -> int:
        return sum(count for count, _ in self.mixers)

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers


def with_eager_attention(sizes: ModelSizes, seq_len: int) -> ModelSizes:
    """``sizes`` with eager attention, which keeps the softmax of the scores (H, S, S) of each sequence. On a GPU its
    backward has three more of that shape: the softmax's output gradient, its product with the softmax, and the result.
    """
    scores = ((count, mixer, seq_len * mixer.scores) for count, mixer in sizes.mixers)
    mixers = tuple((count, replace(each, kept=each.kept + own, working=3 * own)) for count, each, own in scores)
    return replace(sizes, mixers=mixers)


def attention_mixer(
    d: int, heads: int, kv_heads: int, width: int, *, vectors: int = 0, normed: bool = False, window: int | None = None
) -> Mixer:
    """Softmax attention. ``vectors``: norms, biases and the like; ``normed``: whether queries and keys are normalised.

    Saved are the rotated queries and keys and, if these are normalised, the projected ones too; values; the output
    before and after the heads are transposed; and one number per query and head.
    """
    queries, keys = heads * width, kv_heads * width
    to_norm = queries + keys if normed else 0
    return Mixer(
        matrices=2 * d * (queries + keys),
        vectors=vectors,
        products=2 * queries,
        kept=3 * queries + 2 * keys + to_norm,
        kept_fp32=heads,
        window=window,
        normed=to_norm,
    )


def sizes_of(model: ModelConfig | ModelSizes) -> ModelSizes:
    """The sizes of a model that `DecoderLM` implements; `ModelSizes` are returned as they are."""
    if isinstance(model, ModelSizes):
        return model
    heads = {"head": 2, "full": model.num_heads + model.num_kv_heads, "none": 0}[model.qk_norm]
    mixer = attention_mixer(
        model.hidden_size,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        vectors=heads * model.head_dim,
        normed=model.qk_norm != "none",
    )
    return ModelSizes(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        max_seq_len=model.max_seq_len,
        mixers=((model.num_layers, mixer),),
        moe=model.moe,
        num_dense_layers=model.num_dense_layers,
        dense_intermediate_size=model.dense_intermediate_size,
        tie_embeddings=model.tie_embeddings,
    )
