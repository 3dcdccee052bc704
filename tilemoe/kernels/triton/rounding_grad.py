"""The gradient of the scores of rounded rows: every logit is read once, what each token carries is gathered.

T tokens · E experts · K experts per token · R_max row capacity
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.triton.rounding_kernels import ADDED_PAIR, score_of_logit

_EPSILON = tl.constexpr(1e-20)  # as in `tilemoe.routing.topk`


@triton.jit(do_not_specialize=["num_tokens"])
def grad_kernel(
    d_scores,
    logits,
    expert_ids,
    token_mask,
    norm,
    row_of_pair,
    code_of_pair,
    pair_start_of_token,
    d_logits,
    num_tokens,
    num_experts,
    experts_per_token,
    scale,
    MODE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """d_logits (T, E) from d_scores (R_max).

    With q = S / (sum of the K chosen S), or the softmax over the K chosen, or S itself, a chosen pair carries scale *
    q and an added one scale * S. Of g = d_scores, 0 for a chosen pair that was dropped, and A = sum of g q over the
    chosen pairs (0 if q = S): the gradient through q is ``scale * q * (g - A)`` with respect to log S. The softmax
    then takes S times the sum of all these from every expert of the token.
    """
    SOFTMAX: tl.constexpr = MODE != "sigmoid"
    LATE: tl.constexpr = MODE == "late softmax"
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    real = inside
    if token_mask is not None:
        real &= tl.load(token_mask + token, mask=inside, other=0) != 0
    top = tl.zeros((BLOCK_T,), dtype=tl.float32)
    inverse = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if SOFTMAX:
        top = tl.load(norm + 2 * token.to(tl.int64), mask=real, other=0.0)
        inverse = tl.load(norm + 2 * token.to(tl.int64) + 1, mask=real, other=1.0)
    line = logits + token.to(tl.int64)[:, None] * num_experts
    out = d_logits + token.to(tl.int64)[:, None] * num_experts

    # The chosen experts.
    k = tl.arange(0, BLOCK_K)
    is_k = real[:, None] & (k < experts_per_token)[None, :]
    ids = tl.load(expert_ids + token.to(tl.int64)[:, None] * experts_per_token + k[None, :], mask=is_k, other=0)
    logit = tl.load(line + ids, mask=is_k, other=float("-inf"))
    chosen_score = score_of_logit(logit, top, inverse, SOFTMAX)
    if LATE:
        # In the other modes `high` and `whole` make q out of S.
        high = tl.max(logit, axis=1)
        high = tl.where(real, high, 0.0)
        weight = tl.exp(logit - high[:, None])
    else:
        high = top
        weight = tl.where(is_k, chosen_score, 0.0)
    if LATE:
        whole = 1.0 / tl.where(real, tl.sum(weight, axis=1), 1.0)
    elif NORMALIZE:
        whole = 1.0 / (tl.sum(weight, axis=1) + _EPSILON)
    else:
        whole = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    q = weight * whole[:, None]

    first = tl.load(pair_start_of_token + token, mask=real, other=0)
    count = tl.load(pair_start_of_token + token + 1, mask=real, other=0) - first
    most = tl.max(count, axis=0)
    through_chosen = tl.zeros((BLOCK_T,), dtype=tl.float32)  # sum of g q
    through_added = tl.zeros((BLOCK_T,), dtype=tl.float32)  # sum of g S
    for start in range(0, most, PAIRS):
        expert, added, g, is_pair = _load_pairs(d_scores, row_of_pair, code_of_pair, first, count, start, PAIRS)
        here = tl.load(line + expert, mask=is_pair, other=0.0)
        score = score_of_logit(here, top, inverse, SOFTMAX)
        part = tl.exp(here - high[:, None]) if LATE else score
        through_chosen += tl.sum(tl.where(is_pair & (added == 0), g * part * whole[:, None], 0.0), axis=1)
        through_added += tl.sum(tl.where(is_pair & (added != 0), g * score, 0.0), axis=1)

    # What the softmax takes away from every expert, per unit of its S.
    common = tl.zeros((BLOCK_T,), dtype=tl.float32)
    shared = through_chosen if (LATE or NORMALIZE) else tl.zeros((BLOCK_T,), dtype=tl.float32)  # A
    if SOFTMAX:
        rest = through_chosen - shared * tl.sum(q, axis=1)
        common = scale * (through_added + (tl.zeros_like(rest) if LATE else rest))
    for left in range(0, num_experts, BLOCK_E):
        column = left + tl.arange(0, BLOCK_E)
        valid = (column < num_experts)[None, :]
        grad = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
        if SOFTMAX:
            tile = tl.load(line + column[None, :], mask=real[:, None] & valid, other=float("-inf"))
            grad = -score_of_logit(tile, top, inverse, SOFTMAX) * common[:, None]
        tl.store(out + column[None, :], tl.where(real[:, None], grad, 0.0), mask=inside[:, None] & valid)
    tl.debug_barrier()  # below, other threads write to the same places: the chosen first, then those with a row
    slope = 1.0 if SOFTMAX else 1.0 - chosen_score
    grad_chosen = -scale * q * shared[:, None] * slope - chosen_score * common[:, None]
    tl.store(out + ids, grad_chosen, mask=is_k)
    tl.debug_barrier()
    for start in range(0, most, PAIRS):
        expert, added, g, is_pair = _load_pairs(d_scores, row_of_pair, code_of_pair, first, count, start, PAIRS)
        here = tl.load(line + expert, mask=is_pair, other=0.0)
        score = score_of_logit(here, top, inverse, SOFTMAX)
        part = tl.exp(here - high[:, None]) if LATE else score
        slope_here = 1.0 if SOFTMAX else 1.0 - score
        through = tl.where(added != 0, g * score, part * whole[:, None] * (g - shared[:, None]))
        tl.store(out + expert, scale * through * slope_here - score * common[:, None], mask=is_pair)


@triton.jit
def _load_pairs(d_scores, row_of_pair, code_of_pair, first, count, start, PAIRS: tl.constexpr):
    """(tokens, PAIRS): expert, whether it was added, the gradient of its score, and whether there is such a pair."""
    index = start + tl.arange(0, PAIRS)[None, :]
    is_pair = index < count[:, None]
    pair = first[:, None] + index
    code = tl.load(code_of_pair + pair, mask=is_pair, other=0).to(tl.int32)
    row = tl.load(row_of_pair + pair, mask=is_pair, other=0)
    g = tl.load(d_scores + row, mask=is_pair, other=0.0)
    return code & (ADDED_PAIR - 1), code & ADDED_PAIR, g, is_pair
