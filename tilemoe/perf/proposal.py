"""Proposes a step's settings for a model, a number of GPUs and a global batch: the fastest predicted that fit.

B sequences of a micro-batch · A micro-batches of a step · N GPUs · X GPUs that share a layer's experts · T = B S tokens

It varies B, whether experts are divided, what is recomputed and what a GPU keeps unsharded between micro-batches.
`tilemoe plan` shows the result of `propose`, and ``--data.batch-size auto`` uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tilemoe.config import CHECKPOINTING_MODES, KEPT_BETWEEN_MICRO_BATCHES, Checkpointing, Kept, MoEConfig
from tilemoe.models.flops import count_parameters, flops_per_token, repeated_flops_per_token
from tilemoe.perf.exchange import LINK_SHARE, exchange_bytes, share_of
from tilemoe.perf.hardware import GPUS, Gpu
from tilemoe.perf.predict import FITTED_ON, layer_ms
from tilemoe.perf.training import Setup, fewest_gpus, fits, peak_bytes

OF_A_HOST = 8
CARDS = (16, 24, 48, 80, 141)  # GB
# Fitted to the recorded steps of 7b, its 16 layers, 1b, single-gpu and olmoe (tests/perf/test_perf_proposal.py).
DENSE_MFU = 0.7  # MFU of attention, projections and the head
BLOCK_PASSES = 70  # passes over (T, d) in bf16, forward and backward: norms, rotary positions, residuals, copies
BLOCK_SECONDS = 2.05e-3  # fixed cost per block and micro-batch: the host and short kernels
HOOK_SECONDS = 0.75e-3  # what FSDP's hooks add to it
# An exchanging layer's time over the sum of its computation's and its transfers' times (docs/distributed.md, 7B-n256).
EXCHANGED = 1.14
RECOMPUTED = 1.15  # the time of micro-batches that recompute over that of their kernels
MARGIN = 1.05  # settings that recompute must be faster by this: no recorded step of several GPUs recomputes
_ADAMW_BYTES, _PASS_BYTES, _BF16, _FP32 = 28, 2, 2, 4


@dataclass(frozen=True)
class Proposal:
    """A step of ``accumulation`` micro-batches with ``sequences`` each, and its predicted ``seconds``."""

    setup: Setup
    sequences: int
    accumulation: int
    seconds: float

    @property
    def ranked_seconds(self) -> float:
        return self.seconds * (1 if self.setup.checkpointing == "none" else MARGIN)

    @property
    def tokens_per_second(self) -> float:
        """Per GPU."""
        return self.sequences * self.accumulation * self.setup.seq_len / self.seconds

    @property
    def bytes(self) -> int:
        """Peak bytes per GPU."""
        return peak_bytes(self.setup, self.sequences, self.accumulation)

    def __str__(self) -> str:
        settings = ", ".join(f"{name} {value}" for name, value in self.settings().items())
        room = f"{self.bytes / 1e9:.1f} of {self.setup.gpu.memory_gb:.0f} GB"
        return f"{settings}; predicted {self.tokens_per_second:,.0f} tokens/s per GPU, {room}"

    def settings(self) -> dict[str, Any]:
        """The trainer's settings, by name."""
        setup = self.setup
        return {
            "data.batch_size": self.sequences,
            "train.accumulation": self.accumulation,
            "parallel.expert": setup.expert_parallel,
            "parallel.between_micro_batches": setup.kept,
            "parallel.reshard_after_forward": setup.kept == "nothing",
            "parallel.checkpointing": setup.checkpointing,
        }


@dataclass(frozen=True)
class Choices:
    """The values that `propose` chooses among; a single one if the user gave it."""

    expert_parallel: Sequence[int] = (1,)
    checkpointing: Sequence[Checkpointing] = CHECKPOINTING_MODES
    kept: Sequence[Kept] = KEPT_BETWEEN_MICRO_BATCHES


def propose(setup: Setup, sequences: int, choices: Choices) -> Proposal | None:
    """The fastest proposal for a step of ``sequences`` per GPU, with ``setup``'s GPUs and dtype; None: none fits.

    Among equal times, the one that takes less memory.
    """
    found = _that_fit(setup, sequences, choices)
    return min(found, key=lambda each: (each.ranked_seconds, each.bytes), default=None)


def _that_fit(setup: Setup, sequences: int, choices: Choices) -> Iterator[Proposal]:
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    for shared, mode, kept in product(choices.expert_parallel, choices.checkpointing, choices.kept):
        each = replace(setup, expert_parallel=shared, checkpointing=mode, kept=kept)
        is_only = kept == "nothing" or "nothing" not in choices.kept
        for size, accumulation in zip(sizes, reversed(sizes), strict=True):
            gains = is_only or (accumulation > 1 and each.is_sharded)
            if gains and fits(each, size, accumulation):
                yield Proposal(each, size, accumulation, step_seconds(each, size, accumulation))


def ways_to_share(moe: MoEConfig | None, gpus: int | None) -> tuple[int, ...]:
    """Numbers of GPUs that may share a layer's experts: 1, and the most of a host that divide them. gpus None: any."""
    shared = 1 if moe is None else math.gcd(OF_A_HOST, moe.num_experts, gpus or 0)
    return tuple(dict.fromkeys((1, shared)))


def proposal_rows(setup: Setup, sequences: int, choices: Choices) -> list[dict[str, Any]]:
    """Results of `propose`, as plain values: on these GPUs, then there with each of the other checkpointing modes, then
    on such GPUs with each of the other memory sizes in `CARDS`.
    """
    own = setup.gpu.memory_gb
    first = _row(setup, sequences, own, choices)
    modes = [mode for mode in choices.checkpointing if mode != first["checkpointing"]]
    others = [_row(setup, sequences, own, replace(choices, checkpointing=(mode,))) for mode in modes]
    return [first, *others, *(_row(setup, sequences, card, choices) for card in CARDS if card != own)]


def _row(setup: Setup, sequences: int, memory_gb: float, choices: Choices) -> dict[str, Any]:
    setup = replace(setup, gpu=replace(setup.gpu, memory_gb=memory_gb))
    found = propose(setup, sequences, choices)
    row: dict[str, Any] = {"memory_gb": memory_gb, "checkpointing": choices.checkpointing[0]}
    if found is None:
        tries = (
            fewest_gpus(replace(setup, expert_parallel=each), choices.checkpointing) for each in choices.expert_parallel
        )
        return row | {"settings": None, "fewest_gpus": min(filter(None, tries), default=None)}
    row["checkpointing"] = found.setup.checkpointing
    measures = {"bytes": found.bytes, "seconds": found.seconds, "tokens_per_second": found.tokens_per_second}
    return row | {"settings": found.settings(), "fewest_gpus": setup.gpus, **measures}


def step_seconds(setup: Setup, sequences: int, accumulation: int) -> float:
    """Seconds of an optimiser step of ``accumulation`` micro-batches of ``sequences``: computation, plus FSDP's traffic
    without any overlap, plus AdamW.
    """
    weights = setup.gathered_parameters - setup.expert_parameters // setup.expert_parallel
    others = setup.gpus // setup.expert_parallel
    crossing = weights * (1 - 1 / setup.gpus)
    crossing += setup.expert_parameters / setup.expert_parallel * (1 - 1 / others)
    gathers, reductions = {
        "nothing": (2 * accumulation, accumulation),
        "weights": (1, accumulation),
        "weights_and_gradients": (1, 1),
    }[setup.kept]
    link = LINK_SHARE * setup.gpu.link_gbps * 1e9
    adamw = _ADAMW_BYTES * count_parameters(setup.model) / setup.gpus / _memory_rate(setup.gpu)
    computed = accumulation * _micro_batch_seconds(setup, sequences * setup.seq_len)
    return computed + crossing * (_BF16 * gathers + _FP32 * reductions) / link + adamw


def _micro_batch_seconds(setup: Setup, tokens: int) -> float:
    """Seconds of forward and backward. Experts: by `layer_ms`; if blocks are recomputed, they run forward twice."""
    model, moe, length = setup.sizes, setup.sizes.moe, setup.seq_len
    forwards = 2 if setup.checkpointing == "block" else 1
    flops = flops_per_token(model, length) + repeated_flops_per_token(model, setup.checkpointing, length)
    seconds = 0.0
    if moe is not None:
        flops -= (6 + 2 * (forwards - 1)) * setup.expert_parameters / moe.num_experts * moe.num_experts_per_tok
        forward, backward = layer_ms(share_of(moe, tokens, setup.expert_parallel), setup.gpu, setup.dtype)
        layer = (forwards * forward + backward) / 1e3
        if setup.expert_parallel > 1:
            moved = (forwards + 1) / 2 * exchange_bytes(moe, tokens, setup.expert_parallel, setup.dtype)
            layer = EXCHANGED * (layer + moved / (LINK_SHARE * setup.gpu.link_gbps * 1e9))
        seconds += model.num_moe_layers * layer
    seconds += tokens * flops / (DENSE_MFU * 1e12 * setup.gpu.stated_tflops())
    passed = BLOCK_PASSES * (forwards + 2) / 3 * tokens * model.hidden_size * _PASS_BYTES
    fixed = BLOCK_SECONDS + HOOK_SECONDS * setup.is_sharded
    seconds += model.num_layers * (passed / _memory_rate(setup.gpu) + fixed)
    return seconds if setup.checkpointing == "none" else RECOMPUTED * seconds


def _memory_rate(gpu: Gpu) -> float:
    """Bytes/s of a copy: the stated bandwidth times the share of it that was measured on `FITTED_ON`."""
    fitted_on = GPUS[FITTED_ON]
    assert fitted_on.measured_tbps is not None
    return gpu.tbps * fitted_on.measured_tbps / fitted_on.tbps * 1e12
