"""Token rounding on a GPU, host side: a few small kernels, which do not sort T x E values, sync with the host, or
write anything of size T x E except bits.

T tokens · E experts · K experts per token · m tile · B blocks of TOKENS tokens · R_max static row capacity
f rows of an expert under top-K · r rows that it computes, a multiple of m

1. `key_kernel`: top-K's choices as bit masks; in each block, for each expert the best token that did not choose it.
2. `count_kernel`: f of every expert and its pairs in earlier blocks; the last CTA then computes r and the row starts.
3. `place_kernel`: the list of chosen pairs, sorted by expert.
4. `margin_kernel`, `round_kernel`, only for "nearest_score": r again, from the scores of rows to drop or add.
5. `row_kernel`: one CTA for each expert finds the tokens that it drops or adds.
6. `token_kernel`, `pair_kernel`: the positions of all pairs by token, then the contents of pairs and rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilemoe.kernels.rounding.triton_grad import grad_kernel
from tilemoe.kernels.rounding.triton_kernels import (
    count_kernel,
    key_kernel,
    margin_kernel,
    pair_kernel,
    place_kernel,
    round_kernel,
    row_kernel,
    token_kernel,
)
from tilemoe.kernels.rounding.triton_topk import TOKENS
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import Launch, ceil_div, contiguous, int32_vectors, launch_of, power_of_two

_TOKENS = int(TOKENS)
MAX_EXPERTS = 4096  # the limit of the router's selection, too; `ADDED_PAIR` is above every expert
_KEY_TILE, _KEYS_OF_THREAD = 2048, 16  # `key_kernel`: logits that a CTA, and one of its threads, holds at a time
_WORDS_OF_WARP = 128  # `key_kernel`: words of token_bits that a warp makes at a time
_COUNTS = (512, 4)  # `count_kernel`: blocks that a CTA loads at a time, and experts per CTA
_SUMS = 1024  # `token_kernel`: counts of earlier blocks that are loaded at a time
_BLOCKS = 1024  # an expert's best keys of blocks that stay in registers
_ELEMENTS_OF_WARP = 256  # tokens of the found blocks that a warp examines at a time
_NEAR = 256  # keys of tokens that may be added, as many as stay in registers
_LIST = {4: 1024, 8: 4096}  # warps of a CTA -> keys of an expert's chosen pairs that stay in registers
_MANY_EXPERTS = 128  # with more experts several CTAs share an SM: an expert's list is short, and its CTA gets 4 warps
_PAIRS = 512  # consecutive pairs per CTA
_TOKEN_WORDS = 512  # `token_kernel`: words of token_bits per CTA


class RoundingSpec(NamedTuple):
    """The kernels' parameters that are not tensors; ``score`` is the router's `RouterSpec.mode`."""

    mode: str
    tile: int
    score: str
    normalize: bool
    scale: float
    capacity: int


class RoundedRows(NamedTuple):
    """scores (R_max,) fp32, by row; the plan's tensors and pairs_of_expert (E,) as in `tilemoe.kernels.rounding.torch`;
    norm (T, 2) fp32 and code_of_pair (R_max,) int16, for the gradient (see `key_kernel` and `pair_kernel`).
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


def round_rows(logits: Tensor, *rest: Any) -> RoundedRows:
    """The rounded rows; arguments as for `round_launches`."""
    device_of(logits)
    launches, rows = round_launches(logits, *rest)
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
    """(launches in order, the tensors that they fill) for logits (T, E) fp32; expert_ids and kept_scores (T, K);
    uniform (E,), the draws of the random modes; and token_mask (T,). T >= tile.
    """
    logits, token_mask = logits.contiguous(), contiguous(token_mask)
    (num_tokens, num_experts), num_pairs = logits.shape, expert_ids.numel()
    assert num_experts <= MAX_EXPERTS, "the caller chooses another way"
    rows = _empty_rows(logits, spec)
    known = {
        **rows._asdict(),
        **_scratch(logits, expert_ids.shape[1], spec),
        "logits": logits,
        "expert_ids": expert_ids,
        "kept_scores": kept_scores,
        "uniform": uniform,
        "token_mask": token_mask,
        "num_tokens": num_tokens,
        "tokens_of_block": _TOKENS,
        "num_blocks": ceil_div(num_tokens, _TOKENS),
        "num_experts": num_experts,
        "num_words": ceil_div(num_experts, 32),
        "num_pairs": num_pairs,
        "most_blocks": _most_blocks(num_tokens, spec),
        "scale": spec.scale,
        "capacity": spec.capacity,
    }
    columns, experts_at_once = max(32, power_of_two(num_experts)), _COUNTS[1]
    mode = "down" if spec.mode == "nearest_score" else spec.mode
    counting = {"MODE": mode, "TILE": spec.tile, "BLOCK_E": columns, "ROWS": _COUNTS[0], "COLUMNS": experts_at_once}
    launches = [
        _key_launch(known, columns, spec),
        _launch(count_kernel, ceil_div(num_experts, experts_at_once) + 1, known, counting, num_warps=8),
        _launch(place_kernel, ceil_div(num_pairs, _PAIRS), known, {"K": expert_ids.shape[1], "BLOCK": _PAIRS}),
    ]
    return [*launches, *_row_launches(known, columns, spec)], rows


def _row_launches(known: dict[str, Any], columns: int, spec: RoundingSpec) -> list[Launch]:
    """The launches from step 4 on, after the list of chosen pairs."""
    num_tokens, num_experts = known["num_tokens"], known["num_experts"]
    launches = []
    num_warps = 4 if num_experts > _MANY_EXPERTS else 8
    search = {
        "SOFTMAX": spec.score != "sigmoid",
        "TILE": spec.tile,
        "ELEMENTS": _ELEMENTS_OF_WARP * num_warps,
        "BLOCK_B": _BLOCKS,
        "NEAR": _NEAR,
        "BLOCK": _LIST[num_warps],
    }
    if spec.mode == "nearest_score":
        # fp64 sums need registers besides the listed keys, so half as many keys are held at a time.
        halved = {**search, "BLOCK": _LIST[num_warps] // 2}
        launches.append(_launch(margin_kernel, num_experts, known, halved, num_warps=8))
        launches.append(_launch(round_kernel, 1, known, {"TILE": spec.tile, "BLOCK_E": columns}))
    launches.append(_launch(row_kernel, num_experts, known, search, num_warps))
    words = power_of_two(known["num_words"])
    block_t = min(128, max(_TOKENS, _TOKEN_WORDS // words))
    of_tokens = {"BLOCK_T": block_t, "WORDS": words, "BLOCK": _SUMS}
    launches.append(_launch(token_kernel, ceil_div(num_tokens, block_t), known, of_tokens))
    places = max(spec.capacity, known["num_pairs"], num_experts * spec.tile)
    launches.append(_launch(pair_kernel, ceil_div(places, _PAIRS), known, {"TILE": spec.tile, "BLOCK": _PAIRS}))
    return launches


def _most_blocks(num_tokens: int, spec: RoundingSpec) -> int:
    """The most blocks that tokens to add can be in; fewer than a tile are added."""
    return min(spec.tile, ceil_div(num_tokens, _TOKENS))


def _empty_rows(logits: Tensor, spec: RoundingSpec) -> RoundedRows:
    num_tokens, num_experts = logits.shape

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    return RoundedRows(
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


def _scratch(logits: Tensor, experts_per_token: int, spec: RoundingSpec) -> dict[str, Tensor | None]:
    """Buffers through which the kernels pass data to each other."""
    num_tokens, num_experts = logits.shape
    num_blocks, num_pairs = ceil_div(num_tokens, _TOKENS), num_tokens * experts_per_token
    found = num_experts * _most_blocks(num_tokens, spec)
    lengths = {
        **dict.fromkeys(("best", "block_bits", "pairs_before"), num_blocks * num_experts),
        "token_bits": num_tokens * ceil_div(num_experts, 32) * 2,
        **dict.fromkeys(("pairs_of_block", "real_of_block"), num_blocks),
        **dict.fromkeys(("num_real", "programs_done"), 1),
        "chosen_start": num_experts + 1,
        **dict.fromkeys(("list_key", "list_token"), num_pairs),
        "found_blocks": found,
        **dict.fromkeys(("near_key", "near_token"), found * _TOKENS),
        **dict.fromkeys(("changed", "added_row"), num_experts * spec.tile),
    }
    scratch: dict[str, Tensor | None] = dict(zip(lengths, int32_vectors(logits, *lengths.values()), strict=True))
    scratch["list_expert"] = torch.empty(num_pairs, dtype=torch.int16, device=logits.device)
    for name in ("lost", "gained"):
        is_needed = spec.mode == "nearest_score"
        scratch[name] = logits.new_empty(num_experts, dtype=torch.float64) if is_needed else None
    return scratch


def _launch(kernel: Any, programs: int, known: dict[str, Any], constants: dict[str, Any], num_warps: int = 4) -> Launch:
    """A launch whose run-time arguments are taken by name from ``known``."""
    args = {name: known[name] for name in kernel.arg_names if name not in constants}
    return Launch(kernel, (programs,), args, constants, num_warps, num_stages=1)


def _key_launch(known: dict[str, Any], columns: int, spec: RoundingSpec) -> Launch:
    lanes, words = min(32, columns // 4), columns // 32
    block_t = max(1, min(_TOKENS, _KEY_TILE // columns))
    num_warps = max(1, block_t * columns // (32 * _KEYS_OF_THREAD))
    constants = {
        "K": known["expert_ids"].shape[1],
        "SOFTMAX": spec.score != "sigmoid",
        "LANES": lanes,
        "BLOCK_T": block_t,
        "CHUNKS": columns // (4 * lanes),
        "WORDS": words,
        "WORD_TOKENS": min(_TOKENS, _WORDS_OF_WARP * num_warps // words),
    }
    return _launch(key_kernel, known["num_blocks"], known, constants, num_warps)


def score_grad(d_scores: Tensor, *rest: Any) -> Tensor:
    """d_logits (T, E) fp32; arguments as for `score_grad_launch`."""
    device_of(d_scores)
    launch = score_grad_launch(d_scores, *rest)
    launch.run()
    return launch.args["d_logits"]


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
    """The launch that computes d_logits (T, E) fp32 from d_scores (R_max,) and the tensors of `round_launches`."""
    (num_tokens, num_experts), k = logits.shape, expert_ids.shape[1]
    columns = min(512, max(32, power_of_two(num_experts)))
    block_t = max(4, 512 // columns)
    logits = logits.contiguous()
    given = (d_scores.contiguous(), logits, expert_ids, contiguous(token_mask))
    saved = (norm, row_of_pair, code_of_pair, pair_start_of_token)
    args = (*given, *saved, torch.empty_like(logits), num_tokens, num_experts, k, spec.scale)
    constants = {
        "MODE": spec.score,
        "NORMALIZE": spec.normalize,
        "BLOCK_T": block_t,
        "BLOCK_E": columns,
        "BLOCK_K": power_of_two(k),
        "PAIRS": min(16, max(4, 2 * power_of_two(k))),  # pairs of a token that stay in registers: few tokens have more
        "WHOLE": num_experts <= columns,
    }
    num_warps = 4 if columns == 512 else 2
    return launch_of(grad_kernel, (ceil_div(num_tokens, block_t),), args, constants, num_warps)
