"""Token rounding: each expert's number of rows is rounded to a multiple of a tile (arXiv 2512.14080, section 5).

T tokens · E experts · K experts per token · m tile · R_max row capacity · f rows of an expert under top-K
r rows of an expert after rounding
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemoe.config import MoEConfig, TokenRounding
from tilemoe.kernels.choose import choose_rounding
from tilemoe.ops import rounding as rounding_ops
from tilemoe.plan import RoutingPlan, experts_of_rows
from tilemoe.runtime.tensors import require_generator
from tilemoe.runtime.tracing import is_in_backward, specialised, warn_once

_DRAWING = ("stochastic", "nearest_score")
_MAX_ROWS = 2**30  # kernels compute row numbers in int32, up to one block past the last row


def rounds(cfg: MoEConfig, num_tokens: int, training: bool) -> bool:
    """Whether rows are rounded: in training, if ``cfg.rounding`` is set and ``num_tokens`` is at least a tile.

    A batch of fewer tokens gives a warning, once per tile.
    """
    if not training or cfg.rounding is None:
        return False
    if num_tokens >= cfg.rounding.tile:
        return True
    warn_once(
        f"rounding.tile = {cfg.rounding.tile} is larger than the number of tokens: such batches are routed by plain "
        "top-K; lower the tile or raise the tokens of a batch"
    )
    return False


def round_tokens(
    logits: Tensor,
    expert_ids: Tensor,
    kept_scores: Tensor,
    cfg: MoEConfig,
    *,
    generator: torch.Generator | None = None,
    token_mask: Tensor | None = None,
) -> tuple[RoutingPlan, Tensor, Tensor]:
    """Round a top-K selection as ``cfg.rounding`` says; T must be at least the tile.

    Returns a plan; the scores (R_max,) of its rows, differentiable and 0 past R; and f (E,) int32.

    logits (T, E) fp32 or fp64; expert_ids (T, K), E for a token that the mask excludes; kept_scores (T, K): the
    scores of the top-K selection. Let S be the softmax or the sigmoid of the logits. Each expert ranks its f tokens by
    their kept scores, then all other tokens by S, ties going to the lower token, and takes the first r. Its own tokens
    keep their scores; the others get S times ``cfg.router.scale``. r is at most the number of unmasked tokens rounded
    down to a multiple of the tile; if there are fewer unmasked tokens than a tile, r = f.

    The random modes begin by drawing ``torch.rand(E)`` in fp32 from ``generator`` (None: the default one of the logits'
    device). The draws are the same on any backend, and on all ranks with equal generator states.

    ValueError: ``generator`` is not a generator or is on another device, or there could be more than 2^30 rows.
    """
    rounding = cfg.rounding
    assert rounding is not None, "the caller asks `rounds` first"
    uniform = draw_uniform(cfg.num_experts, rounding, logits.device, generator)
    capacity = row_capacity(rounding, logits.shape[0], cfg.num_experts_per_tok, cfg.num_experts)
    choice = choose_rounding(logits.device, logits.dtype, *specialised(cfg.num_experts))
    kept = kept_scores.detach()
    if choice.name == "triton":  # its logits' gradient includes the part through the kept scores
        spec = rounding_ops.spec_args(cfg, capacity)
        scores, *tensors = rounding_ops.rounded_scores(logits, expert_ids, kept, uniform, token_mask, *spec)[:7]
    else:
        if token_mask is not None:
            logits = logits.masked_fill(~token_mask[:, None], 0.0)
        all_scores = torch.softmax(logits, dim=-1) if cfg.router.score == "softmax" else torch.sigmoid(logits)
        (scale,) = specialised(cfg.router.scale)
        how = (rounding.mode, rounding.tile, scale, capacity)
        tensors = rounding_ops.round_rows(all_scores.detach(), expert_ids, kept, uniform, token_mask, *how)
        scaled = all_scores * scale
        scores = _scores_of_rows(scaled, expert_ids, kept_scores, token_of_row=tensors[0], row_start=tensors[4])
    token_of_row, pair_of_row, row_of_pair, pair_start, row_start, pairs_of_expert = tensors
    arrays = (token_of_row, pair_of_row, row_of_pair, pair_start, row_start)
    return RoutingPlan(*arrays, cfg.num_experts, logits.shape[0], unchecked=True), scores, pairs_of_expert


def draw_uniform(
    num_experts: int, rounding: TokenRounding, device: torch.device, generator: torch.Generator | None
) -> Tensor | None:
    """The random draws (E,) fp32 in [0, 1) for a random mode; None for the other modes.

    ValueError: ``generator`` is not a generator or is on another device, or activation checkpointing repeats this
    forward with a generator given.
    """
    require_generator(generator)
    there = device if generator is None else generator.device
    if there != device and (there.type != device.type or None not in (there.index, device.index)):
        raise ValueError(
            f"generator is on {there} but the logits are on {device}; "
            f"make it with torch.Generator(device={str(device)!r})"
        )
    if rounding.mode not in _DRAWING:
        return None
    if generator is not None and is_in_backward():
        raise ValueError(
            "generator cannot be given under activation checkpointing, which restores only PyTorch's default one, "
            "so the repeated forward would round to other rows; leave it out and call torch.manual_seed, or leave this "
            "layer out of checkpointing"
        )
    return torch.rand(num_experts, dtype=torch.float32, device=device, generator=generator)


def row_capacity(rounding: TokenRounding, num_tokens: int, experts_per_token: int, num_experts: int) -> int:
    """R_max: the largest number of rows that the mode can give for any routing. ValueError: more than 2^30."""
    tile = rounding.tile
    beyond = {"down": 0, "balance": tile // 2, "nearest": num_experts * (tile // 2)}
    rows = num_tokens * experts_per_token + beyond.get(rounding.mode, num_experts * (tile - 1))
    rows = min(rows, num_experts * (num_tokens // tile * tile))
    if rows > _MAX_ROWS:
        raise ValueError(f"{num_tokens} tokens could become {rows} rows; row indices are int32, so split the batch")
    return rows


def _scores_of_rows(
    scaled_scores: Tensor, expert_ids: Tensor, kept_scores: Tensor, token_of_row: Tensor, row_start: Tensor
) -> Tensor:
    """The score (R_max,) of each row, from all scaled scores (T, E) and the kept ones (T, K); 0 past R."""
    experts = scaled_scores.shape[1]
    padded = torch.nn.functional.pad(scaled_scores, (0, 1))  # an extra column for skipped pairs
    carried = padded.scatter(1, expert_ids.long().clamp(max=experts), kept_scores)
    rows = torch.arange(token_of_row.shape[0], dtype=torch.int32, device=token_of_row.device)
    expert_of_row = experts_of_rows(row_start, rows)  # E past R
    scores = carried.reshape(-1)[token_of_row.long() * (experts + 1) + expert_of_row]
    return scores.masked_fill(rows >= row_start[-1], 0.0)
