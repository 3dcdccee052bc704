"""How many parameters and floating-point operations a model has. Standard library only.

S tokens of a sequence · d model width · n expert width · E experts · K experts per token · V vocabulary
"""

from __future__ import annotations

from tilemoe.config import ModelConfig, MoEConfig
from tilemoe.models.sizes import ModelSizes, sizes_of

_FLOP_PER_WEIGHT = 6  # multiply and add: once forward, twice backward
_FLOP_PER_FROZEN_WEIGHT = 4  # once backward: it has no gradient of its own


def flops_per_token(config: ModelConfig | ModelSizes, seq_len: int | None = None, *, is_frozen: bool = False) -> float:
    """Floating-point operations of training on one token, forward and backward, in sequences of ``seq_len``.

    6 per weight of the matrices that the token is multiplied by (the head, but not the embedding), and causal attention
    with on average (S + 1) / 2 keys per query. Without ``seq_len`` S is config.max_seq_len. Norms, activations and
    the routing itself are left out, as is usual; so is what is recomputed to save memory. ``is_frozen``: 4 per weight,
    as under adapters; the adapters' own operations are left out.
    """
    model = sizes_of(config)
    length = model.max_seq_len if seq_len is None else seq_len
    if length < 1:
        raise ValueError(f"seq_len must be >= 1, got {length}")
    head = model.vocab_size * model.hidden_size
    per_weight = _FLOP_PER_FROZEN_WEIGHT if is_frozen else _FLOP_PER_WEIGHT
    return per_weight * (_matrices(model, active=True) + head) + _FLOP_PER_WEIGHT * _mixing(model, length)


def repeated_flops_per_token(config: ModelConfig | ModelSizes, checkpointing: str, seq_len: int) -> float:
    """Operations that the backward recomputes per token, in addition to `flops_per_token`: 2 per weight, not 6.

    ``checkpointing`` as for `DecoderLM.set_checkpointing`: "none", each block's "attention", or each whole "block". An
    upper bound: recomputed attention may leave out its last projection. The head is in no block and is not recomputed.
    """
    if checkpointing == "none":
        return 0.0
    model = sizes_of(config)
    mixing = _mixing(model, seq_len)
    if checkpointing == "attention":
        return 2 * (sum(count * mixer.matrices for count, mixer in model.mixers) + mixing)
    return 2 * (_matrices(model, active=True) + mixing)


def count_parameters(config: ModelConfig | ModelSizes) -> int:
    """The number of all parameters; buffers (the routers' selection biases) are not counted."""
    model = sizes_of(config)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return tables + _matrices(model, active=False) + _vectors(model)


def count_active_parameters(config: ModelConfig | ModelSizes) -> int:
    """The number of parameters that one token uses: as `count_parameters`, with K of the E experts."""
    model = sizes_of(config)
    moe = model.moe
    if moe is None:
        return count_parameters(model)
    per_expert = expert_matrices(moe) + _expert_biases(moe)
    idle_experts = model.num_moe_layers * (moe.num_experts - moe.num_experts_per_tok)
    return count_parameters(model) - idle_experts * per_expert


def _mixing(model: ModelSizes, length: int) -> float:
    """Multiplications and additions per token in the token mixers, without their matrices."""
    return sum(count * (mixer.keys(length) * mixer.products + mixer.per_token) for count, mixer in model.mixers)


def _matrices(model: ModelSizes, *, active: bool) -> int:
    """Weights of all blocks' matrices, with all experts or only the K that are active for a token."""
    d = model.hidden_size
    total = sum(count * mixer.matrices for count, mixer in model.mixers)
    total += model.num_dense_layers * 3 * d * model.dense_intermediate_size
    if model.moe is not None:
        moe = model.moe
        experts = moe.num_experts_per_tok if active else moe.num_experts
        shared = moe.shared_intermediate_size * (3 if moe.is_gated else 2) + (1 if moe.shared_gate else 0)
        layer = experts * expert_matrices(moe) + d * moe.num_experts + d * shared
        total += model.num_moe_layers * layer
    return total


def _vectors(model: ModelSizes) -> int:
    """Norms, biases, and what mixers have besides matrices."""
    vectors = model.vectors + (2 * model.num_layers + 1) * model.hidden_size
    vectors += sum(count * mixer.vectors for count, mixer in model.mixers)
    if model.moe is None:
        return vectors
    moe = model.moe
    biases = moe.num_experts * (_expert_biases(moe) + (1 if moe.router.bias else 0))
    return vectors + model.num_moe_layers * biases


def expert_matrices(moe: MoEConfig) -> int:
    """Weights of one routed expert."""
    return (moe.up_rows + moe.intermediate_size) * moe.hidden_size


def _expert_biases(moe: MoEConfig) -> int:
    return moe.up_rows + moe.hidden_size if moe.expert_bias else 0
