"""Token rounding in plain PyTorch: an expert's number of rows, f under top-K, becomes r, a multiple of the tile m.

T tokens · E experts · K experts per token · m tile · f rows of an expert under top-K · r rows it computes
R_max static row capacity

An expert drops its worst rows or adds the best tokens that did not choose it, in each case fewer than m. They are found
by a threshold from `topk`, without sorting T x E values and without host sync.
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
    """The plan of the rounded rows: token_of_row, pair_of_row, row_of_pair (R_max), pair_start_of_token (T+1),
    row_start_of_expert (E+1), and f as pairs_of_expert (E), all int32. A pair has the number of its row.

    all_scores (T, E); expert_ids and kept_scores (T, K); uniform (E,), the draws of the random modes; token_mask (T,).
    T >= tile.
    """
    num_tokens, num_experts = all_scores.shape
    assert num_tokens >= tile, "the caller falls back to top-K"
    ids = expert_ids.long().clamp(max=num_experts).t()
    shape = (num_experts + 1, num_tokens)  # the last row collects skipped pairs
    chosen = torch.zeros(shape, dtype=torch.bool, device=ids.device).scatter_(0, ids, True)[:-1]
    kept = all_scores.new_full(shape, float("inf")).scatter_(0, ids, kept_scores.to(all_scores.dtype).t())[:-1]
    ineligible = chosen if token_mask is None else chosen | ~token_mask
    others = torch.where(ineligible, float("-inf"), all_scores.t())
    real = torch.full((), num_tokens, device=ids.device) if token_mask is None else token_mask.sum()

    f = chosen.sum(1, dtype=torch.int32)
    most = real // tile * tile  # most rows that an expert can have
    down = f // tile * tile
    up = torch.where(f == down, down, down + tile)
    rounds, fits = most > 0, up <= most  # if the real tokens are fewer than a tile, nothing is rounded
    limit = tile - 1  # most rows that are dropped or added
    if mode == "nearest_score":
        dropped = _worst(kept, torch.where(rounds, f - down, 0), limit)
        added = _best(others, torch.where(rounds & fits, up - f, 0), limit)
        lost = torch.where(dropped, kept, 0).sum(1, dtype=torch.float64)
        gained = torch.where(added, others * scale, 0).sum(1, dtype=torch.float64)
        assert uniform is not None, "this mode draws"
        goes_up = (uniform * (lost + gained) < lost) & fits & rounds
        keep = torch.where(goes_up[:, None], chosen | added, chosen & ~dropped)
    else:
        goes_up = rounds_up(mode, f, tile, uniform) & fits & rounds
        dropped = _worst(kept, torch.where(rounds & ~goes_up, f - down, 0), limit)
        added = _best(others, torch.where(goes_up, up - f, 0), limit)
        keep = (chosen & ~dropped) | added
    return *_plan(keep, capacity), f


def rounds_up(mode: str, f: Tensor, tile: int, uniform: Tensor | None) -> Tensor:
    """(E,) bool: which experts are rounded up, provided that there are tokens for it. f (E,) integers.

    "balance": let z be the sum of r - f over the experts before; round up iff |up - f + z| < |down - f + z|. This keeps
    z in [-m/2, m/2). Every r is a multiple of m, so z is congruent, modulo m, to minus the sum of the remainders. These
    two facts determine z, so a scan can compute it.
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
    """(E, T) bool: marks the ``want`` (E,) <= ``limit`` largest values of each row, ties to the lower column."""
    threshold = _threshold(values, want, limit, largest=True)
    above, level = values > threshold, values == threshold
    left = want - above.sum(1, dtype=torch.int32)
    return (above | _first(level, left)) & (want > 0)[:, None]


def _worst(values: Tensor, want: Tensor, limit: int) -> Tensor:
    """(E, T) bool: marks the ``want`` (E,) <= ``limit`` smallest values of each row, ties to the higher column."""
    threshold = _threshold(values, want, limit, largest=False)
    below, level = values < threshold, values == threshold
    stay = (below | level).sum(1, dtype=torch.int32) - want
    return (below | (level & ~_first(level, stay))) & (want > 0)[:, None]


def _threshold(values: Tensor, want: Tensor, limit: int, largest: bool) -> Tensor:
    """(E, 1) the ``want``-th largest or smallest value of each row."""
    extreme = values.topk(limit, dim=1, largest=largest).values
    return extreme.gather(1, (want - 1).clamp(min=0)[:, None].long())


def _first(marked: Tensor, count: Tensor) -> Tensor:
    """(E, T) bool: marks the first ``count`` (E,) of each row's marked columns."""
    return marked & (torch.cumsum(marked, 1, dtype=torch.int32) <= count[:, None])


def _plan(keep: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The plan's tensors from keep (E, T) bool."""
    num_tokens = keep.shape[1]
    row_start, pair_start = _starts(keep.sum(1, dtype=torch.int32)), _starts(keep.sum(0, dtype=torch.int32))
    # The row-major order of keep sorts rows by expert. The size is static; padding gets a token that sorts last.
    token = torch.nonzero_static(keep, size=capacity, fill_value=num_tokens)[:, 1]
    rows = torch.arange(capacity, dtype=torch.int32, device=keep.device)
    in_use = rows < row_start[-1]
    by_token = torch.sort(token.int(), stable=True).indices
    token_of_row = torch.where(in_use, token, 0).int()
    row_of_pair = torch.where(in_use, by_token, -1).int()
    return token_of_row, torch.where(in_use, rows, 0), row_of_pair, pair_start, row_start


def _starts(counts: Tensor) -> Tensor:
    """The exclusive scan of counts, int32, with the total as an additional last element."""
    return torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0)).int()
