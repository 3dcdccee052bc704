"""A keyed permutation of ``range(size)`` in constant memory: a Feistel network with cycle walking.

Feistel rounds permute the smallest even-bit power of two that holds the range, at most 4 times larger; walking the
cycle until it is back in the range permutes the range itself (Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). It mixes well; it is no cipher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6


def permute(indices: NDArray[np.int64], size: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    """The images of ``indices`` (any shape, int64 in [0, size)) under the permutation that ``key`` picks.

    ``key`` is a tuple of integers >= 0. The expected work is a few rounds per index, whatever ``size``.
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
