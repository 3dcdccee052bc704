"""Plan building on a GPU: a stable counting sort of the pairs by expert in four small kernels, without host sync.

T tokens · E experts · K experts per token · P pairs · B blocks of BLOCK consecutive pairs

1. `count_kernel`: each block's histogram of its pairs' experts: counts (B, E).
2. `block_start_kernel`: for each expert, the exclusive scan of its counts over the blocks, and its total.
3. `row_start_kernel`: the scan of the totals over the experts.
4. `place_kernel`: a pair's row is its expert's first row + that expert's pairs in earlier blocks + that expert's pairs
   before it in its own block. The order is stable; there are no atomics, and no CTA waits for another.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.plan.torch import Index, new_index
from tilemoe.plan import NEGATIVE_EXPERT
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import Launch, ceil_div, int32_vectors, launch_of, power_of_two

MAX_EXPERTS = 4096  # a block's histogram is kept in shared memory
MAX_PAIRS = 2**30  # pair numbers, rounded up to a block, must fit in int32
_FEWEST_EXPERTS = 128  # smallest BLOCK_E: layers with at most this many experts share one binary
_COUNTS = 4096  # counts that a program of `block_start_kernel` loads at a time


def why_unsupported(
    num_pairs: int, num_experts: int, max_pairs: int = MAX_PAIRS, max_experts: int = MAX_EXPERTS
) -> str | None:
    """Why these kernels cannot plan this many pairs and experts; None if they can."""
    if not 0 < num_pairs <= max_pairs:
        return f"the number of pairs is not in [1, {max_pairs}]"
    if num_experts > max_experts:
        return f"more than {max_experts} experts"
    return None


def count_sort(expert_ids: Tensor, num_experts: int) -> Index:
    """From expert_ids (T, K): token_of_row, pair_of_row, row_of_pair, row_start_of_expert, rows_per_expert (E),
    error_bits (all int32).

    Equal to `tilemoe.kernels.plan.torch.sort_by_expert`, except that a negative id never raises.
    """
    device_of(expert_ids)
    ids = expert_ids.reshape(-1).contiguous()  # of one column of a wider tensor, reshape returns a strided view
    num_pairs = ids.shape[0]
    assert why_unsupported(num_pairs, num_experts) is None, "the caller chooses another builder"
    block = pairs_of_block(num_experts)
    num_blocks = ceil_div(num_pairs, block)
    all_counts = num_blocks * num_experts
    counts, block_start, negative_in_block = int32_vectors(ids, all_counts, all_counts, num_blocks)
    made = token_of_row, pair_of_row, row_of_pair, row_start, rows_per_expert, error_bits = new_index(ids, num_experts)
    counted = (ids, num_pairs, num_experts, counts, negative_in_block)
    count_constants = {"BLOCK": block, "BLOCK_E": experts_of_block(num_experts)}
    sizes = (num_pairs, num_experts, expert_ids.shape[1])
    placed = (ids, *sizes, block_start, row_start, token_of_row, pair_of_row, row_of_pair)
    launch_of(count_kernel, (num_blocks,), counted, count_constants).run()
    block_start_launch(counts, block_start, rows_per_expert, num_blocks, num_experts).run()
    row_start_launch(rows_per_expert, negative_in_block, row_start, error_bits, num_blocks, num_experts).run()
    launch_of(place_kernel, (num_blocks,), placed, {"BLOCK": block}, num_warps=block // 32).run()
    return made


def block_start_launch(
    counts: Tensor, block_start: Tensor, rows_per_expert: Tensor, num_blocks: int, num_experts: int
) -> Launch:
    """The launch that computes ``block_start`` (B, E) and ``rows_per_expert`` (E) from counts (B, E)."""
    columns = 4 if num_experts <= 1024 else 8  # experts per program
    args = (counts, block_start, rows_per_expert, num_blocks, num_experts)
    constants = {"ROWS": _COUNTS // columns, "COLUMNS": columns}
    return launch_of(block_start_kernel, (ceil_div(num_experts, columns),), args, constants, num_warps=8)


def row_start_launch(
    rows_per_expert: Tensor,
    negative_in_block: Tensor,
    row_start: Tensor,
    error_bits: Tensor,
    num_blocks: int,
    num_experts: int,
) -> Launch:
    """The launch that computes row_start (E+1) from rows_per_expert (E), error_bits () from negative_in_block (B)."""
    args = (rows_per_expert, negative_in_block, row_start, error_bits, num_blocks, num_experts)
    constants = {"NEGATIVE": NEGATIVE_EXPERT, "BLOCK": 1024, "BLOCK_E": experts_of_block(num_experts)}
    return launch_of(row_start_kernel, (1,), args, constants)


def experts_of_block(num_experts: int) -> int:
    """The number of bins of a block's histogram, a power of two."""
    return max(_FEWEST_EXPERTS, power_of_two(num_experts))


def pairs_of_block(num_experts: int) -> int:
    """Pairs per block. With more, `place_kernel` compares more pairs; with fewer, there are more counts to scan."""
    if num_experts <= 128:
        return 128
    return 256 if num_experts <= 1024 else 512


@triton.jit
def expert_of_pair(ids, pair, num_pairs, num_experts):
    """The int32 expert of each pair, num_experts if it is skipped. Ids may exceed int32, so comparison comes first."""
    expert = tl.load(ids + pair, mask=pair < num_pairs, other=num_experts)
    return tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    ids, num_pairs, num_experts, counts, negative_in_block, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Write counts (B, E), each expert's pairs in a block, and negative_in_block (B), 1 if an id is negative."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = expert_of_pair(ids, pair, num_pairs, num_experts)
    count = tl.histogram(expert, BLOCK_E, mask=expert < num_experts)
    bins = tl.arange(0, BLOCK_E)
    tl.store(counts + block.to(tl.int64) * num_experts + bins, count, mask=bins < num_experts)
    negative = tl.load(ids + pair, mask=pair < num_pairs, other=0) < 0
    tl.store(negative_in_block + block, tl.max(negative.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["num_blocks"])
def block_start_kernel(
    counts, block_start, rows_per_expert, num_blocks, num_experts, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write block_start (B, E), an expert's pairs in earlier blocks, and rows_per_expert (E), its pairs in all."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, num_blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        place = block.to(tl.int64)[:, None] * num_experts + expert[None, :]
        inside = (block < num_blocks)[:, None] & (expert < num_experts)[None, :]
        count = tl.load(counts + place, mask=inside, other=0)
        before = tl.cumsum(count, axis=0) - count
        tl.store(block_start + place, total[None, :] + before, mask=inside)
        total += tl.sum(count, axis=0)
    tl.store(rows_per_expert + expert, total, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def row_start_kernel(
    rows_per_expert, negative_in_block, row_start_of_expert, error_bits, num_blocks, num_experts,
    NEGATIVE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write row_start_of_expert (E+1), the scan of rows_per_expert (E), and error_bits (). A single CTA."""
    expert = tl.arange(0, BLOCK_E)
    ends = tl.cumsum(tl.load(rows_per_expert + expert, mask=expert < num_experts, other=0), axis=0)
    tl.store(row_start_of_expert, 0)
    tl.store(row_start_of_expert + 1 + expert, ends, mask=expert < num_experts)
    negative = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        negative |= tl.load(negative_in_block + block, mask=block < num_blocks, other=0)
    tl.store(error_bits, tl.max(negative, axis=0) * NEGATIVE)


@triton.jit(do_not_specialize=["num_pairs", "experts_per_token"])
def place_kernel(
    ids, num_pairs, num_experts, experts_per_token, block_start, row_start_of_expert, token_of_row, pair_of_row,
    row_of_pair,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write token_of_row, pair_of_row, row_of_pair (P)."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = expert_of_pair(ids, pair, num_pairs, num_experts)
    # Each pair is ranked by comparing all pairs of the block: a loop's loads would cost more than the comparisons.
    # The sum is over the first dimension: for the second, a thread would hold a register for every comparison.
    earlier = (expert[:, None] == expert[None, :]) & (pair[:, None] < pair[None, :])
    earlier_in_block = tl.sum(earlier.to(tl.int32), axis=0)
    used = expert < num_experts
    row = tl.load(row_start_of_expert + expert, mask=used, other=0) + earlier_in_block
    row += tl.load(block_start + block.to(tl.int64) * num_experts + expert, mask=used, other=0)
    tl.store(row_of_pair + pair, tl.where(used, row, -1), mask=pair < num_pairs)
    tl.store(pair_of_row + row, pair, mask=used)
    tl.store(token_of_row + row, pair // experts_per_token, mask=used)
    # No pair writes to the rows past R. Each block clears those whose index is the number of one of its pairs.
    unused = (pair >= tl.load(row_start_of_expert + num_experts)) & (pair < num_pairs)
    tl.store(pair_of_row + pair, 0, mask=unused)
    tl.store(token_of_row + pair, 0, mask=unused)
