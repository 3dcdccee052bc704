"""Plan building for few pairs: the stable counting sort of `tilemoe.kernels.plan.triton` in one kernel.

T tokens · E experts · K experts per token · P pairs

Each CTA places BLOCK pairs and counts all pairs itself, so that CTAs need not communicate. The results are the same.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.plan import triton as triton_plan
from tilemoe.kernels.plan.torch import Index, new_index
from tilemoe.kernels.plan.triton import expert_of_pair
from tilemoe.plan import NEGATIVE_EXPERT
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import Launch, ceil_div, int32_vectors, launch_of, power_of_two

# With more pairs, counting them all in every CTA takes longer than `plan.triton`'s three additional launches.
MAX_PAIRS = 4096
MAX_EXPERTS = 1024
_BLOCK, _CHUNK = 128, 512  # pairs that a CTA places, and pairs that it counts at a time


def why_unsupported(num_pairs: int, num_experts: int) -> str | None:
    """Why this kernel cannot plan this many pairs and experts; None if it can."""
    return triton_plan.why_unsupported(num_pairs, num_experts, MAX_PAIRS, MAX_EXPERTS)


def count_sort_small(expert_ids: Tensor, num_experts: int) -> Index:
    """`tilemoe.kernels.plan.triton.count_sort` for expert_ids (T, K) whose sizes `why_unsupported` does not exclude."""
    device_of(expert_ids)
    made = new_index(expert_ids, num_experts)
    count_sort_small_launch(expert_ids, num_experts, made).run()
    return made


def count_sort_small_in_one(expert_ids: Tensor, num_experts: int) -> Index:
    """`count_sort_small` whose results are views of one allocation: faster, but an operator must not return them."""
    device_of(expert_ids)
    pairs = expert_ids.numel()
    a, b, c, d, e, f = int32_vectors(expert_ids, pairs, pairs, pairs, num_experts + 1, num_experts, 1)
    made = a, b, c, d, e, f.view(())
    count_sort_small_launch(expert_ids, num_experts, made).run()
    return made


def count_sort_small_launch(expert_ids: Tensor, num_experts: int, made: Index) -> Launch:
    """The launch that fills ``made``, the tensors that `count_sort_small` returns."""
    ids = expert_ids.reshape(-1).contiguous()  # of one column of a wider tensor, reshape returns a strided view
    num_pairs = ids.shape[0]
    assert why_unsupported(num_pairs, num_experts) is None, "the caller chooses another builder"
    sizes = (num_pairs, num_experts, expert_ids.shape[1])
    experts = max(16, power_of_two(num_experts))
    constants = {"NEGATIVE": NEGATIVE_EXPERT, "BLOCK": _BLOCK, "CHUNK": _CHUNK, "BLOCK_E": experts}
    return launch_of(plan_small_kernel, (ceil_div(num_pairs, _BLOCK),), (ids, *sizes, *made), constants)


@triton.jit(do_not_specialize=["num_pairs"])
def plan_small_kernel(
    ids, num_pairs, num_experts, experts_per_token, token_of_row, pair_of_row, row_of_pair, row_start_of_expert,
    rows_per_expert, error_bits,
    NEGATIVE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A CTA places BLOCK pairs. CHUNK: pairs that are counted at a time. The outputs are `count_sort_small`'s."""
    first = tl.program_id(0) * BLOCK
    count = tl.zeros((BLOCK_E,), dtype=tl.int32)  # pairs of each expert
    earlier = tl.zeros((BLOCK_E,), dtype=tl.int32)  # pairs of each expert before this CTA's
    negative = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = expert_of_pair(ids, pair, num_pairs, num_experts)
        used = expert < num_experts
        count += tl.histogram(expert, BLOCK_E, mask=used)
        earlier += tl.histogram(expert, BLOCK_E, mask=used & (pair < first))
        negative |= (tl.load(ids + pair, mask=pair < num_pairs, other=0) < 0).to(tl.int32)
    end = tl.cumsum(count, axis=0)
    num_rows = tl.max(end, axis=0)

    pair = first + tl.arange(0, BLOCK)
    expert = expert_of_pair(ids, pair, num_pairs, num_experts)
    used = expert < num_experts
    # As in `place_kernel`, each pair is ranked by comparing all pairs of the block, and the sum is along dimension 0.
    same = (expert[:, None] == expert[None, :]) & (pair[:, None] < pair[None, :])
    row = tl.sum(same.to(tl.int32), axis=0)
    row += tl.gather(end - count + earlier, tl.where(used, expert, 0), axis=0)
    tl.store(row_of_pair + pair, tl.where(used, row, -1), mask=pair < num_pairs)
    tl.store(pair_of_row + row, pair, mask=used)
    tl.store(token_of_row + row, pair // experts_per_token, mask=used)
    # No pair writes to the rows past R. Each CTA clears those whose index is the number of one of its pairs.
    unused = (pair >= num_rows) & (pair < num_pairs)
    tl.store(pair_of_row + pair, 0, mask=unused)
    tl.store(token_of_row + pair, 0, mask=unused)

    if first == 0:
        experts = tl.arange(0, BLOCK_E)
        tl.store(row_start_of_expert, 0)
        tl.store(row_start_of_expert + 1 + experts, end, mask=experts < num_experts)
        tl.store(rows_per_expert + experts, count, mask=experts < num_experts)
        tl.store(error_bits, tl.max(negative, axis=0) * NEGATIVE)
