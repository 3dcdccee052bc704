"""Batches of next-token windows: in a seeded, stateless order for training, and in sequence for evaluation.

B batch_size · S seq_len · W windows of an epoch
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tilemoe.checks import require_int
from tilemoe.data.shards import TokenShards

IGNORED_TARGET = -100

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]

_ROUNDS = 6  # of the permutation's Feistel network
_ORDER, _OFFSET = 0, 1  # purposes in keys derived from (seed, epoch)


class BatchOrder:
    """Assigns positions of an endless sequence to ranks: ``step`` of rank r has the positions
    ``(step * world_size + r) * B + [0, B)``. ValueError: the rank or a size is invalid.
    """

    def __init__(self, seq_len: int, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        check_sizes(seq_len, batch_size)
        require_int("seed", seed, 0)
        require_int("world_size", world_size, 1)
        require_int("rank", rank, 0)
        if rank >= world_size:
            raise ValueError(f"rank must be below world_size ({world_size}), got {rank}")
        self.seq_len, self.batch_size = seq_len, batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size

    def first(self, step: int) -> int:
        """The first position of ``step`` >= 0 of this rank."""
        require_int("step", step, 0)
        return (step * self.world_size + self.rank) * self.batch_size

    def of_all_ranks(self, first_step: int, steps: int) -> tuple[int, int]:
        """The first position, and the number of positions, of ``steps`` steps of all ranks from ``first_step`` on."""
        per_step = self.world_size * self.batch_size
        return first_step * per_step, steps * per_step


class Sampler(BatchOrder):
    """Training batches as a pure function of (seed, step, rank): nothing to save, nothing to restore.

    An epoch treats the split as a ring, cuts it from a random offset on into W = ``num_windows`` windows of S tokens,
    and visits each window once in a random order. Offset and order are drawn per epoch, so windows and the unused
    remainder differ each time. Epochs follow each other without a gap, and `BatchOrder` assigns the positions of this
    endless sequence to ranks. Two ranks never share a position, and the data of a step depend only on B * world_size.
    Time and memory per call are O(B * S) for any number of tokens.
    """

    def __init__(
        self, shards: TokenShards, seq_len: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(seq_len, batch_size, seed, rank, world_size)
        if shards.num_tokens < seq_len + 1:
            raise ValueError(
                f"the {shards.split} split in {shards.directory} has {shards.num_tokens} tokens, fewer than "
                f"data.seq_len + 1 = {seq_len + 1}; lower data.seq_len or give more text"
            )
        self.shards, self.num_windows = shards, shards.num_tokens // seq_len

    def batch(self, step: int) -> Batch:
        """(inputs, targets) of ``step`` >= 0, (B, S) int64 each; a target is the token after its input."""
        windows = np.stack([self._read_ring(int(start)) for start in self.starts(step)])
        return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])

    def num_targets(self, first_step: int, steps: int) -> int:
        """The number of targets of all ranks in ``steps`` steps."""
        return self.of_all_ranks(first_step, steps)[1] * self.seq_len

    def starts(self, step: int) -> NDArray[np.int64]:
        """(B,) int64: the first token, in the split, of each sequence of the batch."""
        first, done = self.first(step), 0
        starts = np.empty(self.batch_size, dtype=np.int64)  # one array, so a batch too large for memory fails here
        for epoch, at in epochs(first, self.batch_size, self.num_windows):
            drawn = np.random.SeedSequence((_OFFSET, self.seed, epoch)).generate_state(1, np.uint64)
            offset = int(drawn[0]) % self.shards.num_tokens
            window = permute(at, self.num_windows, (_ORDER, self.seed, epoch))
            starts[done : done + at.size] = (offset + window * self.seq_len) % self.shards.num_tokens
            done += at.size
        return starts

    def _read_ring(self, start: int) -> NDArray[np.int64]:
        """(S + 1,) int64 from ``start`` on; after the split's last token, a separator, its first token follows."""
        length = self.seq_len + 1
        before_end = min(length, self.shards.num_tokens - start)
        head = self.shards.read(start, before_end)
        return head if before_end == length else np.concatenate([head, self.shards.read(0, length - before_end)])


def sequential_windows(
    shards: TokenShards, seq_len: int, batch_size: int, windows: NDArray[np.int64] | None = None
) -> Iterator[Batch]:
    """(inputs, targets) batches, (B, S) int64, in which every token of the split is a target exactly once, in order.

    The first input is the separator, as before any document. The last batch is padded with separators as inputs and
    targets of -100, so that all batches have one shape. ``windows``: read only these, numbered from 0.
    """
    check_sizes(seq_len, batch_size)
    windows = np.arange(-(-shards.num_tokens // seq_len)) if windows is None else windows
    for first in range(0, windows.size, batch_size):
        inputs = np.full((batch_size, seq_len), shards.separator_id, dtype=np.int64)
        targets = np.full_like(inputs, IGNORED_TARGET)
        for row, start in enumerate((windows[first : first + batch_size] * seq_len).tolist()):
            tokens = shards.read(start, min(seq_len, shards.num_tokens - start))
            if start:
                inputs[row, 0] = shards.read(start - 1, 1)[0]
            inputs[row, 1 : tokens.size], targets[row, : tokens.size] = tokens[:-1], tokens
        yield inputs, targets


def check_sizes(seq_len: int, batch_size: int) -> None:
    require_int("seq_len", seq_len, 1)
    require_int("batch_size", batch_size, 1)


def epochs(first: int, count: int, size: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(epoch, indices in it below ``size``) for the positions [first, first + count) of consecutive epochs."""
    end = first + count
    while first < end:
        epoch, index = divmod(first, size)
        taken = min(end - first, size - index)
        yield epoch, np.arange(index, index + taken)
        first += taken


def permute(indices: NDArray[np.int64], size: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """The images of ``indices`` (any shape, int64 in [0, size)) under the permutation that ``key`` selects.

    ``key`` is a tuple of integers >= 0. A Feistel network permutes the smallest power of 4 that holds the range; an
    index that leaves the range is permuted again until it is back, which permutes the range itself (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). It mixes well in constant memory, but it is no secure cipher.
    """
    assert 1 <= size <= 1 << 62
    assert indices.size == 0 or (indices.min() >= 0 and indices.max() < size)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = np.asarray(np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64), dtype=np.uint64)
    out = _feistel(indices.astype(np.uint64).reshape(-1), half_bits, round_keys)
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _feistel(out[outside], half_bits, round_keys)
    return out.astype(np.int64).reshape(indices.shape)


def _feistel(values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of the integers below ``2 ** (2 * half_bits)``."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, modulo 2**64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
