"""Several sources in one run: what share of the sequences each gives, and the order in which they are read.

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
_SOURCE = 2  # what a key derived from (seed, round) is for; the sources' own samplers have 0 and 1


@dataclass(frozen=True)
class Mixture:
    """The same split of several sources, all of text or all of packed documents, in the ids of one tokenizer.

    weights: of each source, > 0; its share of the sequences, over their sum.
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
        """None where a source does not know, as of what is learnt of documents."""
        sizes = [part.num_bytes for part in self.parts]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None


class MixedSampler(BatchOrder):
    """Training batches as a pure function of (seed, step, rank), by the rules of `tilemoe.data.Sampler`.

    Of each `ROUND` positions of the endless sequence source s has ``n_s``, which ones is drawn for each round. Round j
    reads, in an order that is drawn, too, the positions ``j n_s + [0, n_s)`` of the source's own endless sequence of
    epochs: each of its sequences as often as any other.
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
        """samplers: of each source, of one sequence a batch and one process, so that a step is a position."""
        super().__init__(samplers[0].seq_len, batch_size, seed, rank, world_size)
        assert all((each.batch_size, each.world_size) == (1, 1) for each in samplers)
        self.samplers = samplers
        self._first_slot = np.cumsum([0, *sequences_of_round(weights)])

    def batch(self, step: int) -> Batch | PackedBatch:
        """(inputs, targets), and positions of documents, of ``step`` >= 0, (B, S) int64 each."""
        found = [self.samplers[source].batch(at) for source, at in self.places(self.first(step), self.batch_size)]
        arrays = [np.concatenate(rows) for rows in zip(*found, strict=True)]
        return PackedBatch(*arrays) if len(arrays) == 3 else (arrays[0], arrays[1])

    def num_targets(self, first_step: int, steps: int) -> int:
        """Targets of all ranks together in so many steps; nothing of the text is read for it."""
        places = self.places(*self.of_all_ranks(first_step, steps))
        return sum(self.samplers[source].num_targets(at, 1) for source, at in places)

    def places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Of the positions [first, first + count): the source, and the position in its own endless sequence."""
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
    """n_s of each source, `ROUND` together: the largest remainders are rounded up, and each source has one at least.

    ValueError: there are more sources than a round has sequences.
    """
    if len(weights) > ROUND:
        raise ValueError(f"data.sources: {len(weights)} sources are more than {ROUND}; put some into one folder")
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * ROUND
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while counts.sum() > ROUND:  # some were rounded up to one: the largest gives way
        counts[int(np.argmax(counts))] -= 1
    for source in np.argsort(counts - exact, kind="stable")[: ROUND - int(counts.sum())]:
        counts[source] += 1
    return counts
