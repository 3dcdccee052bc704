"""Several sources in one run: each source's share of the sequences, and the order in which they are read.

B batch_size · S seq_len · n_s sequences of source s in a round
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilemoe.data.packing import PackedBatch, PackedDocuments, PackedSampler
from tilemoe.data.sampler import Batch, BatchOrder, Sampler, permute
from tilemoe.data.shards import TokenShards

ROUND = 1000  # sequences after which each source has given exactly its share
_SOURCE = 2  # purpose in keys derived from (seed, round); the sources' own samplers use 0 and 1


@dataclass(frozen=True)
class Mixture:
    """The same split of several sources, all of text or all of packed documents, in the ids of one tokenizer.

    weights: per source, > 0; a source's share of the sequences is its weight divided by their sum.
    """

    parts: tuple[TokenShards, ...] | tuple[PackedDocuments, ...]
    weights: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_targets(self) -> int:
        return sum(part.num_targets for part in self.parts)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of all sources' text; None: a source does not know it, as packed documents do not."""
        sizes = [part.num_bytes for part in self.parts]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


class MixedSampler(BatchOrder):
    """Training batches as a pure function of (seed, step, rank), by the rules of `tilemoe.data.Sampler`.

    Source s has ``n_s`` of each `ROUND` positions of the endless sequence; their places are drawn for each round. Round
    j reads the positions ``j n_s + [0, n_s)`` of the source's own endless sequence of epochs, in a drawn order too. So
    each sequence of a source is read as often as any other.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler] | Sequence[PackedSampler],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """samplers: one per source, with batch_size 1 and world_size 1, so that its step is a position."""
        super().__init__(samplers[0].seq_len, batch_size, seed, rank, world_size)
        assert all((each.batch_size, each.world_size) == (1, 1) for each in samplers)
        self.samplers = samplers
        self._first_slot = np.cumsum([0, *sequences_of_round(weights)])

    def batch(self, step: int) -> Batch | PackedBatch:
        """(inputs, targets) of ``step`` >= 0, for packed documents with positions; (B, S) int64 each."""
        found = [self.samplers[source].batch(at) for source, at in self.places(self.first(step), self.batch_size)]
        arrays = [np.concatenate(rows) for rows in zip(*found, strict=True)]
        return PackedBatch(*arrays) if len(arrays) == 3 else (arrays[0], arrays[1])

    def num_targets(self, first_step: int, steps: int) -> int:
        """The number of targets of all ranks in ``steps`` steps from ``first_step`` on; no text is read for it."""
        places = self.places(*self.of_all_ranks(first_step, steps))
        return sum(self.samplers[source].num_targets(at, 1) for source, at in places)

    def places(self, first: int, count: int) -> list[tuple[int, int]]:
        """(source, position in its own endless sequence) of each of the positions [first, first + count)."""
        places: list[tuple[int, int]] = []
        for number in range(first // ROUND, (first + count - 1) // ROUND + 1):
            inside = np.arange(max(first, number * ROUND), min(first + count, (number + 1) * ROUND)) - number * ROUND
            slots = permute(inside, ROUND, (_SOURCE, self.seed, number))
            sources = np.searchsorted(self._first_slot, slots, side="right") - 1
            sizes = np.diff(self._first_slot)[sources]
            at = number * sizes + slots - self._first_slot[sources]
            places += zip(sources.tolist(), at.tolist(), strict=True)
        return places


def sequences_of_round(weights: Sequence[float]) -> NDArray[np.int64]:
    """n_s of each source, summing to `ROUND`: largest remainders are rounded up, and each source has at least one.

    ValueError: there are more sources than a round has sequences.
    """
    if len(weights) > ROUND:
        raise ValueError(f"data.sources: {len(weights)} sources are more than {ROUND}; put some into one folder")
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * ROUND
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() > ROUND:  # some were raised to one: take it from the largest
        counts[int(np.argmax(counts))] -= 1
    for source in np.argsort(counts - exact, kind="stable")[: ROUND - int(counts.sum())]:
        counts[source] += 1
    return counts
