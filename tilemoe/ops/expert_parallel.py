"""Operators around the all-to-all of expert parallelism: count and place what is sent, plan and sum what is received.

T tokens · W ranks · P pairs sent · C copies of tokens · Q pairs received · M tokens received · d model width

Their launches are cached and replayed like other operators', but they are not in torch.library: the sizes are read back
between two exchanges, which no graph can contain. count_sent, place_sent and plan_received are documented in
`tilemoe.kernels.expert_parallel.torch` (a `Routed` is passed field by field), pack_rows and unpack_rows in
`tilemoe.kernels.experts.formats.fp8`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilemoe.kernels.choose import ExpertParallelKernels, choose_expert_parallel, choose_experts, choose_packing
from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.operator import Operator


def _count_sent(*routed: Any) -> tuple[Tensor, Tensor]:
    """(sizes (2, W, 2), before): ``sizes[0]`` as counted; ``sizes[1]`` is to receive what the others send here."""
    given = Routed(*routed)
    sizes = given.row_of_pair.new_empty(2, given.ranks, 2)
    return sizes, kernels_for(given).count_sent(given, sizes[0])


def _place_sent(x: Tensor, scores: Tensor, sizes: Tensor, before: Tensor, *routed: Any) -> tuple[Tensor, ...]:
    given = Routed(*routed)
    kernels, like = kernels_for(given), given.row_of_pair
    token_of_copy = like.new_empty(given.num_tokens * given.ranks)
    words = like.new_empty(like.shape[0], 1 + scores.element_size() // 4)
    copy_of_token, first_copy, position_of_pair = kernels.place_sent(scores, sizes, before, token_of_copy, words, given)
    copies = kernels.copy_tokens(x, token_of_copy, sizes, given)
    return token_of_copy, copy_of_token, first_copy, words, position_of_pair, copies


def _plan_received(words: Tensor, sizes: Tensor, here: int, experts: int, num_tokens: int) -> tuple[Tensor, ...]:
    ranks = sizes.shape[1]
    kernels = choose_expert_parallel(words.device, num_tokens, words.shape[0], experts, ranks).impl
    return kernels.plan_received(words, sizes, here, experts, num_tokens)


def _sum_copies(copies: Tensor, token_of_copy: Tensor, copy_of_token: Tensor, first_copy: Tensor) -> Tensor:
    """copies (C, d), each rank's result for a token that was sent to it -> (T, d): each token's sum over its copies.

    Sums are fp32 or better, in the order of the ranks. The indices are those of `place_sent`, token_of_copy cut to C.
    """
    ranks = first_copy.shape[0] - 1
    tokens = copy_of_token.shape[0] // ranks
    if copies.shape[0] == 0:  # no token was routed, but there may be tokens
        return copies.new_zeros(tokens, copies.shape[1])
    # The copies as a routing whose experts are the ranks: combine_grad of it is the sum over a token's copies.
    plan = RoutingPlan(token_of_copy, token_of_copy, copy_of_token, None, first_copy, ranks, tokens, unchecked=True)
    total = copies.new_empty(tokens, copies.shape[1])
    choose_experts(copies.device, copies.dtype, copies.shape[1:]).impl.combine_grad(copies, plan, total)
    return total


def _pack_rows(rows: Tensor) -> Tensor:
    return choose_packing(rows.device, rows.dtype).impl.pack_rows(rows)


def _unpack_rows(words: Tensor, dtype: torch.dtype) -> Tensor:
    return choose_packing(words.device, dtype).impl.unpack_rows(words, dtype)


def kernels_for(routed: Routed) -> ExpertParallelKernels:
    row_of_pair, experts = routed.row_of_pair, routed.row_start_of_expert.shape[0] - 1
    pairs = row_of_pair.shape[0]
    return choose_expert_parallel(row_of_pair.device, routed.num_tokens, pairs, experts, routed.ranks).impl


count_sent = Operator("count_sent", _count_sent)
place_sent = Operator("place_sent", _place_sent)
plan_received = Operator("plan_received", _plan_received)
sum_copies = Operator("sum_copies", _sum_copies)
pack_rows = Operator("pack_rows", _pack_rows)
unpack_rows = Operator("unpack_rows", _unpack_rows)
