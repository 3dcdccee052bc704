"""Token rounding (arXiv 2512.14080, section 5), one expert and one token after another.

T tokens · E experts · K experts per token · m tile · f rows of an expert under top-K · r rows it computes
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.config import TokenRounding


def round_rows(
    all_scores: Tensor,
    expert_ids: Tensor,
    kept_scores: Tensor,
    rounding: TokenRounding,
    *,
    scale: float = 1.0,
    uniform: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> list[list[int]]:
    """The tokens that each expert computes, ascending.

    all_scores (T, E): each token's score with each expert before ``scale``. expert_ids, kept_scores (T, K): the experts
    that top-K chose, and their scores; an id >= E is skipped. uniform (E,) in [0, 1): the draws that "stochastic" and
    "nearest_score" need. token_mask (T,) bool: False excludes a token.

    An expert ranks its f chosen tokens by their kept scores, then all others by ``all_scores``, ties going to the lower
    token, and computes the first r. With fewer unmasked tokens than a tile nothing is rounded.
    """
    num_tokens, num_experts = all_scores.shape
    tokens = [t for t in range(num_tokens) if token_mask is None or bool(token_mask[t])]
    chosen: list[dict[int, float]] = [{} for _ in range(num_experts)]
    for t in tokens:
        for expert, score in zip(expert_ids[t].tolist(), kept_scores[t].tolist(), strict=True):
            if expert < num_experts:
                chosen[expert][t] = score
    rows, deviation = [], 0
    for expert in range(num_experts):
        mine = chosen[expert]
        column = all_scores[:, expert]
        others = {t: float(column[t]) for t in tokens if t not in mine}
        order = [*_best_first(mine), *_best_first(others)]
        carried = [mine[t] if t in mine else float(column[t] * scale) for t in order]
        draw = 0.0 if uniform is None else float(uniform[expert])
        count = _rounded(len(mine), rounding, carried, draw, deviation)
        deviation += count - len(mine)
        most = len(tokens) // rounding.tile * rounding.tile
        count = min(count, most) if most else len(mine)
        rows.append(sorted(order[:count]))
    return rows


def draw_uniform(num_experts: int, rounding: TokenRounding, generator: torch.Generator | None) -> Tensor | None:
    """(E,) fp32: one draw per expert for the random modes; None for the others."""
    if rounding.mode not in ("stochastic", "nearest_score"):
        return None
    device = "cpu" if generator is None else generator.device
    return torch.rand(num_experts, generator=generator, device=device)


def _best_first(scores: dict[int, float]) -> list[int]:
    return sorted(scores, key=lambda t: (-scores[t], t))


def _rounded(f: int, rounding: TokenRounding, carried: list[float], draw: float, deviation: int) -> int:
    """r before it is clamped. carried: the scores by rank; deviation: sum of r - f over the experts before this one."""
    mode, m = rounding.mode, rounding.tile
    down = f // m * m
    up = down if f == down else down + m
    if mode == "nearest":
        goes_up = up - f < f - down
    elif mode == "stochastic":
        goes_up = draw < (f - down) / m
    elif mode == "nearest_score":
        dropped, added = sum(carried[down:f]), sum(carried[f:up])
        goes_up = draw * (dropped + added) < dropped
    elif mode == "balance":
        goes_up = abs(up - f + deviation) < abs(down - f + deviation)
    else:
        goes_up = mode == "up"
    return up if goes_up else down
