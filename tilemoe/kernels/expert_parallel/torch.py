"""Send and receive buffers of expert parallelism's dispatch all-to-all, in plain PyTorch.

T tokens of this process · W processes (ranks) · E experts, e = E / W of them on each rank · P pairs · d model width
M tokens received · Q pairs received

A token is sent once, as a copy, to each rank that has some of its experts, together with one pair for each of these
experts. Copies and pairs are sorted by destination or source rank, including this rank; within a rank by token; and a
token's pairs in the plan's order. A pair is a few int32 words: the bits of its score, one word if fp32 and two if fp64,
then its place, ``slot * e + expert``. slot is its token's index among the copies for that rank, expert the expert's
index on that rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilemoe.kernels.plan.torch import sort_by_expert
from tilemoe.plan import experts_of_rows


class Routed(NamedTuple):
    """The tensors of a `RoutingPlan` of T tokens over the experts of all ranks."""

    row_of_pair: Tensor
    pair_of_row: Tensor
    pair_start_of_token: Tensor | None
    row_start_of_expert: Tensor
    num_tokens: int
    ranks: int

    @property
    def experts_per_rank(self) -> int:
        return (self.row_start_of_expert.shape[0] - 1) // self.ranks


def count_sent(routed: Routed, sizes: Tensor) -> Tensor:
    """Writes sizes (W, 2) int32, the numbers of tokens and pairs for each rank.

    Returns what `place_sent` needs: here each token's number of pairs for each rank, (T, W) int64. Another
    implementation may return another form.
    """
    _, rank = _experts_and_ranks(routed)
    pairs = torch.zeros(routed.num_tokens * (routed.ranks + 1), dtype=torch.int64, device=rank.device)
    pairs.scatter_add_(0, _token_of_pair(routed) * (routed.ranks + 1) + rank, torch.ones_like(rank))
    before = pairs.view(-1, routed.ranks + 1)[:, : routed.ranks]
    sizes.copy_(torch.stack(((before > 0).sum(0), before.sum(0)), dim=1))
    return before


def place_sent(
    scores: Tensor, sizes: Tensor, before: Tensor, token_of_copy: Tensor, words: Tensor, routed: Routed
) -> tuple[Tensor, Tensor]:
    """From scores (P,) fp32 or fp64 in the caller's order, and `count_sent`'s results, writes

    token_of_copy (W T,) int32 · words (P, 2), or (P, 3) for fp64, int32, the pairs' words

    and returns copy_of_token (T W,) int32, token-major, -1 if a token does not go to a rank, and position_of_pair
    (P,) int32, the position of each pair's score. Values past the numbers in ``sizes`` are unspecified.
    """
    ranks, e = routed.ranks, routed.experts_per_rank
    expert, rank = _experts_and_ranks(routed)
    to_rank = torch.arange(ranks, device=scores.device)
    by_rank = sort_by_expert(to_rank.expand(routed.num_tokens, -1).masked_fill(before == 0, ranks), ranks)
    token_of_copy.copy_(by_rank[0])
    copy_of_token, first_copy = by_rank[2], by_rank[3]
    pair = sort_by_expert(rank[:, None], ranks)[1].long()  # sorted by rank; arbitrary past the last pair
    to = rank[pair].clamp(max=ranks - 1)
    slot = copy_of_token[_token_of_pair(routed)[pair] * ranks + to] - first_copy[to]
    row = routed.row_of_pair[pair].clamp(min=0, max=max(0, routed.pair_of_row.shape[0] - 1))
    position = routed.pair_of_row[row]
    place = (slot * e + expert[pair] % e).int()
    words.copy_(torch.cat((scores[position][:, None].view(torch.int32), place[:, None]), dim=1))
    return copy_of_token, position


def plan_received(
    words: Tensor, came: Tensor, experts: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The plan of the received pairs. words: (Q, 2 or 3). came (W, 2): the numbers of tokens and pairs from each rank.

    Returns token_of_row, pair_of_row, row_of_pair, pair_start_of_token (M + 1), row_start_of_expert, rows_per_expert,
    all int32 and equal to `plan_pairs`'s, but without sorting by token; and the scores (Q,). experts: the number of
    experts on this rank. num_tokens: M.
    """
    place, by_rank = words[:, -1], came.long()
    first_token = by_rank[:, 0].cumsum(0) - by_rank[:, 0]
    token = torch.repeat_interleave(first_token, by_rank[:, 1], output_size=place.shape[0]) + place // experts
    token_of_row, pair_of_row, row_of_pair, row_start, rows_per_expert, _ = sort_by_expert(
        place[:, None] % experts, experts
    )
    token_of_row = token[pair_of_row].int()
    tokens = torch.arange(num_tokens + 1, device=place.device)
    pair_start = torch.searchsorted(token, tokens, out_int32=True)
    scores = words[:, :-1].flatten().view(torch.float32 if words.shape[1] == 2 else torch.float64)
    return token_of_row, pair_of_row, row_of_pair, pair_start, row_start, rows_per_expert, scores


def _token_of_pair(routed: Routed) -> Tensor:
    """The token of each pair (P,) int64; arbitrary for a pair that belongs to no token."""
    pairs, tokens, start = routed.row_of_pair.shape[0], routed.num_tokens, routed.pair_start_of_token
    pair = torch.arange(pairs, device=routed.row_of_pair.device)
    if start is None:
        return pair // max(1, pairs // max(1, tokens))
    return (torch.searchsorted(start, pair.int(), right=True) - 1).clamp(max=max(0, tokens - 1))


def _experts_and_ranks(routed: Routed) -> tuple[Tensor, Tensor]:
    """(expert, rank) of each pair (P,) int64, in the plan's order; E and W for a pair without a row."""
    row, experts = routed.row_of_pair, routed.row_start_of_expert.shape[0] - 1
    expert = experts_of_rows(routed.row_start_of_expert, row)
    has_none = row < 0
    if routed.pair_start_of_token is not None:  # entries past its end are unspecified
        has_none |= torch.arange(row.shape[0], device=row.device) >= routed.pair_start_of_token[-1]
    expert = expert.masked_fill(has_none, experts)
    return expert, expert // routed.experts_per_rank
