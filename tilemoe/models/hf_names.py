"""Which tensor of a Hugging Face checkpoint is which part of which parameter of `DecoderLM`.

d model width · n expert width · E experts
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple

from torch import Tensor

from tilemoe.config import ModelConfig
from tilemoe.models.hf_config import ARCHITECTURES, Architecture

_ALL = slice(None)

# Within a block and within a layer, for what is the same tensor under two names.
_BLOCK_NAMES = (
    ("attention_norm", "input_layernorm"),
    ("attention.q_proj", "self_attn.q_proj"),
    ("attention.k_proj", "self_attn.k_proj"),
    ("attention.v_proj", "self_attn.v_proj"),
    ("attention.o_proj", "self_attn.o_proj"),
    ("mlp_norm", "post_attention_layernorm"),
)
_QK_NORM_NAMES = (("attention.q_norm", "self_attn.q_norm"), ("attention.k_norm", "self_attn.k_norm"))


class Piece(NamedTuple):
    """Rows of one of our parameters, of one expert if it has experts, and the tensor (or rows of it) that they are."""

    ours: str
    theirs: str
    expert: int | None = None
    rows: slice = _ALL
    their_rows: slice = _ALL

    def of_ours(self, parameter: Tensor) -> Tensor:
        """The part of our parameter, as a view."""
        part = parameter if self.expert is None else parameter[self.expert]
        return part if self.rows == _ALL else part[..., self.rows, :]

    def of_theirs(self, tensor: Tensor) -> Tensor:
        """The part of their tensor, as a view."""
        return tensor if self.their_rows == _ALL else tensor[..., self.their_rows, :]


def pieces(config: ModelConfig, present: Container[str] = ()) -> Iterator[Piece]:
    """Every part of every parameter, those of one parameter in a row; together they cover it.

    Their names are those of checkpoints on the hub, one tensor for each expert's matrix; where ``present``, the names
    there are, has a layer's experts stacked as transformers 5 holds them in memory, those.
    """
    architecture = ARCHITECTURES[config.qk_norm]
    yield Piece("embed.weight", "model.embed_tokens.weight")
    block_names = _BLOCK_NAMES + (() if config.qk_norm == "none" else _QK_NORM_NAMES)
    for layer in range(config.num_layers):
        for ours, theirs in block_names:
            yield Piece(f"blocks.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight")
        if config.is_moe_layer(layer):
            yield from _moe_pieces(config, architecture, layer, present)
        else:
            ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
            n = config.dense_intermediate_size
            yield Piece(f"{ours}.w1", f"{theirs}.gate_proj.weight", rows=slice(0, n))
            yield Piece(f"{ours}.w1", f"{theirs}.up_proj.weight", rows=slice(n, 2 * n))
            yield Piece(f"{ours}.w2", f"{theirs}.down_proj.weight")
    yield Piece("norm.weight", "model.norm.weight")
    if not config.tie_embeddings:
        yield Piece("head.weight", "lm_head.weight")


def _moe_pieces(
    config: ModelConfig, architecture: Architecture, layer: int, present: Container[str]
) -> Iterator[Piece]:
    assert config.moe is not None
    n = config.moe.intermediate_size
    concatenated = slice(0, n), slice(n, 2 * n)
    gate, up = concatenated if config.moe.gate_up == "concatenated" else (slice(0, None, 2), slice(1, None, 2))
    ours, theirs = f"blocks.{layer}.mlp", f"model.layers.{layer}.mlp"
    if f"{theirs}.experts.gate_up_proj" in present:
        yield Piece(f"{ours}.router.weight", f"{theirs}.gate.weight")
        for rows, their_rows in zip((gate, up), concatenated, strict=True):
            yield Piece(f"{ours}.experts.w1", f"{theirs}.experts.gate_up_proj", rows=rows, their_rows=their_rows)
        yield Piece(f"{ours}.experts.w2", f"{theirs}.experts.down_proj")
        return
    theirs = f"model.layers.{layer}.{architecture.mlp}"
    yield Piece(f"{ours}.router.weight", f"{theirs}.gate.weight")
    for expert in range(config.moe.num_experts):
        name = f"{theirs}.experts.{expert}"
        yield Piece(f"{ours}.experts.w1", f"{name}.{architecture.gate}.weight", expert, gate)
        yield Piece(f"{ours}.experts.w1", f"{name}.{architecture.up}.weight", expert, up)
    for expert in range(config.moe.num_experts):
        yield Piece(f"{ours}.experts.w2", f"{theirs}.experts.{expert}.{architecture.down}.weight", expert)
