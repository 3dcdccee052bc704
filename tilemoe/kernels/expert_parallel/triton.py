"""Send and receive buffers of expert parallelism's dispatch all-to-all, on a GPU, without host sync.

`tilemoe.kernels.expert_parallel.torch` documents the results. Here they take seven kernels; PyTorch takes some seventy.

T tokens · W ranks · E experts, e = E / W of them on each rank · P pairs sent · Q pairs received · B blocks

They are counting sorts without atomics, as in `tilemoe.kernels.plan.triton`: count each block, scan over the blocks,
place stably. Sending: `count_sent_kernel`, `block_start_kernel`, `place_sent_kernel`. Receiving:
`count_received_kernel`, `block_start_kernel`, `row_start_kernel`, `place_received_kernel`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.kernels.plan.triton import (
    MAX_EXPERTS,
    MAX_PAIRS,
    block_start_launch,
    experts_of_block,
    pairs_of_block,
    row_start_launch,
)
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import ceil_div, int32_vectors, launch_of, power_of_two

MAX_RANKS = 64  # the counts for all of a token's destinations are kept in registers
_TOKENS = 64  # most tokens of a block that is sent
_DESTINATIONS = 1024  # most tokens times ranks of a block


def why_unsupported(num_tokens: int, num_pairs: int, num_experts: int, ranks: int) -> str | None:
    """Why these kernels do not support these sizes; None if they do."""
    if num_tokens == 0 or not 0 < num_pairs <= MAX_PAIRS or num_tokens * ranks > MAX_PAIRS:
        return f"the number of pairs, or of tokens times ranks, is not in [1, {MAX_PAIRS}]"
    if num_experts > MAX_EXPERTS or ranks > MAX_RANKS:
        return f"more than {MAX_EXPERTS} experts or {MAX_RANKS} ranks"
    return None


def count_sent(routed: Routed, sizes: Tensor) -> Tensor:
    """`tilemoe.kernels.expert_parallel.torch.count_sent` that returns (B, 2 W): for each block of tokens, the copies
    and pairs for each rank in the blocks before it.
    """
    like, ranks = routed.row_of_pair, routed.ranks
    device_of(like)
    tokens = _tokens_of_block(ranks)
    blocks, columns = ceil_div(routed.num_tokens, tokens), 2 * ranks
    before = like.new_empty(blocks * columns)
    (counts,) = int32_vectors(like, blocks * columns)
    args = (*_routed_args(routed), counts)
    launch_of(count_sent_kernel, (blocks,), args, {**_constants(routed), "BLOCK": tokens}).run()
    block_start_launch(counts, before, sizes, blocks, columns).run()
    return before


def place_sent(
    scores: Tensor, sizes: Tensor, before: Tensor, token_of_copy: Tensor, words: Tensor, routed: Routed
) -> tuple[Tensor, Tensor]:
    """`tilemoe.kernels.expert_parallel.torch.place_sent` for the results of this file's `count_sent`."""
    device_of(scores)
    like, ranks, pairs = routed.row_of_pair, routed.ranks, routed.row_of_pair.shape[0]
    tokens, score_words = _tokens_of_block(ranks), scores.element_size() // 4
    copy_of_token, position_of_pair = like.new_empty(routed.num_tokens * ranks), like.new_empty(pairs)
    read = (*_routed_args(routed), routed.pair_of_row, scores, sizes, before)
    written = (token_of_copy, copy_of_token, words, position_of_pair)
    steps = routed.experts_per_rank.bit_length()
    constants = {**_constants(routed), "STEPS": steps, "SCORE_WORDS": score_words, "BLOCK": tokens}
    launch_of(place_sent_kernel, (ceil_div(routed.num_tokens, tokens),), (*read, *written), constants).run()
    return copy_of_token, position_of_pair


def plan_received(words: Tensor, came: Tensor, experts: int, num_tokens: int) -> tuple[Tensor, ...]:
    """`tilemoe.kernels.expert_parallel.torch.plan_received` for at least one pair."""
    device_of(words)
    pairs, score_words, block = words.shape[0], words.shape[1] - 1, pairs_of_block(experts)
    blocks = ceil_div(pairs, block)
    counts = words.new_empty(blocks * experts)
    constants = {"SCORE_WORDS": score_words, "BLOCK": block, "BLOCK_E": experts_of_block(experts)}
    launch_of(count_received_kernel, (blocks,), (words, pairs, experts, counts), constants).run()
    arrays = [words.new_empty(length) for length in (pairs, pairs, pairs, num_tokens + 1)]
    return write_plan(words, counts, came, experts, arrays)


def write_plan(words: Tensor, counts: Tensor, came: Tensor, experts: int, arrays: list[Tensor]) -> tuple[Tensor, ...]:
    """`plan_received` that writes its first four results to ``arrays``; counts: from `count_received_kernel`."""
    pairs, score_words, block = words.shape[0], words.shape[1] - 1, pairs_of_block(experts)
    blocks = counts.shape[0] // experts
    block_start, error_bits = int32_vectors(words, blocks * experts, 1)
    row_start, rows_per_expert = words.new_empty(experts + 1), words.new_empty(experts)
    scores = words.new_empty(pairs, dtype=torch.float32 if score_words == 1 else torch.float64)
    block_start_launch(counts, block_start, rows_per_expert, blocks, experts).run()
    row_start_launch(rows_per_expert, counts, row_start, error_bits, 0, experts).run()
    args = (words, pairs, experts, came, block_start, row_start, *arrays, scores)
    constants = {"RANKS": came.numel() // 2, "SCORE_WORDS": score_words, "BLOCK": block}
    launch_of(place_received_kernel, (blocks,), args, constants, num_warps=block // 32).run()
    return (*arrays, row_start, rows_per_expert, scores)


def _tokens_of_block(ranks: int) -> int:
    return min(_TOKENS, _DESTINATIONS // power_of_two(ranks))


def _routed_args(routed: Routed) -> tuple[Tensor | int | None, ...]:
    indices = (routed.row_of_pair, routed.pair_start_of_token, routed.row_start_of_expert)
    return *indices, routed.num_tokens, routed.experts_per_rank


def _constants(routed: Routed) -> dict[str, int]:
    is_topk = routed.pair_start_of_token is None
    pairs_per_token = routed.row_of_pair.shape[0] // routed.num_tokens if is_topk else 0
    return {"RANKS": routed.ranks, "PAIRS_PER_TOKEN": pairs_per_token, "BLOCK_W": power_of_two(routed.ranks)}


@triton.jit
def destinations_of_block(
    row_of_pair, pair_start_of_token, row_start_of_expert, num_tokens, experts_per_rank,
    RANKS: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """(ranks, this CTA's tokens, their first pairs and numbers of pairs, the ranks' first and end rows, and each
    token's number of pairs for each rank (BLOCK, BLOCK_W)).
    """
    rank = tl.arange(0, BLOCK_W)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    if PAIRS_PER_TOKEN > 0:
        first = token * PAIRS_PER_TOKEN
        count = tl.where(inside, PAIRS_PER_TOKEN, 0)
    else:
        first = tl.load(pair_start_of_token + token, mask=inside, other=0)
        count = tl.load(pair_start_of_token + token + 1, mask=inside, other=0) - first
    first_row = row_start_of_expert + rank * experts_per_rank
    start = tl.load(first_row, mask=rank < RANKS, other=2147483647)[None, :]  # no row is past the last rank's rows
    end = tl.load(first_row + experts_per_rank, mask=rank < RANKS, other=0)[None, :]
    pairs = tl.zeros((BLOCK, BLOCK_W), dtype=tl.int32)
    for i in range(tl.max(count, axis=0)):
        row = tl.load(row_of_pair + first + i, mask=i < count, other=-1)[:, None]
        pairs += ((row >= start) & (row < end)).to(tl.int32)
    return rank, token, first, count, start, end, pairs


@triton.jit(do_not_specialize=["num_tokens"])
def count_sent_kernel(
    row_of_pair, pair_start_of_token, row_start_of_expert, num_tokens, experts_per_rank, counts,
    RANKS: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write counts (B, W, 2): for each block of tokens and each rank, the tokens that go there, and their pairs."""
    rank, _token, _first, _count, _start, _end, pairs = destinations_of_block(
        row_of_pair, pair_start_of_token, row_start_of_expert, num_tokens, experts_per_rank, RANKS, PAIRS_PER_TOKEN,
        BLOCK, BLOCK_W,
    )  # fmt: skip
    out = counts + tl.program_id(0).to(tl.int64) * (2 * RANKS) + 2 * rank
    tl.store(out, tl.sum((pairs > 0).to(tl.int32), axis=0), mask=rank < RANKS)
    tl.store(out + 1, tl.sum(pairs, axis=0), mask=rank < RANKS)


@triton.jit
def first_of_ranks(sizes, rank, RANKS: tl.constexpr):
    """(BLOCK_W): the exclusive scan of the first column of ``sizes`` (W, 2) over the ranks."""
    size = tl.load(sizes + 2 * rank, mask=rank < RANKS, other=0)
    return tl.cumsum(size, axis=0) - size


@triton.jit(do_not_specialize=["num_tokens"])
def place_sent_kernel(
    row_of_pair, pair_start_of_token, row_start_of_expert, num_tokens, experts_per_rank, pair_of_row, scores,
    sizes, before, token_of_copy, copy_of_token, words, position_of_pair,
    RANKS: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr, BLOCK_W: tl.constexpr, STEPS: tl.constexpr,
    SCORE_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write all outputs of `place_sent`. STEPS: bisection steps to find a row's expert among a rank's experts."""
    rank, token, first, count, start, end, pairs = destinations_of_block(
        row_of_pair, pair_start_of_token, row_start_of_expert, num_tokens, experts_per_rank, RANKS, PAIRS_PER_TOKEN,
        BLOCK, BLOCK_W,
    )  # fmt: skip
    block_before = before + tl.program_id(0).to(tl.int64) * (2 * RANKS) + 2 * rank

    goes = (pairs > 0).to(tl.int32)
    slot = tl.load(block_before, mask=rank < RANKS, other=0)[None, :] + tl.cumsum(goes, axis=0) - goes
    first_of_rank = first_of_ranks(sizes, rank, RANKS)
    copy = first_of_rank[None, :] + slot
    there = (token < num_tokens)[:, None] & (rank < RANKS)[None, :]
    tl.store(copy_of_token + token[:, None] * RANKS + rank[None, :], tl.where(goes > 0, copy, -1), mask=there)
    tl.store(token_of_copy + copy, tl.broadcast_to(token[:, None], (BLOCK, BLOCK_W)), mask=goes > 0)

    place = tl.load(block_before + 1, mask=rank < RANKS, other=0)[None, :] + tl.cumsum(pairs, axis=0) - pairs
    place += first_of_ranks(sizes + 1, rank, RANKS)[None, :]
    for i in range(tl.max(count, axis=0)):
        row = tl.load(row_of_pair + first + i, mask=i < count, other=-1)
        is_used = row >= 0
        to = (row[:, None] >= start) & (row[:, None] < end)
        line = tl.sum(tl.where(to, place, 0), axis=1).to(tl.int64)
        place += to.to(tl.int32)  # now the place of the token's next pair for the rank
        of_rank = tl.sum(tl.where(to, rank[None, :], 0), axis=1) * experts_per_rank
        low, high = of_rank, of_rank + experts_per_rank
        for _ in tl.static_range(STEPS):
            middle = (low + high) // 2
            is_past = tl.load(row_start_of_expert + middle + 1, mask=is_used & (low < high), other=0) <= row
            low, high = tl.where(is_past & (low < high), middle + 1, low), tl.where(is_past, high, middle)
        slot_there = tl.sum(tl.where(to, slot, 0), axis=1)
        position = tl.load(pair_of_row + row, mask=is_used, other=0)
        tl.store(position_of_pair + line, position, mask=is_used)
        out = words + line * (SCORE_WORDS + 1)
        score = tl.load(scores + position, mask=is_used, other=0.0)
        if SCORE_WORDS == 1:
            tl.store(out, score.to(tl.int32, bitcast=True), mask=is_used)
        else:
            bits = score.to(tl.int64, bitcast=True)
            tl.store(out, (bits & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), mask=is_used)
            tl.store(out + 1, (bits >> 32).to(tl.int32), mask=is_used)
        tl.store(out + SCORE_WORDS, slot_there * experts_per_rank + low - of_rank, mask=is_used)


@triton.jit(do_not_specialize=["num_pairs"])
def count_received_kernel(
    words, num_pairs, experts, counts, SCORE_WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Write counts (B, e): for each block of received pairs and each expert of this rank, the number of pairs."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    place = tl.load(words + pair.to(tl.int64) * (SCORE_WORDS + 1) + SCORE_WORDS, mask=inside, other=0)
    count = tl.histogram(place % experts, BLOCK_E, mask=inside)
    bins = tl.arange(0, BLOCK_E)
    tl.store(counts + tl.program_id(0).to(tl.int64) * experts + bins, count, mask=bins < experts)


@triton.jit
def first_token_of_source(came, pair, RANKS: tl.constexpr):
    """For each pair, the number of tokens from ranks before its source; came (W, 2): tokens and pairs by rank."""
    end = 0
    first = pair * 0
    for rank in range(RANKS):
        end += tl.load(came + 2 * rank + 1)
        first += tl.where(pair >= end, tl.load(came + 2 * rank), 0)
    return first


@triton.jit(do_not_specialize=["max_pairs"])
def place_received_kernel(
    words, max_pairs, experts, came, block_start, row_start_of_expert, token_of_row, pair_of_row, row_of_pair,
    pair_start_of_token, scores,
    RANKS: tl.constexpr, SCORE_WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write token_of_row, pair_of_row, row_of_pair and scores, Q entries of ``max_pairs`` each, and
    pair_start_of_token (M + 1).
    """
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    num_pairs = 0
    for rank in range(RANKS):
        num_pairs += tl.load(came + 2 * rank + 1)
    num_pairs = tl.minimum(num_pairs, max_pairs)
    inside = pair < num_pairs
    line = words + pair.to(tl.int64) * (SCORE_WORDS + 1)
    place = tl.load(line + SCORE_WORDS, mask=inside, other=0)
    expert = tl.where(inside, place % experts, experts)
    token = first_token_of_source(came, pair, RANKS) + place // experts
    last = tl.load(line - 1, mask=inside & (pair > 0), other=0)  # the place of the pair before
    last_token = first_token_of_source(came, pair - 1, RANKS) + last // experts
    # Each received token has at least one pair.
    tl.store(pair_start_of_token + token, pair, mask=inside & ((pair == 0) | (token != last_token)))
    tl.store(pair_start_of_token + token + 1, pair + 1, mask=pair == num_pairs - 1)

    # As in `plan.triton`'s place_kernel, each pair is ranked by comparing all pairs of the block.
    earlier = (expert[:, None] == expert[None, :]) & (pair[:, None] < pair[None, :])
    row = tl.load(row_start_of_expert + expert, mask=inside, other=0) + tl.sum(earlier.to(tl.int32), axis=0)
    row += tl.load(block_start + block.to(tl.int64) * experts + expert, mask=inside, other=0)
    tl.store(row_of_pair + pair, row, mask=inside)
    tl.store(pair_of_row + row, pair, mask=inside)
    tl.store(token_of_row + row, token, mask=inside)
    low = tl.load(line, mask=inside, other=0)
    if SCORE_WORDS == 1:
        tl.store(scores + pair, low.to(tl.float32, bitcast=True), mask=inside)
    else:
        high = tl.load(line + 1, mask=inside, other=0).to(tl.int64)
        bits = (high << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(scores + pair, bits.to(tl.float64, bitcast=True), mask=inside)
