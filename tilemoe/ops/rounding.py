"""torch.library registration of token rounding: opaque to torch.compile.

T tokens · E experts · K experts per token · R_max row capacity
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.kernels.torch import rounding as torch_rounding


@torch.library.custom_op("tilemoe::round_rows", mutates_args=())
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
    """See `tilemoe.kernels.torch.rounding.round_rows`."""
    return torch_rounding.round_rows(
        all_scores, expert_ids, kept_scores, uniform, token_mask, mode, tile, scale, capacity
    )


@round_rows.register_fake
def _(
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
    num_tokens, num_experts = all_scores.shape

    def index(length: int) -> Tensor:
        return all_scores.new_empty(length, dtype=torch.int32)

    rows = (index(capacity), index(capacity), index(capacity))
    return *rows, index(num_tokens + 1), index(num_experts + 1), index(num_experts)
