"""How many parameters and floating-point operations a model has. Standard library only.

S tokens of a sequence · d model width · n expert width · E experts · K experts per token · V vocabulary
"""

from __future__ import annotations

from tilemoe.config import ModelConfig, MoEConfig

_FLOP_PER_WEIGHT = 6  # multiply and add: once forward, twice backward
_FLOP_PER_FROZEN_WEIGHT = 4  # once backward: it has no gradient of its own


def flops_per_token(config: ModelConfig, seq_len: int | None = None, *, is_frozen: bool = False) -> float:
    """Floating-point operations of training on one token, forward and backward, in sequences of ``seq_len``.

    6 per weight of the matrices the token meets (the embedding is a look-up, the head is not), and causal attention
    with on average (S + 1) / 2 keys per query. Without ``seq_len`` S is config.max_seq_len. Norms, activations and
    the routing itself are left out, as is usual; so is work that is done twice to save memory. ``is_frozen``: 4 per
    weight, as under adapters, whose own are left out.
    """
    length = config.max_seq_len if seq_len is None else seq_len
    if length < 1:
        raise ValueError(f"seq_len must be >= 1, got {length}")
    keys = (length + 1) / 2
    attention = config.num_layers * 2 * keys * config.num_heads * config.head_dim  # scores, and their sum of values
    head = config.vocab_size * config.hidden_size
    per_weight = _FLOP_PER_FROZEN_WEIGHT if is_frozen else _FLOP_PER_WEIGHT
    return per_weight * (_matrices(config, active=True) + head) + _FLOP_PER_WEIGHT * attention


def count_parameters(config: ModelConfig) -> int:
    """All parameters of the model; buffers (the routers' selection biases) are none."""
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return tables + _matrices(config, active=False) + _vectors(config)


def count_active_parameters(config: ModelConfig) -> int:
    """Parameters that one token meets: like `count_parameters`, but K of the E experts."""
    moe = config.moe
    if moe is None:
        return count_parameters(config)
    per_expert = _expert_matrices(moe) + _expert_biases(moe)
    idle_experts = (config.num_layers - config.num_dense_layers) * (moe.num_experts - moe.num_experts_per_tok)
    return count_parameters(config) - idle_experts * per_expert


def _matrices(config: ModelConfig, *, active: bool) -> int:
    """Weights of all blocks' matrices; of the experts all, or the K that are active for a token."""
    d = config.hidden_size
    attention = 2 * d * config.head_dim * (config.num_heads + config.num_kv_heads)
    total = config.num_layers * attention + config.num_dense_layers * 3 * d * config.dense_intermediate_size
    if config.moe is not None:
        moe = config.moe
        experts = moe.num_experts_per_tok if active else moe.num_experts
        shared = moe.shared_intermediate_size * (3 if moe.is_gated else 2) + (1 if moe.shared_gate else 0)
        layer = experts * _expert_matrices(moe) + d * moe.num_experts + d * shared
        total += (config.num_layers - config.num_dense_layers) * layer
    return total


def _vectors(config: ModelConfig) -> int:
    """Norms and biases."""
    heads = {"head": 2, "full": config.num_heads + config.num_kv_heads, "none": 0}[config.qk_norm]
    norms = config.num_layers * (2 * config.hidden_size + heads * config.head_dim) + config.hidden_size
    if config.moe is None:
        return norms
    moe = config.moe
    biases = moe.num_experts * (_expert_biases(moe) + (1 if moe.router.bias else 0))
    return norms + (config.num_layers - config.num_dense_layers) * biases


def _expert_matrices(moe: MoEConfig) -> int:
    return (moe.up_rows + moe.intermediate_size) * moe.hidden_size


def _expert_biases(moe: MoEConfig) -> int:
    return moe.up_rows + moe.hidden_size if moe.expert_bias else 0
