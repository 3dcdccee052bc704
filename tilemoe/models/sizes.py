"""What a whole model is made of, as far as its parameters, FLOPs and memory go: of any architecture. No torch.

d model width · H, H_kv, D heads and their width · n intermediate_size · E experts · V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemoe.config import ModelConfig, MoEConfig


@dataclass(frozen=True)
class Mixer:
    """What mixes a layer's tokens: attention, or what stands in its place.

    Attributes:
        matrices: weights of the maps that every token meets.
        vectors: all other parameters.
        products: multiplications and additions of a token with each key up to its own, of at most ``window``.
        kept: 16-bit elements kept of a token for the backward.
        kept_fp32: the same of fp32.
        window: None where every key before a token is seen.
        chunk: where keys are those of a chunk of so many tokens, the one that a token is in.
        per_token: multiplications and additions of a token, apart from matrices and keys.
    """

    matrices: int
    vectors: int
    products: int
    kept: int
    kept_fp32: int
    window: int | None = None
    per_token: int = 0
    chunk: int | None = None

    def keys(self, length: int) -> float:
        """Of a query, on average in a sequence of ``length``: itself and those before it, at most ``window``, or those
        of its chunk.
        """
        if self.chunk is not None and length > self.chunk:
            rest = length % self.chunk
            return (length // self.chunk * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / length
        window = length if self.window is None else min(self.window, length)
        return window - window * (window - 1) / 2 / length


@dataclass(frozen=True)
class ModelSizes:
    """Embedding, layers of a mixer and an MLP or experts each, with a norm before either, norm and head.

    mixers: (how many layers, of what), in any order. The layers without experts have an MLP with a gate. vectors: of
    the whole model, what is in no layer's mixer, matrix, norm or bias.
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


def attention(
    d: int, heads: int, kv_heads: int, width: int, *, vectors: int = 0, normed: bool = False, window: int | None = None
) -> Mixer:
    """Softmax attention. ``vectors``: norms, biases and the like; ``normed``: queries and keys are.

    Kept are queries and keys as rotated and, where they are normalised, as projected, values, the output in both orders
    of heads, and a number for each query and head.
    """
    queries, keys = heads * width, kv_heads * width
    return Mixer(
        matrices=2 * d * (queries + keys),
        vectors=vectors,
        products=2 * queries,
        kept=3 * queries + 2 * keys + (queries + keys if normed else 0),
        kept_fp32=heads,
        window=window,
    )


def sizes_of(model: ModelConfig | ModelSizes) -> ModelSizes:
    """Of a model that `DecoderLM` implements; sizes are returned as they are."""
    if isinstance(model, ModelSizes):
        return model
    heads = {"head": 2, "full": model.num_heads + model.num_kv_heads, "none": 0}[model.qk_norm]
    mixer = attention(
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
