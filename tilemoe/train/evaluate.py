"""Held-out loss in nats/token and in nats/byte of text, which can be compared between tokenizers.

B sequences per batch · S tokens per sequence
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tilemoe.data import Mixture, PackedBatch, PackedDocuments, TokenShards, sequential_windows
from tilemoe.data.sampler import IGNORED_TARGET, Batch
from tilemoe.models.decoder import LMOutput
from tilemoe.routing.balance import sum_over_ranks
from tilemoe.train.datasets import device_batch
from tilemoe.train.job.collective import any_process, values_of_processes
from tilemoe.train.job.processes import ALONE, Job

_GOLDEN = 0.5 * (5.0**0.5 - 1.0)  # the fractional parts of its multiples fill [0, 1) evenly


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over ``tokens`` predicted tokens."""

    nats_per_token: float
    nats_per_byte: float | None  # None: unknown, as for a subset, unless every token is one byte
    tokens: int
    whole_split: bool  # False: a subset, spread evenly over the split
    tokens_per_expert: list[list[int]]  # (MoE layers, experts)

    def __str__(self) -> str:
        """The loss per token and, if known, per byte, and the number of tokens it was measured on."""
        per_byte = "" if self.nats_per_byte is None else f" {self.nats_per_byte:.4f} nats/byte,"
        read = f"{'whole split' if self.whole_split else 'subset'} of {self.tokens:,} tokens"
        return f"held-out loss {self.nats_per_token:.4f} nats/token,{per_byte} {read}"

    def shown(self, digits: int) -> str:
        """The loss with its unit: per byte if known, else per token."""
        if self.nats_per_byte is None:
            return f"{self.nats_per_token:.{digits}f} nats/token"
        return f"{self.nats_per_byte:.{digits}f} nats/byte"


def evaluate(
    model: nn.Module,
    shards: TokenShards | PackedDocuments | Mixture,
    *,
    seq_len: int,
    batch_size: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
    max_batches: int = 0,
    stop_requested: Callable[[], bool] = lambda: False,
    on_batch: Callable[[int], None] = lambda tokens: None,
    job: Job = ALONE,
    until_it_fits: Callable[[Callable[[], LMOutput]], LMOutput] = lambda forward: forward(),
) -> Evaluation | None:
    """Mean cross-entropy of ``model`` over ``shards``, read once in order, or over ``max_batches`` batches of windows:
    always the same windows, spread evenly over the split. The last batch of each source may be padded.

    Every window of a text starts without context, so the loss is a little too high for small ``seq_len``.
    Nats/byte is nats/token times the split's tokens per byte; for a subset it is known only if every token is a byte.
    Batches come from each source in turn, until all sources are read.
    Documents are packed already, with their own ``seq_len``: only their targets count, and nats/byte is unknown.
    ``on_batch`` gets the number of tokens that this process has read. Returns None once ``stop_requested`` is true.
    The processes of a job take turns with the batches; each gets the result. ``until_it_fits`` runs each forward.
    """
    nats, tokens = 0.0, 0
    counts: torch.Tensor | None = None
    was_training = model.training
    model.eval()
    try:
        for arrays in _batches(shards, seq_len, batch_size, max_batches, job):
            if any_process(stop_requested(), job):
                return None
            batch = device_batch(arrays, device)
            real = batch.num_targets
            with torch.no_grad(), autocast():
                inputs = {"documents": batch.documents, "token_mask": batch.token_mask}
                out = until_it_fits(partial(model, batch.inputs, batch.labels, **inputs))
            batch_counts = out.tokens_per_expert.to(torch.int64)
            counts = batch_counts if counts is None else counts + batch_counts
            if real:
                assert out.loss is not None, "there are labels"
                nats += float(out.loss) * real
                tokens += real
                on_batch(tokens)
    finally:
        model.train(was_training)
    assert counts is not None, "a held-out split is never empty"
    totals = values_of_processes(torch.tensor([nats, tokens], dtype=torch.float64), job)
    nats, tokens = sum(part[0] for part in totals), round(sum(part[1] for part in totals))
    counts = sum_over_ranks(counts)
    per_token = nats / tokens
    whole = tokens == shards.num_targets
    per_byte = None
    if shards.num_bytes and (whole or shards.num_tokens == shards.num_bytes):
        per_byte = per_token * shards.num_tokens / shards.num_bytes
    return Evaluation(per_token, per_byte, tokens, whole, counts.tolist())


def _batches(
    shards: TokenShards | PackedDocuments | Mixture, seq_len: int, batch_size: int, max_batches: int, job: Job
) -> Iterator[Batch | PackedBatch]:
    """This process' batches: every ``world_size``-th one, then one without targets if others have one more."""
    parts = shards.parts if isinstance(shards, Mixture) else (shards,)
    sizes = [_num_windows(part, seq_len) for part in parts]
    chosen = _spread(sum(sizes), min(max_batches * batch_size or sum(sizes), sum(sizes)))
    sources = []
    for part, size in zip(parts, sizes, strict=True):
        sources.append(_batches_of(part, seq_len, batch_size, chosen[chosen < size]))
        chosen = chosen[chosen >= size] - size
    everything = (batch for batches in zip_longest(*sources) for batch in batches if batch is not None)
    turns: list[Batch | PackedBatch]
    while turns := list(islice(everything, job.world_size)):
        yield turns[job.rank] if job.rank < len(turns) else _without_targets(turns[0])


def _num_windows(shards: TokenShards | PackedDocuments, seq_len: int) -> int:
    return shards.num_windows if isinstance(shards, PackedDocuments) else -(-shards.num_tokens // seq_len)


def _spread(total: int, count: int) -> NDArray[np.int64]:
    """(count,) of the numbers below ``total``, one from each of ``count`` equal ranges, at aperiodic places."""
    edges = np.arange(count + 1) * total // count
    return edges[:-1] + (np.diff(edges) * (np.arange(1, count + 1) * _GOLDEN % 1)).astype(np.int64)


def _batches_of(
    shards: TokenShards | PackedDocuments, seq_len: int, batch_size: int, windows: NDArray[np.int64]
) -> Iterator[Batch | PackedBatch]:
    if isinstance(shards, PackedDocuments):
        return shards.batches(batch_size, windows)
    return sequential_windows(shards, seq_len, batch_size, windows)


def _without_targets(batch: Batch | PackedBatch) -> Batch | PackedBatch:
    nothing = np.full_like(batch[1], IGNORED_TARGET)
    if isinstance(batch, PackedBatch):
        return PackedBatch(batch.inputs, nothing, batch.positions)
    return batch[0], nothing
