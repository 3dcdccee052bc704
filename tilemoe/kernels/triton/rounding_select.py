"""The threshold of an expert's rows: which key is the last to be kept, found without sorting.

The rows to drop or to add are fewer than a tile. So first every thread's own best key is taken, which bounds the
threshold from one side; the few keys beyond that bound are copied out, and a bisection of key space counts those.
Where there are too many of them (equal scores), it counts the whole column instead: slower, and as exact.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

OUT = tl.constexpr(-(2**31))  # the key of what is no token
OTHERS = tl.constexpr(-(2**31) + 1)  # added to the bits of S; keys of chosen tokens are bits themselves
_COARSE = tl.constexpr(1 << 16)  # of key space: as near as the bound comes, seven bits of the mantissa


@triton.jit
def value_of_key(key):
    """fp32 score of a key that is not OUT."""
    return tl.where(key >= 0, key, key - OTHERS).to(tl.float32, bitcast=True)


@triton.jit
def row_threshold(column, size, space, f, r, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """(line, ties): the r best of ``column`` (size,) are the keys above ``line`` and the first ``ties`` equal to it.

    f: how many of the keys are not negative. space (CANDIDATES,): for this program alone.
    """
    line = tl.full((), -1, dtype=tl.int32)  # between the chosen and the others: right for r = f
    ties = tl.zeros((), dtype=tl.int32)
    if r > f:
        line, _, beyond = _nth_largest(column, size, space, 0, OTHERS, -1, r - f, CANDIDATES, BLOCK)
        ties = r - f - beyond
    elif r < f:
        # The complement of an integer turns the order around.
        turned, within, _ = _nth_largest(column, size, space, -1, OTHERS, -1, f - r, CANDIDATES, BLOCK)
        line = ~turned
        ties = r - f + within
    return line, ties


@triton.jit
def _nth_largest(column, size, space, turn, low, high, want, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """(key, count of keys >= it, count of keys > it) of the ``want``-th largest of ``column ^ turn`` in [low, high].

    low and high are of one sign; want >= 1 and there are that many.
    """
    best = tl.full((BLOCK,), OUT, dtype=tl.int32)
    for first in range(0, size, BLOCK):
        best = tl.maximum(best, _load_keys(column, first, size, turn, low, high, BLOCK))
    top = tl.max(best, axis=0)
    bound, above = tl.full((), low, dtype=tl.int32), top
    while above - bound > _COARSE:
        middle = bound + (above - bound) // 2
        if tl.sum((best >= middle).to(tl.int32), axis=0) >= want:
            bound = middle
        else:
            above = middle
    found = 0
    for first in range(0, size, BLOCK):
        key = _load_keys(column, first, size, turn, low, high, BLOCK)
        take = (key >= bound).to(tl.int32)
        place = found + tl.cumsum(take, axis=0) - take
        tl.store(space + place, key, mask=(take != 0) & (place < CANDIDATES))
        found += tl.sum(take, axis=0)
    tl.debug_barrier()  # what other threads have copied is read below
    last = top
    within, beyond = tl.zeros((), dtype=tl.int32), tl.zeros((), dtype=tl.int32)
    if found <= CANDIDATES:
        at = tl.arange(0, CANDIDATES)
        copied = tl.load(space + at, mask=at < found, other=OUT)  # turned already, and in range
        while bound < last:
            middle = bound + (last - bound + 1) // 2
            count = tl.sum((copied >= middle).to(tl.int32), axis=0)
            bound, last = _narrowed(bound, last, middle, count, want)
        within = tl.sum((copied >= bound).to(tl.int32), axis=0)
        beyond = tl.sum((copied > bound).to(tl.int32), axis=0)
    else:
        while bound < last:
            middle = bound + (last - bound + 1) // 2
            count = _count_from(column, size, turn, middle, high, BLOCK)
            bound, last = _narrowed(bound, last, middle, count, want)
        within = _count_from(column, size, turn, bound, high, BLOCK)
        beyond = _count_from(column, size, turn, bound + 1, high, BLOCK)
    return bound, within, beyond


@triton.jit
def _narrowed(bound, last, middle, count, want):
    """(bound, last) around the threshold, once ``count`` keys are known to be >= middle: equal if they are all."""
    lower = tl.where(count == want, middle, middle - 1)
    return tl.where(count >= want, middle, bound), tl.where(count > want, last, lower)


@triton.jit
def _load_keys(column, first, size, turn, low, high, BLOCK: tl.constexpr):
    """(BLOCK,) keys, turned; OUT where out of range."""
    at = first + tl.arange(0, BLOCK)
    key = tl.load(column + at, mask=at < size, other=0) ^ turn
    return tl.where((at < size) & (key >= low) & (key <= high), key, OUT)


@triton.jit
def _count_from(column, size, turn, low, high, BLOCK: tl.constexpr):
    """How many keys, turned, lie in [low, high]."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, size, BLOCK):
        count += (_load_keys(column, first, size, turn, low, high, BLOCK) != OUT).to(tl.int32)
    return tl.sum(count, axis=0)
