"""Token rounding in plain PyTorch: thresholds by top-k of the marginal rows, no sort of T x E and no host sync.

T tokens · E experts · K experts per token · m tile · f rows of an expert under top-K · r rows it computes
R_max row capacity
"""

from __future__ import annotations

import torch
from torch import Tensor


def round_rows(
    all_scores: Tensor,
    expert_ids: Tensor,
    kept_scores: Tensor,
    uniform: Tensor | None,
    token_mask: Tensor | None,
    mode: str,
    tile: int,
    scale: float,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """token_of_row, pair_of_row, row_of_pair (R_max), pair_start_of_token (T+1), row_start_of_expert (E+1) and
    pairs_of_expert (E), all int32: the plan of the rounded rows, pairs being numbered by their rows, and f.

    all_scores (T, E), expert_ids and kept_scores (T, K), uniform (E,), token_mask (T,), with T >= tile.
    """
    num_tokens, num_experts = all_scores.shape
    assert num_tokens >= tile, "the caller falls back to top-K"
    ids = expert_ids.long().clamp(max=num_experts)
    shape = (num_tokens, num_experts + 1)  # the last column takes what is skipped
    chosen = torch.zeros(shape, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)[:, :-1].t().contiguous()
    kept = all_scores.new_zeros(shape).scatter_(1, ids, kept_scores.to(all_scores.dtype))[:, :-1].t().contiguous()
    eligible = ~chosen if token_mask is None else ~chosen & token_mask
    others = all_scores.t().masked_fill(~eligible, float("-inf"))
    real = torch.full((), num_tokens, device=ids.device) if token_mask is None else token_mask.sum()

    f = chosen.sum(1)
    most = real // tile * tile  # rows of an expert
    down = f // tile * tile
    up = torch.where(f == down, down, down + tile)
    rounds, fits = most > 0, up <= most  # fewer real tokens than a tile: nothing is rounded
    limit = tile - 1  # rows dropped or added
    if mode == "nearest_score":
        dropped = _worst(kept, chosen, torch.where(rounds, f - down, 0), limit)
        added = _best(others, torch.where(rounds & fits, up - f, 0), limit)
        lost = torch.where(dropped, kept, 0).sum(1, dtype=torch.float64)
        gained = torch.where(added, all_scores.t() * scale, 0).sum(1, dtype=torch.float64)
        assert uniform is not None, "this mode draws"
        goes_up = (uniform * (lost + gained) < lost) & fits & rounds
        keep = torch.where(goes_up[:, None], chosen | added, chosen & ~dropped)
    else:
        goes_up = rounds_up(mode, f, tile, uniform) & fits & rounds
        dropped = _worst(kept, chosen, torch.where(rounds & ~goes_up, f - down, 0), limit)
        added = _best(others, torch.where(goes_up, up - f, 0), limit)
        keep = (chosen & ~dropped) | added
    return *_plan(keep, capacity), f.int()


def rounds_up(mode: str, f: Tensor, tile: int, uniform: Tensor | None) -> Tensor:
    """(E,) bool: which experts go up to the next multiple, if there are tokens for it. f (E,) integers.

    "balance": with z the sum of r - f so far, up iff |up - f + z| < |down - f + z|. That keeps z in [-m/2, m/2), and
    as r is a multiple of m, z is the one number there that equals minus the sum of the remainders, modulo m.
    """
    remainder = f % tile
    if mode == "nearest":
        return remainder * 2 > tile
    if mode == "stochastic":
        assert uniform is not None, "this mode draws"
        return uniform * tile < remainder
    if mode == "balance":
        half = tile // 2
        deviation = torch.remainder(half - torch.cumsum(remainder, 0), tile) - half
        before = torch.cat([deviation.new_zeros(1), deviation[:-1]])
        return deviation - before > -remainder
    assert mode in ("up", "down"), mode
    return remainder > 0 if mode == "up" else torch.zeros_like(f, dtype=torch.bool)


def _best(values: Tensor, want: Tensor, limit: int) -> Tensor:
    """(E, T) bool: the ``want`` (E,) <= ``limit`` largest values of each row, a tie to the lower column."""
    largest = values.topk(limit, dim=1).values
    threshold = largest.gather(1, (want - 1).clamp(min=0)[:, None])
    above, level = values > threshold, values == threshold
    left = want[:, None] - above.sum(1, keepdim=True)
    best = above | (level & (torch.cumsum(level, 1, dtype=torch.int32) <= left))
    return best & (want > 0)[:, None]


def _worst(values: Tensor, among: Tensor, want: Tensor, limit: int) -> Tensor:
    """(E, T) bool: the ``want`` smallest values of each row where ``among`` holds, a tie to the higher column."""
    negated = (-values).masked_fill(~among, float("-inf"))
    return _best(negated.flip(1), want, limit).flip(1)


def _plan(keep: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The plan's tensors from keep (E, T) bool."""
    num_experts, num_tokens = keep.shape
    row_start, pair_start = _starts(keep.sum(1)), _starts(keep.sum(0))
    rank = torch.cumsum(keep, 1, dtype=torch.int32) - 1
    # What is not kept goes to one slot more, which is cut off.
    row = torch.where(keep, row_start[:-1, None] + rank, capacity)
    token = torch.arange(num_tokens, dtype=torch.int32, device=keep.device).expand(num_experts, -1)
    token_of_row = _scattered(row, token, capacity, 0)
    by_token = keep.t()
    rank = torch.cumsum(by_token, 1, dtype=torch.int32) - 1
    pair = torch.where(by_token, pair_start[:-1, None] + rank, capacity)
    row_of_pair = _scattered(pair, row.t(), capacity, -1)
    rows = torch.arange(capacity, dtype=torch.int32, device=keep.device)
    pair_of_row = torch.where(rows < row_start[-1], rows, 0)
    return token_of_row, pair_of_row, row_of_pair, pair_start, row_start


def _starts(counts: Tensor) -> Tensor:
    """int32, one longer than counts: their running sum from 0."""
    return torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0)).int()


def _scattered(index: Tensor, values: Tensor, size: int, fill: int) -> Tensor:
    """(size,) int32: ``values`` at ``index``, which says ``size`` for what is left out; ``fill`` elsewhere."""
    out = torch.full((size + 1,), fill, dtype=torch.int32, device=index.device)
    return out.scatter_(0, index.reshape(-1).long(), values.reshape(-1))[:size].clone()
