"""Memory of fine-tuning with low-rank adapters on one GPU: by part, and the largest micro-batch that fits a card.

T tokens of a micro-batch · d model width · n intermediate_size · w = 2n gated, n not · E experts · K experts per token
R = T K rows · r rank

It models `tilemoe train --lora.rank r` on a model folder in bf16: adapters in fp32 on the routed experts and the four
projections of attention. With experts in 4 bits the other frozen weights are in bf16; otherwise embeddings, norms and
routers are in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tilemoe.config import CHECKPOINTING_MODES, Checkpointing, ModelConfig, MoEConfig
from tilemoe.kernels.experts.memory import backward_slices, forward_slices
from tilemoe.kernels.experts.slicing import widest
from tilemoe.models.flops import count_parameters, expert_matrices
from tilemoe.models.sizes import ModelSizes, sizes_of, with_eager_attention
from tilemoe.perf import training
from tilemoe.perf.exchange import share_of
from tilemoe.perf.hardware import Gpu
from tilemoe.shape import MoEShape

Attention = Literal["fused", "eager"]
CARDS = (16, 24, 48, 80)  # GiB of memory
CARD_BYTES = 0.95 * 2**30  # usable bytes per GiB of a card; the driver takes the rest
# Bits per value of frozen experts: the value's own, plus its share of its block's scales.
BITS = {"nf4": 4 + 32 / 64, "nf4_double": 4 + 8 / 64 + 32 / (64 * 256), "mxfp4": 4 + 8 / 32, "dense": 16.0}
MOMENT_BYTES = {"adamw": 8.0, "adamw8bit": 2 * (1 + 4 / 256)}  # per parameter: two moments
_BF16, _FP32 = 2, 4


@dataclass(frozen=True)
class Tuning:
    """Adapters on a model with routed experts, in sequences of ``seq_len`` tokens; ``rank``: the experts' rank."""

    model: ModelConfig | ModelSizes
    gpu: Gpu
    rank: int
    attention_rank: int
    experts: str  # a key of `BITS`
    optimizer: str  # a key of `MOMENT_BYTES`
    seq_len: int
    checkpointing: Checkpointing = "none"

    @property
    def moe(self) -> MoEConfig:
        moe = sizes_of(self.model).moe
        assert moe is not None, "adapters are planned for models with experts"
        return moe

    @property
    def setup(self) -> training.Setup:
        """The `training.Setup` that gives the blocks' activations, which full training has, too."""
        return training.Setup(self.model, self.gpu, 1, 1, self.seq_len, checkpointing=self.checkpointing)


def adapter_parameters(tuning: Tuning) -> int:
    """Their number: ``r (d + w) + r (n + d)`` per expert; attention's rank times each projection's inputs + outputs."""
    sizes, moe = sizes_of(tuning.model), tuning.moe
    d = sizes.hidden_size
    of_experts = moe.num_experts * (2 * d + moe.up_rows + moe.intermediate_size)
    of_mixers = sum(count * (4 * d + mixer.matrices // d) for count, mixer in sizes.mixers)
    return tuning.rank * sizes.num_moe_layers * of_experts + tuning.attention_rank * of_mixers


def memory_parts(tuning: Tuning, sequences: int) -> dict[str, int]:
    """Bytes by part, at the peak of a step whose micro-batches have ``sequences`` sequences."""
    sizes, moe, tokens = sizes_of(tuning.model), tuning.moe, sequences * tuning.seq_len
    experts = sizes.num_moe_layers * moe.num_experts * expert_matrices(moe)
    trained = adapter_parameters(tuning)
    rest = count_parameters(sizes) - experts
    in_fp32 = 0
    if tuning.experts == "dense":  # norms are not counted
        in_fp32 = sizes.hidden_size * (sizes.vocab_size + sizes.num_moe_layers * moe.num_experts)
    return {
        "experts": math.ceil(experts * BITS[tuning.experts] / 8),
        "frozen rest": _BF16 * rest + (_FP32 - _BF16) * in_fp32,
        "adapters": _FP32 * trained,
        "gradients": _FP32 * trained,
        "optimiser": math.ceil(MOMENT_BYTES[tuning.optimizer] * trained),
        "activations": training.kept_bytes(tuning.setup, tokens) + _kept_products(tuning, tokens),
        "working": max(_working_bytes(tuning, tokens), training.LOSS_CHUNK_BYTES),
    }


def largest_micro_batch(tuning: Tuning, usable_bytes: float) -> int:
    """The most sequences of a micro-batch that fit in ``usable_bytes``; 0: not even one."""
    return training.most_that_fit(lambda sequences: sum(memory_parts(tuning, sequences).values()) <= usable_bytes)


def working_bytes(shape: MoEShape, rank: int) -> int:
    """The peak bytes of `tilemoe.ops.lora.moe_lora`, in forward or backward, besides what it saves (h, u)."""
    element, rows, w, n = shape.element_bytes, shape.num_rows, shape.width, shape.intermediate_size
    o = element * shape.num_tokens * shape.hidden_size
    forward = max(w, n + rank, n + rank + 2 * widest(forward_slices(shape)))
    backward = max(2 * n + rank, 2 * n + w + rank, w + n + 2 * rank, w + 2 * rank + 2 * widest(backward_slices(shape)))
    return o + element * rows * max(forward, backward) + _FP32 * 4 * rows


def _kept_products(tuning: Tuning, tokens: int) -> int:
    """Bytes that adapters save for backward where it does not recompute: u (R, r), and (T, rank) per projection."""
    if tuning.checkpointing == "block":
        return 0
    sizes = sizes_of(tuning.model)
    attention = 0 if tuning.checkpointing == "attention" else 4 * sizes.num_layers
    of_experts = tuning.rank * sizes.num_moe_layers * tuning.moe.num_experts_per_tok
    return _BF16 * tokens * (of_experts + tuning.attention_rank * attention)


def _working_bytes(tuning: Tuning, tokens: int) -> int:
    shape = share_of(replace(tuning.moe, save="full"), tokens, 1)  # adapters need save="full"
    working = working_bytes(shape, tuning.rank)
    return training.repeated_bytes(tuning.setup, tokens, working + _BF16 * tuning.rank * shape.num_rows)


def tuning_plan(
    model: ModelConfig | ModelSizes,
    gpu: Gpu,
    seq_len: int,
    ranks: tuple[int, int],
    storages: Sequence[str],
    optimizer: str,
    checkpointing: Checkpointing | None = None,
    attention: Attention = "fused",
) -> dict[str, Any]:
    """Plans for each of the experts' ``storages``, as plain values. ``ranks``: (experts', attention's). checkpointing
    None: the cheapest mode in which one sequence fits.
    """
    if attention == "eager":
        model = with_eager_attention(sizes_of(model), seq_len)
    modes = CHECKPOINTING_MODES if checkpointing is None else (checkpointing,)
    usable, rows = training.USABLE * gpu.memory_gb * 1e9, []
    for experts in storages:
        tries = [Tuning(model, gpu, *ranks, experts, optimizer, seq_len, mode) for mode in modes]
        tuning = next((each for each in tries if largest_micro_batch(each, usable)), tries[-1])
        batch = largest_micro_batch(tuning, usable)
        of_card = {str(card): max(largest_micro_batch(each, CARD_BYTES * card) for each in tries) for card in CARDS}
        rows.append(
            {
                "experts": experts,
                "checkpointing": tuning.checkpointing,
                "micro_batch": batch,
                "memory": memory_parts(tuning, max(1, batch)),
                "micro_batch_of_card": of_card,
            }
        )
    return {
        "parameters": count_parameters(model),
        "trained": adapter_parameters(tries[0]),
        "rank": ranks[0],
        "attention_rank": ranks[1],
        "optimizer": optimizer,
        "attention": attention,
        "seq_len": seq_len,
        "memory_bytes": gpu.memory_gb * 10**9,
        "usable": training.USABLE,
        "setups": rows,
    }
