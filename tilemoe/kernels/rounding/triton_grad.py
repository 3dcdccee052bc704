"""The gradient of token rounding: d_logits (T, E) from the gradients of the rounded rows' scores, in one kernel.

T tokens · E experts · K experts per token · R_max static row capacity

Memory-bound: a CTA reads the logits of a block of tokens and gathers the gradients of their rows by pair.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilemoe.kernels.rounding.triton_kernels import ADDED_PAIR
from tilemoe.kernels.rounding.triton_topk import score_of_logit

_EPSILON = tl.constexpr(1e-20)  # the same as in `tilemoe.routing.topk._total`


@triton.jit(do_not_specialize=["num_tokens"])
def grad_kernel(
    d_scores, logits, expert_ids, token_mask, norm, row_of_pair, code_of_pair, pair_start_of_token, d_logits,
    num_tokens, num_experts, experts_per_token, scale,
    MODE: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """d_logits (T, E) from d_scores (R_max).

    S is the score. q is S / (sum of the K chosen S), the softmax over the K chosen logits, or S itself. The forward's
    score is scale * q for a chosen pair and scale * S for an added one. Let g = d_scores (0 for a chosen pair that was
    dropped) and A = sum of g q over the chosen pairs (0 if q = S). Then the gradient through q is
    ``scale * q * (g - A)`` with respect to log S. The softmax subtracts S times the sum of all these from every expert.

    The first PAIRS pairs of a token stay in registers, others are read twice. WHOLE: BLOCK_E covers all experts, and
    the logits are loaded together with the pairs. All loads are issued before the computation.
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

    first = tl.load(pair_start_of_token + token, mask=real, other=0)
    count = tl.load(pair_start_of_token + token + 1, mask=real, other=0) - first
    most = tl.max(count, axis=0)
    carried = (d_scores, row_of_pair, code_of_pair, line)
    column = tl.arange(0, BLOCK_E)
    if WHOLE and SOFTMAX:
        is_logit = real[:, None] & (column < num_experts)[None, :]
        tile = tl.load(line + column[None, :], mask=is_logit, other=float("-inf"))
    pairs = _load_pairs(carried, first, count, 0, PAIRS)
    k = tl.arange(0, BLOCK_K)
    is_k = real[:, None] & (k < experts_per_token)[None, :]
    ids = tl.load(expert_ids + token.to(tl.int64)[:, None] * experts_per_token + k[None, :], mask=is_k, other=0)
    logit = tl.load(line + ids, mask=is_k, other=float("-inf"))

    # The chosen experts' q. Unless LATE, `whole` turns S into q.
    chosen_score = score_of_logit(logit, top[:, None], inverse[:, None], SOFTMAX)
    high = tl.where(real, tl.max(logit, axis=1), 0.0) if LATE else top
    weight = tl.exp(logit - high[:, None]) if LATE else tl.where(is_k, chosen_score, 0.0)
    whole = tl.full((BLOCK_T,), 1.0, dtype=tl.float32)
    if LATE:
        whole = 1.0 / tl.where(real, tl.sum(weight, axis=1), 1.0)
    elif NORMALIZE:
        whole = 1.0 / (tl.sum(weight, axis=1) + _EPSILON)
    q = weight * whole[:, None]
    of_token = (top[:, None], inverse[:, None], high[:, None], whole[:, None])

    through_chosen, through_added = _sums_of_pairs(pairs, of_token, MODE)  # sums of g q and of g S
    for start in range(PAIRS, most, PAIRS):
        more = _sums_of_pairs(_load_pairs(carried, first, count, start, PAIRS), of_token, MODE)
        through_chosen += more[0]
        through_added += more[1]

    # The softmax subtracts common * S from every expert.
    common = tl.zeros((BLOCK_T,), dtype=tl.float32)
    shared = through_chosen if (LATE or NORMALIZE) else tl.zeros((BLOCK_T,), dtype=tl.float32)  # A
    if SOFTMAX:
        rest = through_chosen - shared * tl.sum(q, axis=1)
        common = scale * (through_added + (tl.zeros_like(rest) if LATE else rest))
    for left in range(0, num_experts, BLOCK_E):
        valid = (left + column < num_experts)[None, :]
        grad = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
        if SOFTMAX:
            if not WHOLE:
                tile = tl.load(line + left + column[None, :], mask=real[:, None] & valid, other=float("-inf"))
            grad = -score_of_logit(tile, top[:, None], inverse[:, None], SOFTMAX) * common[:, None]
        tl.store(out + left + column[None, :], tl.where(real[:, None], grad, 0.0), mask=inside[:, None] & valid)
    tl.debug_barrier()  # other threads overwrite the same places: chosen experts first, then pairs that have a row
    slope = 1.0 if SOFTMAX else 1.0 - chosen_score
    grad_chosen = -scale * q * shared[:, None] * slope - chosen_score * common[:, None]
    tl.store(out + ids, grad_chosen, mask=is_k)
    tl.debug_barrier()
    _store_pairs(out, pairs, of_token, shared, common, scale, MODE)
    for start in range(PAIRS, most, PAIRS):
        _store_pairs(out, _load_pairs(carried, first, count, start, PAIRS), of_token, shared, common, scale, MODE)


@triton.jit
def _load_pairs(carried, first, count, start, PAIRS: tl.constexpr):
    """(tokens, PAIRS) each: expert, whether it was added, the score's gradient, the logit, whether the pair exists."""
    d_scores, row_of_pair, code_of_pair, line = carried
    index = start + tl.arange(0, PAIRS)[None, :]
    is_pair = index < count[:, None]
    pair = first[:, None] + index
    code = tl.load(code_of_pair + pair, mask=is_pair, other=0).to(tl.int32)
    row = tl.load(row_of_pair + pair, mask=is_pair, other=0)
    g = tl.load(d_scores + row, mask=is_pair, other=0.0)
    expert = code & (ADDED_PAIR - 1)
    return expert, (code & ADDED_PAIR) != 0, g, tl.load(line + expert, mask=is_pair, other=0.0), is_pair


@triton.jit
def _scores_of_pairs(logit, of_token, MODE: tl.constexpr):
    """(S, q) of pairs, with q computed as if all were chosen."""
    top, inverse, high, whole = of_token
    score = score_of_logit(logit, top, inverse, MODE != "sigmoid")
    return score, (tl.exp(logit - high) if MODE == "late softmax" else score) * whole


@triton.jit
def _sums_of_pairs(pairs, of_token, MODE: tl.constexpr):
    """(tokens,) each: the sum of g q over the chosen pairs, and of g S over the added ones."""
    _, is_added, g, logit, is_pair = pairs
    score, q = _scores_of_pairs(logit, of_token, MODE)
    through_chosen = tl.sum(tl.where(is_pair & (is_added == 0), g * q, 0.0), axis=1)
    return through_chosen, tl.sum(tl.where(is_pair & is_added, g * score, 0.0), axis=1)


@triton.jit
def _store_pairs(out, pairs, of_token, shared, common, scale, MODE: tl.constexpr):
    """Store the gradient of the logits of those pairs that have a row."""
    expert, is_added, g, logit, is_pair = pairs
    score, q = _scores_of_pairs(logit, of_token, MODE)
    through = tl.where(is_added, g * score, q * (g - shared[:, None]))
    slope = 1.0 - score if MODE == "sigmoid" else 1.0
    tl.store(out + expert, scale * through * slope - score * common[:, None], mask=is_pair)
