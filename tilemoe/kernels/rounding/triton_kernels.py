"""The kernels of token rounding, in the order in which `tilemoe.kernels.rounding.triton` launches them.

T tokens · E experts · K experts per token · W = ceil(E / 32) · m tile · B blocks of TOKENS consecutive tokens
f rows of an expert under top-K · r rows that it computes · R_max static row capacity

Choices are bit masks, so that a popcount gives the rank among an expert's tokens, or among a token's experts. Bit t of
block_bits (B, E): token t of the block chose the expert. token_bits (T, W, 2) has a word whose bit e says that the
token has expert 32 w + e, and the position of the word's first pair.

A key is an int32 with the order of the scores: their bits, since scores are not negative. For tokens that did not
choose an expert only the best key of each block is stored: best (B, E).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.rounding.triton_topk import (
    OUT,
    TOKENS,
    first_of,
    key_of_other,
    popcount,
    score_of_logit,
    score_of_other,
    threshold_of_chosen,
    threshold_of_others,
)

ADDED_PAIR = tl.constexpr(1 << 14)  # flag in `code_of_pair`, added to the expert's id


@triton.jit(do_not_specialize=["num_tokens"])
def key_kernel(
    logits, expert_ids, token_mask, norm, best, block_bits, token_bits, pairs_of_block, real_of_block, programs_done,
    num_tokens, num_experts, num_words, tokens_of_block,
    K: tl.constexpr, SOFTMAX: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr, LANES: tl.constexpr,
    WORDS: tl.constexpr, WORD_TOKENS: tl.constexpr,
):  # fmt: skip
    """Writes norm (T, 2), the maximum and 1 / sum of a token's softmax; best, block_bits (B, E); the bits of
    token_bits; pairs_of_block, real_of_block (B), the pairs and unmasked tokens; programs_done, 0. One CTA per block.

    A tile is (LANES, BLOCK_T, CHUNKS, 4), tokens times experts; a thread has four neighbouring experts in every chunk.
    So with up to 512 experts one warp has all of a token, and reductions over experts need no shared memory. Reductions
    over tokens are done once, at the end of the block.
    """
    block = tl.program_id(0)
    if block == 0:
        tl.store(programs_done, 0)
    chunk = tl.arange(0, CHUNKS)[None, None, :, None] * (LANES * 4)
    lane = tl.arange(0, LANES)[:, None, None, None] * 4
    expert = chunk + lane + tl.arange(0, 4)[None, None, None, :]
    bit = 1 << (expert & 31)
    inner = tl.arange(0, BLOCK_T)[None, :, None, None]
    most = tl.full((LANES, BLOCK_T, CHUNKS, 4), OUT, dtype=tl.int32)
    bits = tl.zeros((LANES, BLOCK_T, CHUNKS, 4), dtype=tl.int32)
    tile, real = _load_tile(logits, token_mask, block * TOKENS + inner, expert, num_tokens, num_experts, True)
    _store_words(
        expert_ids, token_mask, token_bits, pairs_of_block, real_of_block, num_tokens, num_experts, num_words,
        tokens_of_block, K, WORDS, WORD_TOKENS,
    )  # fmt: skip
    for first in range(0, tokens_of_block, BLOCK_T):  # not TOKENS, a constant: unrolling would double the registers
        token = block * TOKENS + first + inner
        is_left = first + BLOCK_T < tokens_of_block
        following, next_real = _load_tile(logits, token_mask, token + BLOCK_T, expert, num_tokens, num_experts, is_left)
        at_word = token_bits + (token.to(tl.int64) * num_words + ((chunk + lane) >> 5)) * 2
        words = tl.load(at_word, mask=real & (chunk + lane < num_experts), other=0)
        top = tl.zeros((1, BLOCK_T, 1, 1), dtype=tl.float32)
        inverse = tl.full((1, BLOCK_T, 1, 1), 1.0, dtype=tl.float32)
        if SOFTMAX:
            top = tl.max(tl.max(tl.max(tile, axis=3, keep_dims=True), axis=2, keep_dims=True), axis=0, keep_dims=True)
            top = tl.where(real, top, 0.0)
            total = tl.sum(tl.sum(tl.exp(tile - top), axis=3, keep_dims=True), axis=2, keep_dims=True)
            inverse = 1.0 / tl.where(real, tl.sum(total, axis=0, keep_dims=True), 1.0)
            at_norm = norm + 2 * token.to(tl.int64) + lane
            is_first = (token < num_tokens) & (lane == 0)
            tl.store(at_norm, tl.broadcast_to(top, (LANES, BLOCK_T, 1, 1)), mask=is_first)
            tl.store(at_norm + 1, tl.broadcast_to(inverse, (LANES, BLOCK_T, 1, 1)), mask=is_first)
        is_chosen = (words & bit) != 0
        key = key_of_other(score_of_logit(tile, top, inverse, SOFTMAX))
        most = tl.maximum(most, tl.where(real & (is_chosen == 0), key, OUT))
        bits |= tl.where(is_chosen, 1 << (first + inner), 0)
        tile, real = following, next_real
    out = block.to(tl.int64) * num_experts + expert
    valid = expert < num_experts
    tl.store(best + out, tl.max(most, axis=1, keep_dims=True), mask=valid)
    tl.store(block_bits + out, tl.sum(bits, axis=1, keep_dims=True), mask=valid)


@triton.jit
def _load_tile(logits, token_mask, token, expert, num_tokens, num_experts, is_left):
    """(logits of the tokens and experts, whether a token is real); -inf if the token or expert does not exist."""
    real = (token < num_tokens) & is_left
    if token_mask is not None:
        real &= tl.load(token_mask + token, mask=real, other=0) != 0
    at = logits + token.to(tl.int64) * num_experts + expert
    return tl.load(at, mask=real & (expert < num_experts), other=float("-inf")), real


@triton.jit
def _store_words(
    expert_ids, token_mask, token_bits, pairs_of_block, real_of_block, num_tokens, num_experts, num_words,
    tokens_of_block, K: tl.constexpr, WORDS: tl.constexpr, WORD_TOKENS: tl.constexpr,
):  # fmt: skip
    """Write token_bits of the block's tokens, pairs_of_block and real_of_block."""
    block = tl.program_id(0)
    word = tl.arange(0, WORDS)[None, :]
    pairs = tl.zeros((WORD_TOKENS, WORDS), dtype=tl.int32)
    reals = tl.zeros((WORD_TOKENS, WORDS), dtype=tl.int32)
    for first in range(0, tokens_of_block, WORD_TOKENS):
        token = block * TOKENS + first + tl.arange(0, WORD_TOKENS)[:, None]
        inside = (token < num_tokens) & (word < num_words)
        real = inside
        if token_mask is not None:
            real &= tl.load(token_mask + token + word * 0, mask=inside, other=0) != 0
        words = tl.zeros((WORD_TOKENS, WORDS), dtype=tl.int32)
        for k in tl.static_range(K):
            chosen = tl.load(expert_ids + token.to(tl.int64) * K + k + word * 0, mask=real, other=-1).to(tl.int32)
            words |= tl.where((chosen >> 5 == word) & (chosen < num_experts), 1 << (chosen & 31), 0)
        tl.store(token_bits + (token.to(tl.int64) * num_words + word) * 2, words, mask=inside)
        pairs += popcount(words)
        reals += (real & (word == 0)).to(tl.int32)
    tl.store(pairs_of_block + block, tl.sum(tl.sum(pairs, axis=1), axis=0))
    tl.store(real_of_block + block, tl.sum(tl.sum(reals, axis=1), axis=0))
    tl.debug_barrier()  # other threads read these words


@triton.jit(do_not_specialize=["num_blocks"])
def count_kernel(
    block_bits, real_of_block, uniform, pairs_before, pairs_of_expert, num_real, programs_done, row_start_of_expert,
    chosen_start, num_blocks, num_experts,
    MODE: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes pairs_before (B, E), an expert's pairs in earlier blocks; pairs_of_expert (E), f; and num_real, the number
    of unmasked tokens. The CTA that finishes last then does the rounding, see `_round`.
    """
    if tl.program_id(0) == tl.num_programs(0) - 1:
        part = tl.zeros((ROWS,), dtype=tl.int32)
        for first in range(0, num_blocks, ROWS):
            block = first + tl.arange(0, ROWS)
            part += tl.load(real_of_block + block, mask=block < num_blocks, other=0)
        tl.store(num_real, tl.sum(part, axis=0))
    else:
        expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), dtype=tl.int32)
        for first in range(0, num_blocks, ROWS):
            block = first + tl.arange(0, ROWS)
            place = block.to(tl.int64)[:, None] * num_experts + expert[None, :]
            inside = (block < num_blocks)[:, None] & (expert < num_experts)[None, :]
            count = popcount(tl.load(block_bits + place, mask=inside, other=0))
            tl.store(pairs_before + place, total[None, :] + tl.cumsum(count, axis=0) - count, mask=inside)
            total += tl.sum(count, axis=0)
        tl.store(pairs_of_expert + expert, total, mask=expert < num_experts)
    tl.debug_barrier()  # orders all threads' stores before the atomic, and the last CTA's loads after it
    if tl.atomic_add(programs_done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        _round(
            pairs_of_expert, num_real, uniform, None, None, row_start_of_expert, chosen_start, num_experts, MODE, TILE,
            BLOCK_E,
        )  # fmt: skip


@triton.jit
def round_kernel(
    pairs_of_expert, num_real, uniform, lost, gained, row_start_of_expert, chosen_start, num_experts,
    TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute the row starts again for "nearest_score", which needs `margin_kernel`'s lost and gained. A single CTA."""
    _round(
        pairs_of_expert, num_real, uniform, lost, gained, row_start_of_expert, chosen_start, num_experts,
        "nearest_score", TILE, BLOCK_E,
    )  # fmt: skip


@triton.jit
def _round(
    pairs_of_expert, num_real, uniform, lost, gained, row_start_of_expert, chosen_start, num_experts,
    MODE: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Choose each expert's r by MODE; write row_start_of_expert (E+1), the scan of r, and chosen_start (E+1), of f."""
    expert = tl.arange(0, BLOCK_E)
    valid = expert < num_experts
    f = tl.load(pairs_of_expert + expert, mask=valid, other=0)
    most = tl.load(num_real) // TILE * TILE
    remainder = f % TILE
    down = f - remainder
    if MODE == "nearest":
        goes_up = remainder * 2 > TILE
    elif MODE == "stochastic":
        goes_up = tl.load(uniform + expert, mask=valid, other=1.0) * TILE < remainder
    elif MODE == "nearest_score":
        draw = tl.load(uniform + expert, mask=valid, other=1.0).to(tl.float64)
        less = tl.load(lost + expert, mask=valid, other=0.0)
        goes_up = draw * (less + tl.load(gained + expert, mask=valid, other=0.0)) < less
    elif MODE == "balance":
        # See `tilemoe.kernels.rounding.torch.rounds_up`.
        before = tl.cumsum(remainder, axis=0) - remainder
        goes_up = _deviation(before + remainder, TILE) - _deviation(before, TILE) > -remainder
    elif MODE == "up":
        goes_up = remainder > 0
    else:
        goes_up = f < 0
    r = tl.where(goes_up & (down + TILE <= most), down + TILE, down)
    r = tl.where(most == 0, f, r)
    tl.store(row_start_of_expert, 0)
    tl.store(row_start_of_expert + 1 + expert, tl.cumsum(tl.where(valid, r, 0), axis=0), mask=valid)
    tl.store(chosen_start, 0)
    tl.store(chosen_start + 1 + expert, tl.cumsum(f, axis=0), mask=valid)


@triton.jit
def _deviation(remainders, TILE: tl.constexpr):
    """The number in [-TILE/2, TILE/2) congruent to -remainders modulo TILE, a power of two (% would keep the sign)."""
    return ((TILE // 2 - remainders) & (TILE - 1)) - TILE // 2


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    expert_ids, kept_scores, block_bits, pairs_before, chosen_start, list_key, list_token, list_expert, num_pairs,
    num_experts, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write list_key, list_token, list_expert (T * K): the chosen pairs, sorted by expert, then by token."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    expert = tl.load(expert_ids + pair, mask=inside, other=-1).to(tl.int32)
    score = tl.load(kept_scores + pair, mask=inside, other=0.0)
    inside &= (expert >= 0) & (expert < num_experts)
    token = pair // K
    inner = token % TOKENS
    here = (token // TOKENS).to(tl.int64) * num_experts + expert
    bits = tl.load(block_bits + here, mask=inside, other=0)
    to = tl.load(chosen_start + expert, mask=inside, other=0) + tl.load(pairs_before + here, mask=inside, other=0)
    to += popcount(bits & ((1 << inner) - 1))
    inside &= ((bits >> inner) & 1) != 0  # masked tokens have no bit
    tl.store(list_key + to, score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, mask=inside)
    tl.store(list_token + to, token, mask=inside)
    tl.store(list_expert + to, expert.to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "most_blocks"])
def margin_kernel(
    logits, norm, token_mask, block_bits, best, found_blocks, near_key, near_token, list_key, chosen_start,
    pairs_of_expert, num_real, lost, gained, num_tokens, num_blocks, num_experts, most_blocks, scale,
    SOFTMAX: tl.constexpr, TILE: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK_B: tl.constexpr, NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write lost and gained (E) fp64: the sums of the scores of the rows that rounding f down would drop, and that
    rounding f up would add. One CTA for each expert.
    """
    expert = tl.program_id(0)
    f = tl.load(pairs_of_expert + expert)
    list_key += tl.load(chosen_start + expert)
    scored, sizes = (logits, norm, token_mask), (num_tokens, num_blocks, num_experts)
    space = _space_of(expert, most_blocks, found_blocks, near_key, near_token)
    down = f // TILE * TILE
    if (f > down) & (down + TILE <= tl.load(num_real) // TILE * TILE):
        threshold, ties = threshold_of_chosen(list_key, f, down, BLOCK)
        above, level = 0, 0
        sum_lost = tl.zeros((BLOCK,), dtype=tl.float64)
        for first in range(0, f, BLOCK):
            at = first + tl.arange(0, BLOCK)
            key = tl.load(list_key + at, mask=at < f, other=0)
            keep, _, above, level = first_of(key, at < f, threshold, ties, above, level)
            score = key.to(tl.float32, bitcast=True)
            sum_lost += tl.where((at < f) & (keep == 0), score, 0.0).to(tl.float64)
        tl.store(lost + expert, tl.sum(sum_lost, axis=0))  # stored now to free registers for the search below
        threshold, ties, count = threshold_of_others(
            scored, block_bits, best, space, expert, down + TILE - f, sizes, SOFTMAX, ELEMENTS, BLOCK_B, NEAR
        )
        above, level = 0, 0
        sum_gained = tl.zeros((NEAR,), dtype=tl.float64)
        for first in range(0, count, NEAR):
            at = first + tl.arange(0, NEAR)
            key = tl.load(space[1] + at, mask=at < count, other=OUT)
            keep, _, above, level = first_of(key, at < count, threshold, ties, above, level)
            sum_gained += tl.where(keep, score_of_other(key) * scale, 0.0).to(tl.float64)
        tl.store(gained + expert, tl.sum(sum_gained, axis=0))
    else:
        tl.store(lost + expert, 0.0)
        tl.store(gained + expert, 0.0)


@triton.jit
def _space_of(expert, most_blocks, found_blocks, near_key, near_token):
    """This expert's slices of found_blocks (E, most_blocks), near_key and near_token (E, most_blocks * TOKENS)."""
    start = expert.to(tl.int64) * most_blocks
    return found_blocks + start, near_key + start * TOKENS, near_token + start * TOKENS


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "most_blocks"])
def row_kernel(
    logits, norm, token_mask, block_bits, pairs_before, best, found_blocks, near_key, near_token, list_key, list_token,
    chosen_start, row_start_of_expert, token_bits, pairs_of_block, changed, added_row, token_of_row, scores,
    num_tokens, num_blocks, num_experts, num_words, most_blocks, scale,
    SOFTMAX: tl.constexpr, TILE: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK_B: tl.constexpr, NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write changed (E, TILE), the tokens that the expert drops or adds, in order; for added ones also added_row (E,
    TILE), and token_of_row and scores of these rows. Updates token_bits and pairs_of_block. One CTA for each expert.
    """
    expert = tl.program_id(0)
    start = tl.load(row_start_of_expert + expert)
    r = tl.load(row_start_of_expert + expert + 1) - start
    begin = tl.load(chosen_start + expert)
    f = tl.load(chosen_start + expert + 1) - begin
    by_token = (token_bits, pairs_of_block, num_words)
    changed += expert.to(tl.int64) * TILE
    if r < f:
        _drop(list_key + begin, list_token + begin, f, r, changed, by_token, expert, BLOCK)
    elif r > f:
        scored, sizes = (logits, norm, token_mask), (num_tokens, num_blocks, num_experts)
        space = _space_of(expert, most_blocks, found_blocks, near_key, near_token)
        threshold, ties, count = threshold_of_others(
            scored, block_bits, best, space, expert, r - f, sizes, SOFTMAX, ELEMENTS, BLOCK_B, NEAR
        )
        near, before = (space[1], space[2], count), (block_bits, pairs_before)
        rows = (start, added_row + expert.to(tl.int64) * TILE, token_of_row, scores)
        _add(near, threshold, ties, before, changed, rows, by_token, expert, num_experts, scale, NEAR)


@triton.jit
def _drop(list_key, list_token, f, r, changed, by_token, expert, BLOCK: tl.constexpr):
    """Drop all but the r best of the expert's chosen pairs."""
    threshold, ties = threshold_of_chosen(list_key, f, r, BLOCK)
    above, level = 0, 0
    for first in range(0, f, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < f
        key = tl.load(list_key + at, mask=inside, other=0)
        keep, place, above, level = first_of(key, inside, threshold, ties, above, level)
        drop = inside & (keep == 0)
        token = tl.load(list_token + at, mask=drop, other=0)
        tl.store(changed + at - place, token, mask=drop)
        _turn_pairs(by_token, token, expert, -1, drop)


@triton.jit
def _add(
    near, threshold, ties, before, changed, rows, by_token, expert, num_experts, scale, NEAR: tl.constexpr
):  # fmt: skip
    """Add the tokens above the threshold and the first ``ties`` equal to it; rows stay in the order of the tokens."""
    near_key, near_token, count = near
    block_bits, pairs_before = before
    start, added_row, token_of_row, scores = rows
    above, level = 0, 0
    for first in range(0, count, NEAR):
        at = first + tl.arange(0, NEAR)
        key = tl.load(near_key + at, mask=at < count, other=OUT)
        token = tl.load(near_token + at, mask=at < count, other=0)
        keep, place, above, level = first_of(key, at < count, threshold, ties, above, level)
        here = (token // TOKENS).to(tl.int64) * num_experts + expert
        bits = tl.load(block_bits + here, mask=keep, other=0)
        row = start + place + tl.load(pairs_before + here, mask=keep, other=0)
        row += popcount(bits & ((1 << (token % TOKENS)) - 1))
        tl.store(changed + place, token, mask=keep)
        tl.store(added_row + place, row, mask=keep)
        tl.store(token_of_row + row, token, mask=keep)
        tl.store(scores + row, score_of_other(key) * scale, mask=keep)
        _turn_pairs(by_token, token, expert, 1, keep)


@triton.jit
def _turn_pairs(by_token, token, expert, by, mask):
    """Flip the expert's bit of each of these tokens and add ``by`` to the number of pairs of its block.

    The atomics are deterministic: integer sums do not depend on order, and each bit is flipped at most once.
    """
    token_bits, pairs_of_block, num_words = by_token
    place = (token.to(tl.int64) * num_words + (expert >> 5)) * 2
    bit = tl.full(token.shape, 1, dtype=tl.int32) << (expert & 31)
    tl.atomic_xor(token_bits + place, bit, mask=mask, sem="relaxed")
    tl.atomic_add(pairs_of_block + token // TOKENS, tl.full(token.shape, by, dtype=tl.int32), mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def token_kernel(
    token_bits, pairs_of_block, row_start_of_expert, pair_start_of_token, num_tokens, num_experts, num_words,
    BLOCK_T: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write pair_start_of_token (T+1), and in token_bits the position of each word's first pair."""
    first_block = tl.program_id(0) * (BLOCK_T // TOKENS)
    part = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, first_block, BLOCK):
        earlier = first + tl.arange(0, BLOCK)
        part += tl.load(pairs_of_block + earlier, mask=earlier < first_block, other=0)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    word = tl.arange(0, WORDS)
    inside = token < num_tokens
    place = (token.to(tl.int64)[:, None] * num_words + word[None, :]) * 2
    mask = inside[:, None] & (word < num_words)[None, :]
    count = popcount(tl.load(token_bits + place, mask=mask, other=0))
    of_token = tl.sum(count, axis=1)
    start = tl.sum(part, axis=0) + tl.cumsum(of_token, axis=0) - of_token
    tl.store(pair_start_of_token + token, start, mask=inside)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(pair_start_of_token + num_tokens, tl.load(row_start_of_expert + num_experts))
    tl.store(token_bits + place + 1, start[:, None] + tl.cumsum(count, axis=1) - count, mask=mask)


@triton.jit(do_not_specialize=["capacity"])
def pair_kernel(
    list_key, list_token, list_expert, chosen_start, row_start_of_expert, changed, added_row, token_bits, token_of_row,
    pair_of_row, row_of_pair, code_of_pair, scores, capacity, num_experts, num_words,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write token_of_row, pair_of_row, row_of_pair, scores, code_of_pair (expert, plus ADDED_PAIR if added), (R_max).

    A CTA handles BLOCK chosen pairs, of which it writes the kept ones; BLOCK added pairs, whose rows `row_kernel` has
    written; and BLOCK rows past R, which it clears (except code_of_pair).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    by_pair = (token_bits, num_words, row_of_pair, code_of_pair)
    inside = at < tl.load(chosen_start + num_experts)
    expert = tl.load(list_expert + at, mask=inside, other=0).to(tl.int32)
    token = tl.load(list_token + at, mask=inside, other=0)
    key = tl.load(list_key + at, mask=inside, other=0)
    begin, start, more = _expert_of(chosen_start, row_start_of_expert, expert, inside)
    change, is_dropped = _changes_before(changed + expert.to(tl.int64) * TILE, token, more)
    row, keep = start + at - begin + change, inside & (is_dropped == 0)
    tl.store(token_of_row + row, token, mask=keep)
    tl.store(scores + row, key.to(tl.float32, bitcast=True), mask=keep)
    _store_pairs(by_pair, row, token, expert, expert, keep)
    if tl.program_id(0) * BLOCK < num_experts * TILE:
        expert = at // TILE
        inside = expert < num_experts
        _, _, more = _expert_of(chosen_start, row_start_of_expert, expert, inside)
        is_added = inside & (at % TILE < more)
        token = tl.load(changed + at, mask=is_added, other=0)
        row = tl.load(added_row + at, mask=is_added, other=0)
        _store_pairs(by_pair, row, token, expert, expert + ADDED_PAIR, is_added)
    used, inside = at < tl.load(row_start_of_expert + num_experts), at < capacity
    tl.store(pair_of_row + at, tl.where(used, at, 0), mask=inside)
    unused = inside & (used == 0)
    tl.store(token_of_row + at, 0, mask=unused)
    tl.store(row_of_pair + at, -1, mask=unused)
    tl.store(scores + at, 0.0, mask=unused)


@triton.jit
def _expert_of(chosen_start, row_start_of_expert, expert, mask):
    """(first position in the list of chosen pairs, first row, r - f) of each ``expert``."""
    begin = tl.load(chosen_start + expert, mask=mask, other=0)
    start = tl.load(row_start_of_expert + expert, mask=mask, other=0)
    f = tl.load(chosen_start + expert + 1, mask=mask, other=0) - begin
    return begin, start, tl.load(row_start_of_expert + expert + 1, mask=mask, other=0) - start - f


@triton.jit
def _changes_before(changed, token, more):
    """(rows added before the token, or if negative dropped; is the token dropped), by bisecting changed (|more|,)."""
    lowest, highest = tl.zeros_like(token), tl.abs(more)
    most_left = tl.max(highest, axis=0)
    while most_left > 0:
        middle = (lowest + highest) // 2
        is_open = lowest < highest
        is_before = tl.load(changed + middle, mask=is_open, other=0) < token
        lowest = tl.where(is_open & is_before, middle + 1, lowest)
        highest = tl.where(is_open & (is_before == 0), middle, highest)
        most_left //= 2
    is_dropped = tl.load(changed + lowest, mask=lowest < -more, other=-1) == token
    return tl.where(more > 0, lowest, -lowest), is_dropped


@triton.jit
def _store_pairs(by_pair, row, token, expert, code, mask):
    token_bits, num_words, row_of_pair, code_of_pair = by_pair
    place = (token.to(tl.int64) * num_words + (expert >> 5)) * 2
    bits = tl.load(token_bits + place, mask=mask, other=0)
    pair = tl.load(token_bits + place + 1, mask=mask, other=0) + popcount(bits & ((1 << (expert & 31)) - 1))
    tl.store(row_of_pair + pair, row, mask=mask)
    tl.store(code_of_pair + pair, code.to(tl.int16), mask=mask)
