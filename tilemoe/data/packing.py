"""Whole documents packed into windows with marks on the tokens to learn, and the order in which training reads windows.

B batch_size · S seq_len · N documents · W windows · n tokens of a document

A document of n tokens takes n - 1 places, because each place predicts the next token; so n is at most S + 1.
The stream of `TokenShards` holds ``4 id + 2 learnt + first`` for each token: its id, whether it is learnt, and whether
it begins a document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from tilemoe.checks import require_int
from tilemoe.data.chat_encoder import Encoded
from tilemoe.data.sampler import IGNORED_TARGET, BatchOrder, epochs, permute
from tilemoe.data.shards import TokenShards

Packing = Literal["best_fit", "one_document"]
PACKINGS = get_args(Packing)
FLAGS = 4  # ids are multiplied by it
_LEARNT, _FIRST = 2, 1
_ORDER = 0  # purpose in keys derived from (seed, epoch)
_CHUNK = 1 << 22  # tokens that are scanned at once


def flagged(encoded: Encoded) -> NDArray[np.int64]:
    """(n,) int64: the ids of a document with their flags, as stored in the stream."""
    ids, learnt = encoded
    stream = ids * FLAGS + np.where(learnt, _LEARNT, 0)
    stream[0] += _FIRST
    return stream


class PackedBatch(NamedTuple):
    """(B, S) int64 each. A target is the token after its input, or -100 if that is not learnt.

    ``positions``: the position of each input in its document; a document begins at each 0.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]


class PackedDocuments:
    """One split of documents, packed into W windows of S places.

    ``num_tokens``   tokens of all documents.
    ``num_targets``  tokens learnt; a window has at least one.
    ``num_bytes``    None: the learnt tokens alone are no text whose bytes could be counted.
    """

    num_bytes: None = None

    def __init__(self, shards: TokenShards, seq_len: int, packing: Packing = "best_fit") -> None:
        """No document of ``shards`` may be longer than S + 1. ``packing``: "best_fit" (`pack`), or "one_document"."""
        self.shards, self.seq_len = shards, seq_len
        self.directory, self.num_tokens = shards.directory, shards.num_tokens
        starts, learnt = _scan(shards)
        self._starts = np.append(starts, shards.num_tokens)
        places = np.diff(self._starts) - 1
        if places.max(initial=0) > seq_len:  # our own shards have none: they were turned away or cut
            raise ValueError(f"token shards {self.directory}: a document of over {seq_len + 1} tokens; delete them")
        window_of_document = pack(places, seq_len) if packing == "best_fit" else np.arange(places.size)
        self.num_windows = int(window_of_document.max()) + 1 if places.size else 0
        self._document_of_slot = np.argsort(window_of_document, kind="stable")
        ordered = window_of_document[self._document_of_slot]
        self._slot_of_window = np.searchsorted(ordered, np.arange(self.num_windows + 1))
        self.targets_of_window = np.bincount(window_of_document, learnt, self.num_windows).astype(np.int64)
        self.num_targets = int(self.targets_of_window.sum())
        self.places = int(places.sum())

    def __repr__(self) -> str:
        return f"PackedDocuments({str(self.directory)!r}, {self.shards.split!r}, num_windows={self.num_windows})"

    def read(self, windows: NDArray[np.int64]) -> PackedBatch:
        """The batch of these ``windows`` (B,). Each is padded by a document of separators without targets."""
        inputs = np.full((windows.size, self.seq_len), self.shards.separator_id, dtype=np.int64)
        targets = np.full_like(inputs, IGNORED_TARGET)
        positions = np.zeros_like(inputs)
        for row, window in enumerate(windows.tolist()):
            end = 0
            for document in self._document_of_slot[self._slot_of_window[window] : self._slot_of_window[window + 1]]:
                first, after = self._starts[document : document + 2].tolist()
                stream = self.shards.read(first, after - first)
                ids, is_learnt = stream // FLAGS, (stream & _LEARNT) > 0
                place = slice(end, end + ids.size - 1)
                inputs[row, place] = ids[:-1]
                targets[row, place] = np.where(is_learnt[1:], ids[1:], IGNORED_TARGET)
                positions[row, place] = np.arange(ids.size - 1)
                end += ids.size - 1
            positions[row, end:] = np.arange(self.seq_len - end)
        return PackedBatch(inputs, targets, positions)

    def batches(self, batch_size: int, windows: NDArray[np.int64] | None = None) -> Iterator[PackedBatch]:
        """Batches of every window, or of those in ``windows``, once and in order. The last batch is padded with its own
        last window, without targets.
        """
        require_int("batch_size", batch_size, 1)
        windows = np.arange(self.num_windows) if windows is None else windows
        for first in range(0, windows.size, batch_size):
            wanted = np.arange(first, first + batch_size)
            batch = self.read(windows[np.minimum(wanted, windows.size - 1)])
            batch.targets[wanted >= windows.size] = IGNORED_TARGET
            yield batch


class PackedSampler(BatchOrder):
    """Training batches as a pure function of (seed, step, rank), by the rules of `tilemoe.data.Sampler`.

    An epoch visits each of the W windows once, in its own random order; all epochs have the same windows.
    """

    def __init__(
        self, documents: PackedDocuments, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(documents.seq_len, batch_size, seed, rank, world_size)
        self.documents = documents

    def batch(self, step: int) -> PackedBatch:
        """(inputs, targets, positions) of ``step`` >= 0, (B, S) int64 each; a target that is not learnt is -100."""
        return self.documents.read(self._windows(self.first(step), self.batch_size))

    def num_targets(self, first_step: int, steps: int) -> int:
        """The number of targets of all ranks in ``steps`` steps from ``first_step`` on; no text is read for it."""
        windows = self._windows(*self.of_all_ranks(first_step, steps))
        return int(self.documents.targets_of_window[windows].sum())

    def _windows(self, first: int, count: int) -> NDArray[np.int64]:
        """(count,) windows at positions [first, first + count) of the endless sequence of epochs."""
        size = self.documents.num_windows
        parts = [permute(at, size, (_ORDER, self.seed, epoch)) for epoch, at in epochs(first, count, size)]
        return np.concatenate(parts)


def pack(places: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """(N,) the window of each document, by best fit decreasing; ``places`` (N,) <= ``room`` are the documents' sizes.

    Documents go, longest first, into the window with the least room left for them, or into a new one. The number of
    windows is at most 11/9 of the minimum, plus one (Johnson et al., SIAM J. Comput. 3, 1974). O(N (log N + room)).
    """
    window_of_document = np.empty(places.size, dtype=np.int64)
    windows_with: dict[int, list[int]] = {}  # room left -> windows
    rooms: list[int] = []  # the keys above, ascending
    num_windows = 0
    for document in np.argsort(-places, kind="stable").tolist():
        needed = int(places[document])
        at = bisect_left(rooms, needed)
        if at == len(rooms):
            window, left = num_windows, room - needed
            num_windows += 1
        else:
            found = rooms[at]
            window, left = windows_with[found].pop(), found - needed
            if not windows_with[found]:
                del windows_with[found], rooms[at]
        window_of_document[document] = window
        if left and left not in windows_with:
            insort(rooms, left)
        if left:
            windows_with.setdefault(left, []).append(window)
    return window_of_document


def _scan(shards: TokenShards) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(N,) the start of each document in the stream, and (N,) the number of its learnt targets."""
    starts, learnt = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for first in range(0, shards.num_tokens, _CHUNK):
        stream = shards.read(first, min(_CHUNK, shards.num_tokens - first))
        starts.append(first + np.flatnonzero(stream & _FIRST))
        learnt.append(first + np.flatnonzero((stream & (_LEARNT | _FIRST)) == _LEARNT))  # a first token is no target
    begins, targets = np.concatenate(starts), np.concatenate(learnt)
    documents = np.searchsorted(begins, targets, side="right") - 1
    return begins, np.bincount(documents, minlength=begins.size).astype(np.int64)
