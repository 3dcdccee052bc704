"""The kernels behind `tilemoe.kernels.triton.rounding`, in the order in which they run.

T tokens · E experts · K experts per token · m tile · f rows of an expert under top-K · r rows it computes
B blocks of TOKENS consecutive tokens · R_max row capacity

A key is an int32 that orders an expert's tokens: those that chose it first, by the score they carry, then the others
by S, then what is no token. Scores are not negative, so their bits order as they do.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.triton.rounding_select import OTHERS, OUT, row_threshold, value_of_key

TOKENS = tl.constexpr(32)  # of a block: the unit in which tokens are counted
CHOSEN = tl.constexpr(1)  # in `kept` (E, T), by which 0 is a token without the expert
ADDED = tl.constexpr(2)
ADDED_PAIR = tl.constexpr(1 << 14)  # in `code_of_pair`, beside the expert


@triton.jit
def score_of_logit(logit, top, inverse, SOFTMAX: tl.constexpr):
    """S of logits (tokens, any number), given each token's maximum and 1 / sum."""
    return tl.exp(logit - top[:, None]) * inverse[:, None] if SOFTMAX else 1.0 / (1.0 + tl.exp(-logit))


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def key_kernel(
    logits,
    expert_ids,
    kept_scores,
    token_mask,
    keys,
    norm,
    counts,
    real_tokens,
    num_tokens,
    num_blocks,
    num_experts,
    experts_per_token,
    SOFTMAX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """keys (E, B * TOKENS); norm (T, 2): the maximum and 1 / sum of a token's softmax; of this program's BLOCK_T
    tokens, counts (programs, E) of chosen pairs and real_tokens (programs). A tile is these tokens times all experts.
    """
    program = tl.program_id(0)
    token = program * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < num_tokens
    if token_mask is not None:
        real &= tl.load(token_mask + token, mask=real, other=0) != 0
    tl.store(real_tokens + program, tl.sum(real.to(tl.int32), axis=0))
    expert = tl.arange(0, BLOCK_E)
    valid = expert < num_experts
    line = logits + token.to(tl.int64)[:, None] * num_experts
    tile = tl.load(line + expert[None, :], mask=real[:, None] & valid[None, :], other=float("-inf"))
    top = tl.zeros((BLOCK_T,), dtype=tl.float32)
    inverse = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if SOFTMAX:
        top = tl.where(real, tl.max(tile, axis=1), 0.0)
        total = tl.sum(tl.exp(tile - top[:, None]), axis=1)
        inverse = 1.0 / tl.where(real, total, 1.0)
        place = norm + 2 * token.to(tl.int64)
        tl.store(place, top, mask=token < num_tokens)
        tl.store(place + 1, inverse, mask=token < num_tokens)
    score = score_of_logit(tile, top, inverse, SOFTMAX)
    key = (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + OTHERS
    key = tl.where(real[:, None], key, OUT)
    size = num_blocks * TOKENS
    columns = keys + expert.to(tl.int64)[None, :] * size
    tl.store(columns + token[:, None], key, mask=valid[None, :])
    tl.debug_barrier()  # the chosen pairs' keys replace what other threads have just written
    k = tl.arange(0, BLOCK_K)[None, :]
    pair = token.to(tl.int64)[:, None] * experts_per_token + k
    is_pair = real[:, None] & (k < experts_per_token)
    chosen = tl.load(expert_ids + pair, mask=is_pair, other=-1).to(tl.int32)
    is_pair &= (chosen >= 0) & (chosen < num_experts)
    carried = tl.load(kept_scores + pair, mask=is_pair, other=0.0)
    bits = carried.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(keys + chosen.to(tl.int64) * size + token[:, None], bits, mask=is_pair)
    flat = tl.reshape(tl.where(is_pair, chosen, 0), (BLOCK_T * BLOCK_K,))
    count = tl.histogram(flat, BLOCK_E, mask=tl.reshape(is_pair, (BLOCK_T * BLOCK_K,)))
    tl.store(counts + program.to(tl.int64) * num_experts + expert, count, mask=valid)


@triton.jit(do_not_specialize=["num_counts"])
def count_kernel(
    counts, real_tokens, pairs_of_expert, num_real, num_counts, num_experts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """pairs_of_expert (E): f, the sum of counts (num_counts, E); by the last program, num_real (1)."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        part = tl.zeros((ROWS,), dtype=tl.int32)
        for first in range(0, num_counts, ROWS):
            line = first + tl.arange(0, ROWS)
            part += tl.load(real_tokens + line, mask=line < num_counts, other=0)
        tl.store(num_real, tl.sum(part, axis=0))
    else:
        expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.int32)
        for first in range(0, num_counts, ROWS):
            line = first + tl.arange(0, ROWS)
            place = line.to(tl.int64)[:, None] * num_experts + expert[None, :]
            inside = (line < num_counts)[:, None] & (expert < num_experts)[None, :]
            total += tl.load(counts + place, mask=inside, other=0)
        tl.store(pairs_of_expert + expert, tl.sum(total, axis=0), mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def margin_kernel(
    keys, candidates, pairs_of_expert, num_real, lost, gained, num_blocks, scale,
    TILE: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """lost, gained (E) fp64: scores of the rows that go when f is rounded down, and of those that come when up."""
    expert = tl.program_id(0)
    size = num_blocks * TOKENS
    column = keys + expert.to(tl.int64) * size
    space = candidates + expert.to(tl.int64) * CANDIDATES
    f = tl.load(pairs_of_expert + expert)
    most = tl.load(num_real) // TILE * TILE
    down = f // TILE * TILE
    up = down + TILE
    sum_lost = tl.zeros((BLOCK,), dtype=tl.float64)
    sum_gained = tl.zeros((BLOCK,), dtype=tl.float64)
    if (f > down) & (up <= most):
        low_line, low_ties = row_threshold(column, size, space, f, down, CANDIDATES, BLOCK)
        tl.debug_barrier()
        high_line, high_ties = row_threshold(column, size, space, f, up, CANDIDATES, BLOCK)
        for first in range(0, size, BLOCK):
            token = first + tl.arange(0, BLOCK)
            key = tl.load(column + token, mask=token < size, other=OUT)
            value = value_of_key(key)
            sum_lost += tl.where((key >= 0) & (key < low_line), value, 0.0).to(tl.float64)
            sum_lost += tl.where((key >= 0) & (key == low_line), value, 0.0).to(tl.float64)
            sum_gained += tl.where((key < 0) & (key > high_line), value * scale, 0.0).to(tl.float64)
        # Of the rows at the line, low_ties stay, and high_ties come.
        sum_of_lost = tl.sum(sum_lost, axis=0) - low_ties * value_of_key(low_line).to(tl.float64)
        sum_of_gained = tl.sum(sum_gained, axis=0) + high_ties * (value_of_key(high_line) * scale).to(tl.float64)
        tl.store(lost + expert, sum_of_lost)
        tl.store(gained + expert, sum_of_gained)
    else:
        tl.store(lost + expert, 0.0)
        tl.store(gained + expert, 0.0)


@triton.jit
def round_kernel(
    pairs_of_expert, num_real, uniform, lost, gained, row_start_of_expert, num_experts,
    MODE: tl.constexpr, TILE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """row_start_of_expert (E+1): the running sum of r."""
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
        # See `tilemoe.kernels.torch.rounding.rounds_up`. The operator takes the sign of the number on its left.
        before = tl.cumsum(remainder, axis=0) - remainder
        goes_up = _deviation(before + remainder, TILE) - _deviation(before, TILE) > -remainder
    elif MODE == "up":
        goes_up = remainder > 0
    else:
        goes_up = f < 0
    r = tl.where(goes_up & (down + TILE <= most), down + TILE, down)
    r = tl.where(most == 0, f, r)
    ends = tl.cumsum(tl.where(valid, r, 0), axis=0)
    tl.store(row_start_of_expert, 0)
    tl.store(row_start_of_expert + 1 + expert, ends, mask=valid)


@triton.jit
def _deviation(remainders, TILE: tl.constexpr):
    """The number in [-TILE/2, TILE/2) that equals -remainders <= 0 modulo TILE, a power of two."""
    return ((TILE // 2 - remainders) & (TILE - 1)) - TILE // 2


@triton.jit(do_not_specialize=["num_blocks", "capacity"])
def row_kernel(
    keys,
    candidates,
    pairs_of_expert,
    row_start_of_expert,
    token_of_row,
    pair_of_row,
    row_of_pair,
    scores,
    kept,
    rows_before_block,
    num_blocks,
    num_experts,
    capacity,
    scale,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """token_of_row, pair_of_row, scores (R_max); the end of row_of_pair; kept (E, B * TOKENS); rows_before_block
    (E, B): the expert's rows of earlier blocks. One program for each expert.
    """
    expert = tl.program_id(0)
    size = num_blocks * TOKENS
    column = keys + expert.to(tl.int64) * size
    start = tl.load(row_start_of_expert + expert)
    r = tl.load(row_start_of_expert + expert + 1) - start
    f = tl.load(pairs_of_expert + expert)
    space = candidates + expert.to(tl.int64) * CANDIDATES
    line, ties = row_threshold(column, size, space, f, r, CANDIDATES, BLOCK)
    above, level = 0, 0  # keys above the line and at it, so far
    for first in range(0, size, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < size
        key = tl.load(column + token, mask=inside, other=OUT)
        is_above, is_level = (key > line).to(tl.int32), (key == line).to(tl.int32)
        both = is_above + (is_level << 16)  # one running sum for two: a block has fewer than 2^15
        before = tl.cumsum(both, axis=0) - both
        level_before = level + (before >> 16)
        row = start + above + (before & 0xFFFF) + tl.minimum(level_before, ties)
        keep = (is_above != 0) | ((is_level != 0) & (level_before < ties))
        value = value_of_key(key)
        tl.store(token_of_row + row, token, mask=keep)
        tl.store(pair_of_row + row, row, mask=keep)
        tl.store(scores + row, tl.where(key >= 0, value, value * scale), mask=keep)
        what = tl.where(keep, tl.where(key >= 0, CHOSEN, ADDED), 0)
        tl.store(kept + expert.to(tl.int64) * size + token, what.to(tl.int8), mask=inside)
        is_first = inside & (token % TOKENS == 0)
        tl.store(rows_before_block + expert.to(tl.int64) * num_blocks + token // TOKENS, row - start, mask=is_first)
        sums = tl.sum(both, axis=0)
        above += sums & 0xFFFF
        level += sums >> 16
    end = tl.load(row_start_of_expert + num_experts)
    for first in range(end + expert * BLOCK, capacity, tl.num_programs(0) * BLOCK):
        row = first + tl.arange(0, BLOCK)
        tl.store(token_of_row + row, 0, mask=row < capacity)
        tl.store(pair_of_row + row, 0, mask=row < capacity)
        tl.store(row_of_pair + row, -1, mask=row < capacity)
        tl.store(scores + row, 0.0, mask=row < capacity)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def token_kernel(
    kept, pair_start_of_token, pairs_of_block, num_tokens, num_blocks, num_experts, BLOCK_E: tl.constexpr
):  # fmt: skip
    """pair_start_of_token (T): the pairs of earlier tokens of the block; pairs_of_block (B)."""
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    count = tl.zeros((TOKENS,), dtype=tl.int32)
    for first in range(0, num_experts, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        place = expert.to(tl.int64)[:, None] * (num_blocks * TOKENS) + token[None, :]
        found = tl.load(kept + place, mask=(expert < num_experts)[:, None], other=0) != 0
        count += tl.sum(found.to(tl.int32), axis=0)
    tl.store(pair_start_of_token + token, tl.cumsum(count, axis=0) - count, mask=token < num_tokens)
    tl.store(pairs_of_block + block, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def pair_kernel(
    kept,
    rows_before_block,
    row_start_of_expert,
    pairs_of_block,
    pair_start_of_token,
    row_of_pair,
    code_of_pair,
    num_tokens,
    num_blocks,
    num_experts,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """pair_start_of_token (T+1), row_of_pair (R_max), and code_of_pair (R_max): the expert, and ADDED_PAIR if added."""
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    part = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, block, BLOCK):
        earlier = first + tl.arange(0, BLOCK)
        part += tl.load(pairs_of_block + earlier, mask=earlier < block, other=0)
    inside = token < num_tokens
    pair = tl.load(pair_start_of_token + token, mask=inside, other=0) + tl.sum(part, axis=0)
    tl.store(pair_start_of_token + token, pair, mask=inside)
    if block == num_blocks - 1:
        tl.store(pair_start_of_token + num_tokens, tl.load(row_start_of_expert + num_experts))
    for first in range(0, num_experts, BLOCK_E):
        expert = first + tl.arange(0, BLOCK_E)
        valid = expert < num_experts
        place = expert.to(tl.int64)[:, None] * (num_blocks * TOKENS) + token[None, :]
        what = tl.load(kept + place, mask=valid[:, None], other=0)
        found = (what != 0).to(tl.int32)
        row = tl.load(row_start_of_expert + expert, mask=valid, other=0)
        row += tl.load(rows_before_block + expert.to(tl.int64) * num_blocks + block, mask=valid, other=0)
        rows = row[:, None] + tl.cumsum(found, axis=1) - found
        pairs = pair[None, :] + tl.cumsum(found, axis=0) - found
        tl.store(row_of_pair + pairs, rows, mask=what != 0)
        code = expert[:, None] + tl.where(what == ADDED, ADDED_PAIR, 0)
        tl.store(code_of_pair + pairs, code.to(tl.int16), mask=what != 0)
        pair += tl.sum(found, axis=0)
