"""A whole model in training: memory by part on each GPU, the micro-batch that fits, and tokens a day at a stated MFU.

T tokens of a GPU's micro-batch · d model width · H, H_kv, D heads and their width · n intermediate_size · E experts ·
K experts per token · V vocabulary · P parameters · N GPUs · X GPUs that share a layer's experts

It models `tilemoe train`: fp32 weights and AdamW, compiled blocks, the loss in chunks, activation checkpointing as in
`DecoderLM.set_checkpointing`. N GPUs use FSDP2: blocks are gathered and computed in bf16, gradients reduced in fp32.
One GPU alone computes under autocast: each weight has a bf16 copy until its backward.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tilemoe.config import CHECKPOINTING_MODES, Checkpointing, Kept, ModelConfig, MoEConfig, Precision
from tilemoe.kernels.experts.memory import backward_peak_bytes, kept_h_bytes, saved_bytes
from tilemoe.models.flops import (
    count_active_parameters,
    count_parameters,
    expert_matrices,
    flops_per_token,
    repeated_flops_per_token,
)
from tilemoe.models.sizes import Mixer, ModelSizes, sizes_of
from tilemoe.perf.exchange import LINK_SHARE, exchange_bytes, share_of
from tilemoe.perf.hardware import Gpu
from tilemoe.perf.predict import layer_ms

USABLE = 0.9  # share of a GPU's memory; the driver, NCCL and fragmentation take the rest
LOSS_CHUNK_BYTES = 1 << 29  # tilemoe/models/loss.py
MOST_GPUS, COMPARED = 1 << 14, 8
_MOST_SEQUENCES = 1 << 20  # in a micro-batch
_BF16, _FP32 = 2, 4
_DAY = 86400


@dataclass(frozen=True)
class Setup:
    """How a model is trained: N GPUs of which X share the experts, sequences of ``seq_len`` tokens, bf16 or fp8.

    wrapped: whether FSDP2 wraps the model; None: if there are several GPUs. checkpointing: what backward recomputes.
    kept: what a GPU keeps unsharded between a step's micro-batches, ``parallel.between_micro_batches``.
    """

    model: ModelConfig | ModelSizes
    gpu: Gpu
    gpus: int
    expert_parallel: int
    seq_len: int
    dtype: str = "bf16"
    wrapped: bool | None = None
    checkpointing: Checkpointing = "none"
    kept: Kept = "nothing"

    @property
    def sizes(self) -> ModelSizes:
        return sizes_of(self.model)

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of all layers' routed experts."""
        moe = self.sizes.moe
        return 0 if moe is None else self.sizes.num_moe_layers * moe.num_experts * expert_matrices(moe)

    @property
    def gathered_parameters(self) -> int:
        """The number of parameters that a GPU computes with: all but the other GPUs' experts."""
        others = 1 - 1 / self.expert_parallel
        return count_parameters(self.model) - math.ceil(others * self.expert_parameters)

    @property
    def is_sharded(self) -> bool:
        return self.gpus > 1 if self.wrapped is None else self.wrapped


def memory_parts(setup: Setup, sequences: int) -> dict[str, int]:
    """Bytes on each GPU by part, at the peak of a step whose micro-batches have ``sequences`` sequences.

    "copies" are the weights that kernels read: gathered by FSDP2, or cast.
    """
    model, tokens = setup.sizes, sequences * setup.seq_len
    parameters = count_parameters(model)
    share = math.ceil(parameters / setup.gpus)
    block, experts = _block_parameters(setup)
    head = model.vocab_size * model.hidden_size
    root = head * (1 if model.tie_embeddings else 2)
    is_block_repeated = setup.checkpointing == "block"
    copies = _BF16 * (root + block if is_block_repeated else parameters)
    if setup.is_sharded:
        copies = _BF16 * (root + 2 * block) + _FP32 * block  # one block is prefetched, one gradient reduced
        if setup.kept != "nothing":
            copies = _BF16 * setup.gathered_parameters + _FP32 * block
    if setup.dtype == "fp8":  # two one-byte copies: of all blocks if they are kept, else of one
        is_one = is_block_repeated if setup.gpus == 1 else setup.kept == "nothing"
        copies += 2 * (1 if is_one else setup.sizes.num_moe_layers) * experts
    are_whole = setup.is_sharded and setup.kept == "weights_and_gradients"
    return {
        "weights": _FP32 * share,
        "gradients": _FP32 * (setup.gathered_parameters if are_whole else share),
        "AdamW": 2 * _FP32 * share,
        "copies": copies,
        "activations": kept_bytes(setup, tokens),
        "working": max(
            repeated_bytes(setup, tokens, _moe_working_bytes(setup, tokens)), LOSS_CHUNK_BYTES + _FP32 * head
        ),
    }


def peak_bytes(setup: Setup, sequences: int, micro_batches: int = 2) -> int:
    """Peak bytes of each GPU. In a step of one micro-batch, gradients are made while activations are freed, but for the
    head's, which the loss makes before.
    """
    parts = memory_parts(setup, sequences)
    if micro_batches > 1:
        return sum(parts.values())
    head = _FP32 * setup.sizes.vocab_size * setup.sizes.hidden_size
    return sum(parts.values()) - min(parts["activations"], parts["gradients"] - head)


def fits(setup: Setup, sequences: int, micro_batches: int = 2) -> bool:
    """Whether ``micro_batches`` of ``sequences`` fit in the usable memory of each GPU."""
    return peak_bytes(setup, sequences, micro_batches) <= USABLE * setup.gpu.memory_gb * 1e9


def largest_micro_batch(setup: Setup) -> int:
    """The most sequences of a micro-batch that fit; 0: not even one."""
    return most_that_fit(partial(fits, setup))


def most_that_fit(does_fit: Callable[[int], bool]) -> int:
    """The largest number of sequences for which ``does_fit``, which must also hold for all fewer; 0: none."""
    return bisect_left(range(1, _MOST_SEQUENCES), True, key=lambda sequences: not does_fit(sequences))


def cheapest_that_fits(setup: Setup, modes: Sequence[Checkpointing] = CHECKPOINTING_MODES) -> Setup | None:
    """``setup`` with the first of ``modes`` (cheapest first) in which one sequence fits; None: it fits in none."""
    return next((each for each in (replace(setup, checkpointing=mode) for mode in modes) if fits(each, 1)), None)


def fewest_gpus(setup: Setup, modes: Sequence[Checkpointing] | None = None) -> int | None:
    """The fewest GPUs, X times a power of two, on which one sequence fits in one of ``modes`` (None: in ``setup``'s
    mode); None: `MOST_GPUS` are too few.
    """
    gpus = setup.expert_parallel
    while gpus <= MOST_GPUS:
        if cheapest_that_fits(replace(setup, gpus=gpus), modes or (setup.checkpointing,)):
            return gpus
        gpus *= 2
    return None


def tokens_per_day(setup: Setup, sequences: int, mfu: float) -> float:
    """Tokens that all GPUs train per day, with micro-batches of ``sequences``.

    A token takes ``flops / (mfu * stated bf16 rate)`` seconds, of the model's and the recomputed FLOPs. FP8 subtracts
    the experts' predicted gain; shared experts add the exchange of tokens, without any overlap. With checkpointed
    blocks the experts run forward twice, and so do the exchanges of that forward.
    """
    model, moe, tokens = setup.sizes, setup.sizes.moe, sequences * setup.seq_len
    flops = flops_per_token(model, setup.seq_len) + repeated_flops_per_token(model, setup.checkpointing, setup.seq_len)
    seconds = flops / (mfu * 1e12 * setup.gpu.stated_tflops())
    if moe is not None:
        shape, forwards = share_of(moe, tokens, setup.expert_parallel), 2 if setup.checkpointing == "block" else 1
        if setup.dtype == "fp8":
            gains = (a - b for a, b in zip(layer_ms(shape, setup.gpu), layer_ms(shape, setup.gpu, "fp8"), strict=True))
            gain = sum(count * each for count, each in zip((forwards, 1), gains, strict=True))
            seconds -= setup.sizes.num_moe_layers * gain / 1e3 / tokens
        moved = (forwards + 1) / 2 * exchange_bytes(moe, tokens, setup.expert_parallel, setup.dtype)
        seconds += setup.sizes.num_moe_layers * moved / (LINK_SHARE * setup.gpu.link_gbps * 1e9) / tokens
    return _DAY * setup.gpus / seconds


def _block_parameters(setup: Setup) -> tuple[int, int]:
    """(parameters that a GPU gathers for a block, the routed experts' among them), for the widest block."""
    model, moe = setup.sizes, setup.sizes.moe
    attention = max(mixer.matrices for _, mixer in model.mixers)
    dense = 3 * model.hidden_size * model.dense_intermediate_size if model.num_dense_layers else 0
    if moe is None:
        return attention + dense, 0
    experts = moe.num_experts // setup.expert_parallel * expert_matrices(moe)
    shared = moe.shared_intermediate_size * (3 if moe.is_gated else 2) * moe.hidden_size
    return attention + max(dense, experts + shared + moe.num_experts * moe.hidden_size), experts


def kept_bytes(setup: Setup, tokens: int) -> int:
    """Bytes that all blocks save for backward. A recomputed block saves its input. Recomputed attention saves nothing;
    compiled, on one GPU alone, the queries and keys that are normalised.
    """
    model = setup.sizes
    if setup.checkpointing == "block":
        return model.num_layers * tokens * _BF16 * model.hidden_size
    kept = model.num_layers * _stream_bytes(setup, tokens) + model.num_dense_layers * _dense_bytes(setup, tokens)
    kept += setup.sizes.num_moe_layers * _experts_bytes(setup, tokens)
    if setup.checkpointing == "attention":
        return kept + (0 if setup.is_sharded else tokens * _BF16 * sum(n * mixer.normed for n, mixer in model.mixers))
    return kept + sum(count * _mixer_bytes(mixer, tokens) for count, mixer in model.mixers)


def repeated_bytes(setup: Setup, tokens: int, working: int) -> int:
    """Peak bytes of one block's backward besides what all blocks save: attention's or the experts' (``working``), and
    what the block recomputes.

    Attention is recomputed after the experts' backward, but a whole block before it. How h is saved does not matter in
    the latter: what is saved and what the backward allocates besides it have the same sum.
    """
    mixer = max(_mixer_bytes(mixer, tokens) for _, mixer in setup.sizes.mixers)
    of_mixer = _BF16 * tokens * max(mixer.working for _, mixer in setup.sizes.mixers)
    if setup.checkpointing == "none":
        return max(working, of_mixer)
    if setup.checkpointing == "attention":
        return max(working, mixer + of_mixer)
    dense = _dense_bytes(setup, tokens) if setup.sizes.num_dense_layers else 0
    return _stream_bytes(setup, tokens) + mixer + max(dense, _experts_bytes(setup, tokens) + working, of_mixer)


def _stream_bytes(setup: Setup, tokens: int) -> int:
    """Bytes of a block's two residuals and two normed inputs. The compiled backward computes one of the inputs again;
    if sharded, its bytes stand for FSDP's buffers.
    """
    return tokens * (4 if setup.is_sharded else 3) * _BF16 * setup.sizes.hidden_size


def _mixer_bytes(mixer: Mixer, tokens: int) -> int:
    return tokens * (_BF16 * mixer.kept + _FP32 * mixer.kept_fp32)


def _dense_bytes(setup: Setup, tokens: int) -> int:
    return tokens * _BF16 * 3 * setup.sizes.dense_intermediate_size


def _experts_bytes(setup: Setup, tokens: int) -> int:
    """Bytes that a layer's routed experts, router and shared expert save."""
    moe = setup.sizes.moe
    if moe is None:
        return 0
    kept = saved_bytes(share_of(moe, tokens, setup.expert_parallel)) + router_saved_bytes(moe, tokens)
    kept += tokens * _BF16 * (3 if moe.is_gated else 2) * moe.shared_intermediate_size
    return kept


def window_bytes(moe: MoEConfig, tokens: int, processes: int) -> int:
    """Bytes of the window through which ``processes`` of one host exchange tokens, shared by all layers: this process'
    rows, the results of the most rows that it can receive, and the destinations of tokens and pairs.
    """
    if processes == 1:
        return 0
    rows = (1 + processes) * tokens * _BF16 * moe.hidden_size
    return rows + tokens * (4 * processes + 8 * moe.num_experts_per_tok)


def router_saved_bytes(moe: MoEConfig, tokens: int) -> int:
    """Bytes that the router saves: logits (T, E) in fp32 and the chosen ids (T, K) in int32."""
    return 4 * tokens * (moe.num_experts + moe.num_experts_per_tok)


def _moe_working_bytes(setup: Setup, tokens: int) -> int:
    """Bytes that one layer's backward allocates besides what is saved, less h, which it frees; and the window.

    Tokens received from other GPUs are not saved: the backward pulls them again, besides their outputs' gradients.
    """
    moe, processes = setup.sizes.moe, setup.expert_parallel
    if moe is None:
        return 0
    shape = share_of(moe, tokens, setup.expert_parallel)
    pulled = 0 if processes == 1 else 2 * processes * tokens * _BF16 * moe.hidden_size
    return backward_peak_bytes(shape) - kept_h_bytes(shape) + pulled + window_bytes(moe, tokens, processes)


def precision_on(gpu: Gpu, moe: MoEConfig | None) -> Precision:
    """The precision of the experts' GEMMs: ``moe.precision``, but "bf16" if they are not computed in FP8 on ``gpu``."""
    if moe is None or gpu.why_not_fp8(moe.hidden_size, moe.intermediate_size) is not None:
        return "bf16"
    return moe.precision


def training_plan(
    model: ModelConfig | ModelSizes,
    gpu: Gpu,
    seq_len: int,
    mfu: float,
    gpus: int | None,
    expert_parallel: int,
    daily_tokens: float | None,
    checkpointing: Checkpointing | None = None,
) -> dict[str, Any]:
    """The model in bf16 and, if FP8 is computed, in FP8, with and without experts that X GPUs share, as plain values.

    gpus None: the fewest on which one sequence fits in all of these ways, for a fair comparison; ignores ways that need
    over `COMPARED` times as many as the best. checkpointing None: the cheapest mode in which one sequence fits.
    """
    modes = CHECKPOINTING_MODES if checkpointing is None else (checkpointing,)
    fp8 = None if model.moe is None else replace(model.moe, precision="fp8")
    setups = [
        Setup(model, gpu, expert_parallel, shared, seq_len, dtype)
        for dtype in dict.fromkeys(("bf16", precision_on(gpu, fp8)))
        for shared in dict.fromkeys((1, expert_parallel))
    ]
    fewest = [fewest_gpus(setup, modes) for setup in setups]
    found = [count for count in fewest if count]
    together = gpus or max((count for count in found if count <= COMPARED * min(found)), default=expert_parallel)
    together = max(together, expert_parallel)
    return {
        "parameters": count_parameters(model),
        "active_parameters": count_active_parameters(model),
        "flops_per_token": flops_per_token(model, seq_len),
        "memory_bytes": gpu.memory_gb * 10**9,
        "usable": USABLE,
        "seq_len": seq_len,
        "max_seq_len": sizes_of(model).max_seq_len,
        "mfu": mfu,
        "stated_tflops": gpu.stated_tflops(),
        "gpus": together,
        "tokens_per_day_wanted": daily_tokens,
        "setups": [
            {"fewest_gpus": count, **_setup_plan(replace(setup, gpus=together), modes, mfu, daily_tokens)}
            for setup, count in zip(setups, fewest, strict=True)
        ],
    }


def _setup_plan(setup: Setup, modes: Sequence[Checkpointing], mfu: float, daily_tokens: float | None) -> dict[str, Any]:
    """Memory and speed with the largest micro-batch; if not even one sequence fits, its memory and no speed."""
    setup = cheapest_that_fits(setup, modes) or replace(setup, checkpointing=modes[-1])
    sequences = largest_micro_batch(setup)
    row: dict[str, Any] = {
        "dtype": setup.dtype,
        "expert_parallel": setup.expert_parallel,
        "checkpointing": setup.checkpointing,
        "micro_batch": sequences,
        "memory": memory_parts(setup, max(1, sequences)),
        "tokens_per_day": tokens_per_day(setup, sequences, mfu) if sequences else None,
        "gpus_for_tokens_per_day": None,
    }
    if sequences and daily_tokens is not None:
        shared = setup.expert_parallel
        row["gpus_for_tokens_per_day"] = math.ceil(daily_tokens * setup.gpus / row["tokens_per_day"] / shared) * shared
    return row
