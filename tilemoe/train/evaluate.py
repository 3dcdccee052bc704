"""Held-out loss: nats per token and, comparable between tokenizers, nats per byte of text.

B sequences per batch · S tokens per sequence
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import nn

from tilemoe.data import TokenShards, sequential_windows


@dataclass(frozen=True)
class Evaluation:
    """The mean loss over ``tokens`` predicted tokens."""

    nats_per_token: float
    nats_per_byte: float | None  # None: unknown, a part of the split was read in tokens of many lengths
    tokens: int
    tokens_per_expert: list[list[int]]  # (MoE layers, experts)

    def shown(self, digits: int) -> str:
        """The loss with its unit: per byte where that is known."""
        if self.nats_per_byte is None:
            return f"{self.nats_per_token:.{digits}f} nats/token"
        return f"{self.nats_per_byte:.{digits}f} nats/byte"


def evaluate(
    model: nn.Module,
    shards: TokenShards,
    *,
    seq_len: int,
    batch_size: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
    max_batches: int = 0,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Mean cross-entropy of ``model`` over ``shards``, read once in order, or over its first ``max_batches`` batches.

    Every window starts without context, so the figure is a little pessimistic for small ``seq_len``. Nats per byte are
    nats per token times the split's tokens per byte of text, which is that of a part only where every token is a byte.
    Returns None when ``stop_requested`` says so in between.
    """
    nats, tokens = 0.0, 0
    counts: torch.Tensor | None = None
    was_training = model.training
    model.eval()
    try:
        for inputs, targets in _batches(shards, seq_len, batch_size, max_batches):
            if stop_requested():
                return None
            real = int((targets >= 0).sum())
            with torch.no_grad(), autocast():
                out = model(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
            nats += float(out.loss) * real
            tokens += real
            batch_counts = out.tokens_per_expert.to(torch.int64)
            counts = batch_counts if counts is None else counts + batch_counts
    finally:
        model.train(was_training)
    assert counts is not None, "a held-out split is never empty"
    per_token = nats / tokens
    bytewise = shards.num_tokens == shards.num_bytes
    known = bytewise or tokens == shards.num_tokens
    per_byte = per_token * shards.num_tokens / shards.num_bytes if known else None
    return Evaluation(per_token, per_byte, tokens, counts.tolist())


def _batches(
    shards: TokenShards, seq_len: int, batch_size: int, max_batches: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return islice(sequential_windows(shards, seq_len, batch_size), max_batches or None)
