"""Token rounding on a GPU: no sort of T x E, no host sync, a few small kernels.

T tokens · E experts · K experts per token · B blocks of TOKENS tokens · R_max row capacity

1. `key_kernel`: what each expert ranks its tokens by, expert-major, and counts of the chosen pairs by block.
2. `count_kernel`: f of every expert, and the number of real tokens.
3. `margin_kernel`, for "nearest_score" alone: the scores around f.
4. `round_kernel`: r of every expert and its first row.
5. `row_kernel`: a program for each expert finds its threshold and writes its rows.
6. `token_kernel`, `pair_kernel`: the same pairs by token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.kernels.triton.launch import Launch, ceil_div, contiguous, device_of, power_of_two
from tilemoe.kernels.triton.rounding_grad import grad_kernel
from tilemoe.kernels.triton.rounding_kernels import (
    TOKENS,
    count_kernel,
    key_kernel,
    margin_kernel,
    pair_kernel,
    round_kernel,
    row_kernel,
    token_kernel,
)

MAX_EXPERTS = 4096  # as in the selection; `ADDED_PAIR` is above every expert
_KEY_TILE = 8192  # logits of a program that makes keys
_BLOCK_E = 128  # experts at a time, for all tokens of a block
_BLOCK_KEYS = 4096  # of a column at a time
_CANDIDATES = 4096  # keys of an expert that are copied out
_COUNTS = (512, 16)  # lines and experts of a program that adds counts up
_GRAD_TOKENS, _GRAD_PAIRS = 8, 8


class RoundingSpec(NamedTuple):
    """What the kernels depend on besides the tensors; ``score`` as in `tilemoe.kernels.triton.router.RouterSpec`."""

    mode: str
    tile: int
    score: str
    normalize: bool
    scale: float
    capacity: int


class RoundedRows(NamedTuple):
    """scores (R_max,) fp32, the plan's tensors and pairs_of_expert (E,) as in `tilemoe.kernels.torch.rounding`;
    norm (T, 2) fp32 and code_of_pair (R_max,) int16, which the gradient needs.
    """

    scores: Tensor
    token_of_row: Tensor
    pair_of_row: Tensor
    row_of_pair: Tensor
    pair_start_of_token: Tensor
    row_start_of_expert: Tensor
    pairs_of_expert: Tensor
    norm: Tensor
    code_of_pair: Tensor


def round_rows(
    logits: Tensor,
    expert_ids: Tensor,
    kept_scores: Tensor,
    uniform: Tensor | None,
    token_mask: Tensor | None,
    spec: RoundingSpec,
) -> RoundedRows:
    """From logits (T, E) fp32, expert_ids and kept_scores (T, K), uniform (E,), token_mask (T,), with T >= tile."""
    device_of(logits)
    launches, rows = round_launches(logits.contiguous(), expert_ids, kept_scores, uniform, contiguous(token_mask), spec)
    for launch in launches:
        launch.run()
    return rows


def round_launches(
    logits: Tensor,
    expert_ids: Tensor,
    kept_scores: Tensor,
    uniform: Tensor | None,
    token_mask: Tensor | None,
    spec: RoundingSpec,
) -> tuple[list[Launch], RoundedRows]:
    """The launches, in order, and the tensors that they fill."""
    num_tokens, num_experts = logits.shape
    assert num_experts <= MAX_EXPERTS, "the caller chooses another way"
    num_blocks = ceil_div(num_tokens, int(TOKENS))

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    rows = RoundedRows(
        scores=new(spec.capacity, dtype=torch.float32),
        token_of_row=new(spec.capacity),
        pair_of_row=new(spec.capacity),
        row_of_pair=new(spec.capacity),
        pair_start_of_token=new(num_tokens + 1),
        row_start_of_expert=new(num_experts + 1),
        pairs_of_expert=new(num_experts),
        norm=new(num_tokens if spec.score != "sigmoid" else 0, 2, dtype=torch.float32),
        code_of_pair=new(spec.capacity, dtype=torch.int16),
    )
    columns = max(16, power_of_two(num_experts))
    block_t = max(1, min(int(TOKENS), _KEY_TILE // columns))
    key_warps = max(1, block_t * columns // 1024)
    num_counts = num_blocks * (int(TOKENS) // block_t)
    keys, counts = new(num_experts, num_blocks * int(TOKENS)), new(num_counts, num_experts)
    real_tokens, num_real = new(num_counts), new(1)
    sizes = {"num_blocks": num_blocks, "num_experts": num_experts}
    shared = {"pairs_of_expert": rows.pairs_of_expert, "num_real": num_real}
    launches = [
        Launch(
            key_kernel,
            (num_counts,),
            {
                "logits": logits,
                "expert_ids": expert_ids,
                "kept_scores": kept_scores,
                "token_mask": token_mask,
                "keys": keys,
                "norm": rows.norm,
                "counts": counts,
                "real_tokens": real_tokens,
                "num_tokens": num_tokens,
                "experts_per_token": expert_ids.shape[1],
                **sizes,
            },
            {
                "SOFTMAX": spec.score != "sigmoid",
                "BLOCK_T": block_t,
                "BLOCK_E": columns,
                # The histogram of the pairs has something for every thread.
                "BLOCK_K": max(power_of_two(expert_ids.shape[1]), 32 * key_warps // block_t),
            },
            num_warps=key_warps,
            num_stages=1,
        ),
        Launch(
            count_kernel,
            (ceil_div(num_experts, _COUNTS[1]) + 1,),
            {
                "counts": counts,
                "real_tokens": real_tokens,
                **shared,
                "num_counts": num_counts,
                "num_experts": num_experts,
            },
            {"ROWS": _COUNTS[0], "COLUMNS": _COUNTS[1]},
            num_warps=8,
            num_stages=1,
        ),
    ]
    search = {"keys": keys, "candidates": new(num_experts, _CANDIDATES), "scale": spec.scale}
    blocks = {"CANDIDATES": _CANDIDATES, "BLOCK": _BLOCK_KEYS}
    lost = gained = None
    if spec.mode == "nearest_score":
        lost, gained = new(num_experts, dtype=torch.float64), new(num_experts, dtype=torch.float64)
        launches.append(
            Launch(
                margin_kernel,
                (num_experts,),
                {**search, **shared, "lost": lost, "gained": gained, "num_blocks": num_blocks},
                {"TILE": spec.tile, **blocks},
                num_warps=8,
                num_stages=1,
            )
        )
    launches.append(
        Launch(
            round_kernel,
            (1,),
            {
                **shared,
                "uniform": uniform,
                "lost": lost,
                "gained": gained,
                "row_start_of_expert": rows.row_start_of_expert,
                "num_experts": num_experts,
            },
            {"MODE": spec.mode, "TILE": spec.tile, "BLOCK_E": columns},
            num_warps=4,
            num_stages=1,
        )
    )
    return [*launches, *_emission(rows, search, sizes, num_tokens, spec)], rows


def _emission(
    rows: RoundedRows, search: dict[str, Any], sizes: dict[str, int], num_tokens: int, spec: RoundingSpec
) -> list[Launch]:
    """The launches that write the rows of every expert, then the pairs of every token."""
    keys = search["keys"]
    kept = torch.empty_like(keys, dtype=torch.int8)
    rows_before_block = keys.new_empty(sizes["num_experts"], sizes["num_blocks"])
    pairs_of_block = keys.new_empty(sizes["num_blocks"])
    by_token = {"kept": kept, "pairs_of_block": pairs_of_block, "pair_start_of_token": rows.pair_start_of_token}
    block_e = min(_BLOCK_E, max(16, power_of_two(sizes["num_experts"])))
    return [
        Launch(
            row_kernel,
            (sizes["num_experts"],),
            {
                **search,
                "pairs_of_expert": rows.pairs_of_expert,
                "row_start_of_expert": rows.row_start_of_expert,
                "token_of_row": rows.token_of_row,
                "pair_of_row": rows.pair_of_row,
                "row_of_pair": rows.row_of_pair,
                "scores": rows.scores,
                "kept": kept,
                "rows_before_block": rows_before_block,
                "capacity": spec.capacity,
                **sizes,
            },
            {"CANDIDATES": _CANDIDATES, "BLOCK": _BLOCK_KEYS},
            num_warps=8,
            num_stages=1,
        ),
        Launch(
            token_kernel,
            (sizes["num_blocks"],),
            {**by_token, "num_tokens": num_tokens, **sizes},
            {"BLOCK_E": block_e},
            num_warps=4,
            num_stages=1,
        ),
        Launch(
            pair_kernel,
            (sizes["num_blocks"],),
            {
                **by_token,
                "rows_before_block": rows_before_block,
                "row_start_of_expert": rows.row_start_of_expert,
                "row_of_pair": rows.row_of_pair,
                "code_of_pair": rows.code_of_pair,
                "num_tokens": num_tokens,
                **sizes,
            },
            {"BLOCK_E": block_e, "BLOCK": 1024},
            num_warps=8,
            num_stages=1,
        ),
    ]


def score_grad(
    d_scores: Tensor,
    logits: Tensor,
    expert_ids: Tensor,
    token_mask: Tensor | None,
    norm: Tensor,
    row_of_pair: Tensor,
    code_of_pair: Tensor,
    pair_start_of_token: Tensor,
    spec: RoundingSpec,
) -> Tensor:
    """d_logits (T, E) fp32 from d_scores (R_max,) and what `round_rows` was given and gave."""
    device_of(logits)
    launch = score_grad_launch(
        d_scores.contiguous(),
        logits.contiguous(),
        expert_ids,
        contiguous(token_mask),
        norm,
        row_of_pair,
        code_of_pair,
        pair_start_of_token,
        spec,
    )
    launch.run()
    d_logits: Tensor = launch.args["d_logits"]
    return d_logits


def score_grad_launch(
    d_scores: Tensor,
    logits: Tensor,
    expert_ids: Tensor,
    token_mask: Tensor | None,
    norm: Tensor,
    row_of_pair: Tensor,
    code_of_pair: Tensor,
    pair_start_of_token: Tensor,
    spec: RoundingSpec,
) -> Launch:
    """The launch behind `score_grad`."""
    num_tokens, num_experts = logits.shape
    return Launch(
        grad_kernel,
        (ceil_div(num_tokens, _GRAD_TOKENS),),
        {
            "d_scores": d_scores,
            "logits": logits,
            "expert_ids": expert_ids,
            "token_mask": token_mask,
            "norm": norm,
            "row_of_pair": row_of_pair,
            "code_of_pair": code_of_pair,
            "pair_start_of_token": pair_start_of_token,
            "d_logits": torch.empty_like(logits),
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "experts_per_token": expert_ids.shape[1],
            "scale": spec.scale,
        },
        {
            "MODE": spec.score,
            "NORMALIZE": spec.normalize,
            "BLOCK_T": _GRAD_TOKENS,
            "BLOCK_E": min(512, max(32, power_of_two(num_experts))),
            "BLOCK_K": power_of_two(expert_ids.shape[1]),
            "PAIRS": _GRAD_PAIRS,
        },
        num_warps=4,
        num_stages=1,
    )
