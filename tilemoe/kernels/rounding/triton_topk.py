"""Device functions that find the tokens that an expert drops or adds, by thresholds instead of sorting.

T tokens · E experts · B blocks of TOKENS tokens · f rows of an expert under top-K · r rows that it computes
threshold: a key; ties: how many of the keys equal to it are taken, first ones first

The n best tokens that did not choose an expert are in the n blocks whose best such token is best (of equal ones, the
first): for every other block there are n better tokens. So only n * TOKENS tokens are examined, whatever the logits.
A threshold is found by bisecting the key space: the keys above a candidate are counted at most 31 times.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

TOKENS = tl.constexpr(32)  # tokens of a block, one per bit of an int32
OUT = tl.constexpr(-(2**31))  # key of a place that has no eligible token
OTHERS = tl.constexpr(-(2**31) + 1)  # key of a token that did not choose = this + S's bits; that chose: score's bits


@triton.jit
def popcount(bits):
    """The number of one bits in an int32, in the form that compilers turn into a popcount instruction."""
    v = bits.to(tl.uint32, bitcast=True)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    return ((v * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def score_of_logit(logit, top, inverse, SOFTMAX: tl.constexpr):
    """The score S of logits: softmax, given their tokens' maximum and 1 / sum, or sigmoid."""
    return tl.exp(logit - top) * inverse if SOFTMAX else 1.0 / (1.0 + tl.exp(-logit))


@triton.jit
def key_of_other(score):
    """S >= 0 as an int32 key with the order of S, at least OTHERS and below every key of a chosen token."""
    return (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + OTHERS


@triton.jit
def score_of_other(key):
    """The inverse of `key_of_other`, for a key that is not OUT."""
    return (key - OTHERS).to(tl.float32, bitcast=True)


@triton.jit
def first_of(key, inside, threshold, ties, above, level):
    """(keep, place, above, level). keep: the keys that exceed the threshold, and the first ``ties`` equal to it;
    place: their positions in a list.

    above, level: numbers of keys above the threshold and equal to it, before this part and (results) after it.
    """
    is_above, is_level = (inside & (key > threshold)).to(tl.int32), (inside & (key == threshold)).to(tl.int32)
    both = is_above + (is_level << 16)  # two scans in one, since there are fewer than 2^15 keys
    before = tl.cumsum(both, axis=0) - both
    level_before = level + (before >> 16)
    place = above + (before & 0xFFFF) + tl.minimum(level_before, ties)
    keep = (is_above != 0) | ((is_level != 0) & (level_before < ties))
    sums = tl.sum(both, axis=0)
    return keep, place, above + (sums & 0xFFFF), level + (sums >> 16)


@triton.jit
def nth_largest(keys, stride, size, want, lowest, BLOCK: tl.constexpr):
    """(threshold, ties): the ``want`` >= 1 largest of keys (size,) exceed it, or are the first ``ties`` equal to it.

    Keys below ``lowest`` are ignored; if fewer than ``want`` remain, the threshold is ``lowest``. The first BLOCK keys
    stay in registers, others are read again for each count.
    """
    held = _load_keys(keys, stride, size, 0, BLOCK)
    last = tl.max(held, axis=0)
    for first in range(BLOCK, size, BLOCK):
        last = tl.maximum(last, tl.max(_load_keys(keys, stride, size, first, BLOCK), axis=0))
    threshold = lowest
    if size <= BLOCK:  # scores are close to each other: starting at the smallest skips most of the key space
        threshold = tl.maximum(threshold, tl.min(tl.where(tl.arange(0, BLOCK) < size, held, last), axis=0))
    while threshold < last:
        middle = threshold + (last - threshold + 1) // 2
        count = _count_above(held, keys, stride, size, middle - 1, BLOCK)
        lower = tl.where(count == want, middle, middle - 1)  # stop once the count is right
        threshold, last = tl.where(count >= want, middle, threshold), tl.where(count > want, last, lower)
    return threshold, want - _count_above(held, keys, stride, size, threshold, BLOCK)


@triton.jit
def _load_keys(keys, stride, size, first, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    return tl.load(keys + at.to(tl.int64) * stride, mask=at < size, other=OUT)


@triton.jit
def _count_above(held, keys, stride, size, threshold, BLOCK: tl.constexpr):
    """How many of the keys (size,) are above the threshold."""
    count = tl.sum((held > threshold).to(tl.int32), axis=0)
    for first in range(BLOCK, size, BLOCK):
        count += tl.sum((_load_keys(keys, stride, size, first, BLOCK) > threshold).to(tl.int32), axis=0)
    return count


@triton.jit
def threshold_of_chosen(list_key, f, r, BLOCK: tl.constexpr):
    """(threshold, ties): the r < f best of list_key (f,) exceed it, or are the first ``ties`` equal to it."""
    threshold = tl.full((), 0x7FFFFFFF, dtype=tl.int32)
    ties = tl.zeros((), dtype=tl.int32)
    if r > 0:
        threshold, ties = nth_largest(list_key, 1, f, r, tl.zeros((), dtype=tl.int32), BLOCK)
    return threshold, ties


@triton.jit
def threshold_of_others(
    scored, block_bits, best, space, expert, want, sizes,
    SOFTMAX: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK_B: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """(threshold, ties, count). Writes candidates near_key, near_token (count,), in the order of the tokens. The
    ``want`` >= 1 best tokens that did not choose the expert are above the threshold, or the first ``ties`` equal to it.

    scored: logits (T, E), norm (T, 2), token_mask (T,) or None. block_bits, best (B, E). space: this CTA's own
    found_blocks, near_key, near_token. sizes: T, B, E.
    """
    found_blocks, near_key, near_token = space
    num_tokens, num_blocks, num_experts = sizes
    found, low = _best_blocks(best + expert, found_blocks, want, num_blocks, num_experts, BLOCK_B)
    lowest = tl.where(found >= want, low, OTHERS)
    count = 0
    for first in range(0, found * TOKENS, ELEMENTS):
        key, token = _others(
            scored, block_bits, found_blocks, first, found, expert, num_tokens, num_experts, SOFTMAX, ELEMENTS
        )
        take = (key >= lowest).to(tl.int32)
        place = count + tl.cumsum(take, axis=0) - take
        tl.store(near_key + place, key, mask=take != 0)
        tl.store(near_token + place, token, mask=take != 0)
        count += tl.sum(take, axis=0)
    tl.debug_barrier()  # other threads read what these have written
    threshold, ties = nth_largest(near_key, 1, count, want, lowest, NEAR)
    return threshold, ties, count


@triton.jit
def _best_blocks(best, found_blocks, want, num_blocks, num_experts, BLOCK_B: tl.constexpr):
    """(found, threshold). Writes found_blocks (found,): in order, the blocks of the ``want`` largest of best (B,)."""
    threshold, ties = nth_largest(best, num_experts, num_blocks, want, tl.full((), OTHERS, dtype=tl.int32), BLOCK_B)
    above, level = 0, 0
    for first in range(0, num_blocks, BLOCK_B):
        key = _load_keys(best, num_experts, num_blocks, first, BLOCK_B)
        keep, place, above, level = first_of(key, key >= OTHERS, threshold, ties, above, level)
        tl.store(found_blocks + place, first + tl.arange(0, BLOCK_B), mask=keep)
    tl.debug_barrier()  # other threads read what these have written
    return above + tl.minimum(level, ties), threshold


@triton.jit
def _others(
    scored, block_bits, found_blocks, first, found, expert, num_tokens, num_experts,
    SOFTMAX: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """(key, token) of ELEMENTS tokens of the found blocks, from ``first`` on; key OUT where a token is not eligible."""
    logits, norm, token_mask = scored
    at = first + tl.arange(0, ELEMENTS)
    inside = at // TOKENS < found
    block = tl.load(found_blocks + at // TOKENS, mask=inside, other=0)
    inner = at % TOKENS
    token = block * TOKENS + inner
    chosen = tl.load(block_bits + block.to(tl.int64) * num_experts + expert, mask=inside, other=0) >> inner
    free = inside & (token < num_tokens) & ((chosen & 1) == 0)
    if token_mask is not None:
        free &= tl.load(token_mask + token, mask=free, other=0) != 0
    logit = tl.load(logits + token.to(tl.int64) * num_experts + expert, mask=free, other=0.0)
    top = tl.zeros((ELEMENTS,), dtype=tl.float32)
    inverse = tl.full((ELEMENTS,), 1.0, dtype=tl.float32)
    if SOFTMAX:
        top = tl.load(norm + 2 * token.to(tl.int64), mask=free, other=0.0)
        inverse = tl.load(norm + 2 * token.to(tl.int64) + 1, mask=free, other=1.0)
    return tl.where(free, key_of_other(score_of_logit(logit, top, inverse, SOFTMAX)), OUT), token
