"""The router's kernels: `select_kernel` (scores, top-K, loss sums) and `select_grad_kernel`.

T tokens · E experts · K experts per token · C columns of a tile · BLOCK_T tokens of a tile

A tile is BLOCK_T tokens times all experts, in registers. Columns are experts, padded group by group to powers of two
(GROUPS groups of GROUP columns). Selection works on int32 keys, see `_key`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-3.4028234663852886e38)  # lowest finite fp32
# Special keys of experts that are no candidates. Keys of numbers are all above -2^31 + 2^23.
_TAKEN = tl.constexpr(-(2**31))  # already chosen
_OUT = tl.constexpr(-(2**31) + 1)  # may not be chosen
_NAN = tl.constexpr(0x7FC00000)
_EPSILON = tl.constexpr(1e-20)  # the same as in `tilemoe.routing.topk._total`


@triton.jit
def _key(value):
    """An int32 with the order of the fp32 ``value``; as in torch.argmax, -0 equals 0, and NaN is above everything."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(value == value, key, _NAN)


@triton.jit
def _best(key, column, C: tl.constexpr):
    """(tokens,): the column of each token's largest key (tokens, C), the first of equal ones."""
    best = tl.max(key, axis=1)
    return tl.min(tl.where(key == best[:, None], column, C), axis=1)


@triton.jit
def _take_best(key, column, C: tl.constexpr):
    """``key`` (tokens, C) with each token's largest key replaced by _TAKEN."""
    return tl.where(column == _best(key, column, C)[:, None], _TAKEN, key)


@triton.jit
def _in_order(upper, upper_column, lower, lower_column):
    """Compare-exchange of (key, column) pairs, larger key first. Equal keys are not exchanged: sorting is stable."""
    swap = lower > upper
    return (
        tl.maximum(upper, lower),
        tl.where(swap, lower_column, upper_column),
        tl.minimum(upper, lower),
        tl.where(swap, upper_column, lower_column),
    )


@triton.jit
def _choose(key, K: tl.constexpr):
    """(tokens, C), with the columns of the K largest of the keys (tokens, C) as first K entries, best first."""
    C: tl.constexpr = key.shape[1]
    column = tl.arange(0, C)[None, :]
    chosen = tl.zeros(key.shape, dtype=tl.int32)
    for place in range(K):
        at = _best(key, column, C)[:, None]
        chosen = tl.where(column == place, at, chosen)
        key = tl.where(column == at, _TAKEN, key)
    return chosen


@triton.jit
def _choose_from_lists(key, K: tl.constexpr):
    """`_choose` that returns (tokens, C / 4). First each four neighbouring keys, which one thread holds, are sorted
    into a list; then each of the K maxima is taken over the heads of the lists only.
    """
    TOKENS: tl.constexpr = key.shape[0]
    LISTS: tl.constexpr = key.shape[1] // 4
    even, odd = tl.split(tl.reshape(key, (TOKENS, LISTS, 2, 2)))
    k0, k2 = tl.split(even)
    k1, k3 = tl.split(odd)
    place_of_list = tl.arange(0, LISTS)[None, :]
    c0 = tl.broadcast_to(place_of_list * 4, (TOKENS, LISTS))
    c1, c2, c3 = c0 + 1, c0 + 2, c0 + 3
    k0, c0, k1, c1 = _in_order(k0, c0, k1, c1)
    k2, c2, k3, c3 = _in_order(k2, c2, k3, c3)
    k1, c1, k2, c2 = _in_order(k1, c1, k2, c2)
    k0, c0, k1, c1 = _in_order(k0, c0, k1, c1)
    k2, c2, k3, c3 = _in_order(k2, c2, k3, c3)
    k1, c1, k2, c2 = _in_order(k1, c1, k2, c2)
    chosen = tl.zeros((TOKENS, LISTS), dtype=tl.int32)
    for place in range(K):
        at = _best(k0, c0, 4 * LISTS)[:, None]
        chosen = tl.where(place_of_list == place, at, chosen)
        won = c0 == at
        k0, k1, k2, k3 = tl.where(won, k1, k0), tl.where(won, k2, k1), tl.where(won, k3, k2), tl.where(won, _TAKEN, k3)
        c0, c1, c2 = tl.where(won, c1, c0), tl.where(won, c2, c1), tl.where(won, c3, c2)
    return chosen


@triton.jit
def _group_worth(key, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """(tokens, GROUPS): half the sum of each group's two largest values, from keys (tokens, GROUPS * GROUP)."""
    tokens: tl.constexpr = key.shape[0]
    flat = tl.reshape(key, (tokens * GROUPS, GROUP))
    column = tl.arange(0, GROUP)[None, :]
    best = tl.max(flat, axis=1)
    second = tl.max(_take_best(flat, column, GROUP), axis=1)
    worth = 0.5 * _value(best) + 0.5 * _value(second)
    return tl.reshape(worth, (tokens, GROUPS))


@triton.jit
def _value(key):
    """The inverse of `_key`."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _eligible(key, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """(tokens, GROUPS * GROUP): whether the column is in one of the token's TOP_GROUPS best groups."""
    tokens: tl.constexpr = key.shape[0]
    group = tl.arange(0, GROUPS)[None, :]
    group_key = tl.where(group < NUM_GROUPS, _key(_group_worth(key, GROUPS, GROUP)), _OUT)
    for _ in range(TOP_GROUPS):
        group_key = _take_best(group_key, group, GROUPS)
    best = (group_key == _TAKEN).to(tl.int32)
    return tl.reshape(tl.broadcast_to(best[:, :, None], (tokens, GROUPS, GROUP)), (tokens, GROUPS * GROUP)) != 0


@triton.jit
def _are_real(first, token_mask, num_tokens, BLOCK_T: tl.constexpr):
    """(BLOCK_T,): whether the token exists and is not masked."""
    token = tl.arange(0, BLOCK_T)
    real = first + token < num_tokens
    if token_mask is not None:
        real &= tl.load(token_mask + first + token, mask=real, other=0) != 0
    return real


@triton.jit
def _load_logits(
    logits, first, token_mask, num_tokens, expert, valid, NUM_EXPERTS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """(real (BLOCK_T,), logits (BLOCK_T, C)): 0 for a token that is not real, -inf in a column without an expert."""
    real = _are_real(first, token_mask, num_tokens, BLOCK_T)
    # A 64-bit offset to the block, 32-bit offsets within it.
    start = logits + first.to(tl.int64) * NUM_EXPERTS
    tile = tl.load(start + tl.arange(0, BLOCK_T)[:, None] * NUM_EXPERTS + expert, mask=real[:, None] & valid, other=0.0)
    return real, tl.where(valid, tile, float("-inf"))


@triton.jit
def _sigmoid(logits):
    return 1.0 / (1.0 + tl.exp(-logits))


@triton.jit
def _kept_softmax(logits, chosen):
    """The softmax over each token's chosen columns; 0 in the other columns."""
    kept = tl.where(chosen, logits, float("-inf"))
    weight = tl.where(chosen, tl.exp(logits - tl.max(kept, axis=1)[:, None]), 0.0)
    return weight * (1.0 / tl.sum(weight, axis=1))[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def select_kernel(
    logits, selection_bias, token_mask, expert_ids, scores, probability_parts, z_parts, num_tokens,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_T: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """expert_ids, scores (T, K); partial sums by program, probability_parts (programs, E) and z_parts (programs)."""
    C: tl.constexpr = GROUPS * GROUP
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    SOFTMAX: tl.constexpr = (
        MODE == "softmax" or z_parts is not None or (MODE == "late softmax" and probability_parts is not None)
    )
    column = tl.arange(0, C)[None, :]
    expert = (column // GROUP) * GROUP_SIZE + column % GROUP
    valid = (column % GROUP < GROUP_SIZE) & (expert < NUM_EXPERTS)
    probability_part = tl.zeros((BLOCK_T, C), dtype=tl.float32)
    z_part = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        first = block * BLOCK_T
        real, tile = _load_logits(logits, first, token_mask, num_tokens, expert, valid, NUM_EXPERTS, BLOCK_T)
        if SOFTMAX:
            top = tl.max(tile, axis=1)
            weight = tl.exp(tile - top[:, None])
            total = tl.sum(weight, axis=1)
            probability = weight * (1.0 / total)[:, None]
        if MODE == "softmax":
            score = probability
        elif MODE == "sigmoid":
            score = _sigmoid(tile)
        else:
            score = tile
        if probability_parts is not None:
            if MODE == "sigmoid":
                probability = score * (1.0 / (tl.sum(score, axis=1) + _EPSILON))[:, None]
            probability_part += tl.where(real[:, None], probability, 0.0)
        if z_parts is not None:
            z = top + tl.log(total)
            z_part += tl.where(real, z * z, 0.0)

        value = score
        if selection_bias is not None:
            everywhere = tl.broadcast_to(expert, (BLOCK_T, C))  # loaded per token, to get the logits' layout
            value += tl.maximum(tl.load(selection_bias + everywhere, mask=valid, other=0.0), _LOWEST)
        key = _key(tl.where(tile == float("-inf"), _LOWEST, value))
        key = tl.where(valid, key, _OUT)
        if NUM_GROUPS > 1:
            key = tl.where(_eligible(key, NUM_GROUPS, TOP_GROUPS, GROUPS, GROUP), key, _OUT)
        chosen = _choose_from_lists(key, K) if LISTS else _choose(key, K)

        place = tl.arange(0, chosen.shape[1])[None, :]
        chosen = (chosen // GROUP) * GROUP_SIZE + chosen % GROUP
        token = first + tl.arange(0, BLOCK_T)[:, None]
        # The chosen experts' logits are read again, from cache.
        at = token.to(tl.int64) * NUM_EXPERTS + chosen
        kept = tl.load(logits + at, mask=real[:, None] & (place < K), other=0.0)
        if MODE == "softmax":
            kept = tl.exp(kept - top[:, None]) * (1.0 / total)[:, None]
        elif MODE == "sigmoid":
            kept = _sigmoid(kept)
        else:
            kept = _kept_softmax(kept, place < K)
        if NORMALIZE and MODE != "late softmax":
            # IEEE division, so that with K = 1 the score is exactly 1, and token rounding does not rank by noise.
            total_kept = tl.sum(tl.where(place < K, kept, 0.0), axis=1) + _EPSILON
            kept = tl.math.div_rn(kept, tl.broadcast_to(total_kept[:, None], kept.shape))
        if SCALE != 1.0:
            kept *= SCALE
        to = token.to(tl.int64) * K + place
        inside = (place < K) & (token < num_tokens)
        tl.store(expert_ids + to, tl.where(real[:, None], chosen, NUM_EXPERTS), mask=inside)
        tl.store(scores + to, tl.where(real[:, None], kept, 0.0), mask=inside)
    if probability_parts is not None:
        part = probability_parts + tl.program_id(0) * NUM_EXPERTS + expert
        tl.store(part, tl.sum(probability_part, axis=0)[None, :], mask=valid)
    if z_parts is not None:
        tl.store(z_parts + tl.program_id(0), tl.sum(z_part, axis=0))


@triton.jit
def _dense_grad(
    logit, d_probability, top, inverse_total, common, inverse, d_z, MODE: tl.constexpr, SOFTMAX: tl.constexpr
):
    """The part of a logit's gradient that comes from normalisation over all experts and from the loss sums.

    logit, d_probability (tokens, X). Per token: top, the largest logit · inverse_total, 1 / sum exp(l - top) · common,
    sum dp p · inverse, 1 / sum of all sigmoids · d_z, dz times 2 z. d_probability, d_z: None for zeros. SOFTMAX:
    whether the softmax over all experts is needed.
    """
    grad = tl.zeros(logit.shape, dtype=tl.float32)
    if SOFTMAX:
        probability = tl.exp(logit - top[:, None]) * inverse_total[:, None]
    if MODE == "softmax" or d_probability is not None:
        difference = -common[:, None] if d_probability is None else d_probability - common[:, None]
        if MODE == "sigmoid":
            score = _sigmoid(logit)
            grad = difference * inverse[:, None] * (score * (1.0 - score))
        else:
            grad = probability * difference
    if d_z is not None:
        grad += d_z[:, None] * probability
    return grad


@triton.jit
def _own_grad(logit, d_score, taken, top, inverse_total, MODE: tl.constexpr, NORMALIZE: tl.constexpr):
    """(own, shared): the chosen logits' gradient from their own scores, and a sum; mode "softmax" multiplies it by each
    logit's probability and subtracts the product from the logit's gradient.

    logit, d_score (tokens, choices) are valid where ``taken``; top, inverse_total: as in `_dense_grad`.
    """
    if MODE == "late softmax":
        kept = _kept_softmax(logit, taken)
        shared = tl.sum(d_score * kept, axis=1)
        own = kept * (d_score - shared[:, None])
    else:
        if MODE == "softmax":
            kept = tl.where(taken, tl.exp(logit - top[:, None]) * inverse_total[:, None], 0.0)
        else:
            kept = tl.where(taken, _sigmoid(logit), 0.0)
        if NORMALIZE:
            inverse_kept = 1.0 / (tl.sum(kept, axis=1) + _EPSILON)
            mean = tl.sum(d_score * kept, axis=1) * inverse_kept
            d_score = (d_score - mean[:, None]) * inverse_kept[:, None]
        shared = tl.sum(d_score * kept, axis=1)
        own = kept * d_score if MODE == "softmax" else d_score * kept * (1.0 - kept)
    return own, shared


@triton.jit(do_not_specialize=["num_tokens"])
def select_grad_kernel(
    logits, expert_ids, token_mask, d_scores, d_probability_sums, d_z_sum, d_logits, num_tokens,
    NUM_EXPERTS: tl.constexpr, K: tl.constexpr, MODE: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """d_logits (T, E) from the gradients of scores (T, K), of the probabilities' sums (E,) and of the z sum ().

    ``p = softmax(l)``: ``dl = p * (dp - <dp, p>)``. ``p = u / (sum u + eps)``: ``du = (dp - <dp, p>) / (sum u + eps)``.
    ``u = sigmoid(l)``: ``dl = du * u * (1 - u)``.

    First all experts' entries are written: the part from sums over all experts, or zero unless DENSE. Then the chosen
    experts' entries are overwritten.
    """
    SOFTMAX: tl.constexpr = DENSE and (MODE != "sigmoid" or d_z_sum is not None)
    expert = tl.arange(0, COLUMNS)[None, :]
    valid = expert < NUM_EXPERTS
    first = tl.program_id(0) * BLOCK_T
    token = first + tl.arange(0, BLOCK_T)
    inside = token < num_tokens
    top = tl.zeros((BLOCK_T,), dtype=tl.float32)
    inverse_total, common, inverse = top, top, top
    d_probability = None
    d_z = None
    if DENSE:
        real, tile = _load_logits(logits, first, token_mask, num_tokens, expert, valid, NUM_EXPERTS, BLOCK_T)
    else:
        real = _are_real(first, token_mask, num_tokens, BLOCK_T)
    if SOFTMAX:
        top = tl.max(tile, axis=1)
        weight = tl.exp(tile - top[:, None])
        total = tl.sum(weight, axis=1)
        inverse_total = 1.0 / total
    if d_z_sum is not None:
        d_z = 2.0 * tl.load(d_z_sum) * (top + tl.log(total))
    if d_probability_sums is not None:
        everywhere = tl.broadcast_to(expert, (BLOCK_T, COLUMNS))  # loaded per token, to get the logits' layout
        d_probability = tl.load(d_probability_sums + everywhere, mask=valid, other=0.0)
        if MODE == "sigmoid":
            score = _sigmoid(tile)
            inverse = 1.0 / (tl.sum(score, axis=1) + _EPSILON)
            common = tl.sum(d_probability * score, axis=1) * inverse
        else:
            common = tl.sum(d_probability * weight, axis=1) * inverse_total

    if d_scores is not None:
        # Each token's K experts as (BLOCK_T, CHOICES), padded to a power of two.
        place = tl.arange(0, CHOICES)[None, :]
        taken = real[:, None] & (place < K)
        pair = token.to(tl.int64)[:, None] * K + place
        line = token.to(tl.int64)[:, None] * NUM_EXPERTS
        at = tl.load(expert_ids + pair, mask=taken, other=0)
        d_score = tl.load(d_scores + pair, mask=taken, other=0.0) * SCALE
        logit = tl.load(logits + line + at, mask=taken, other=0.0)
        own, shared = _own_grad(logit, d_score, taken, top, inverse_total, MODE, NORMALIZE)
        if MODE == "softmax":
            common += shared

    # A 64-bit offset to the block, 32-bit offsets within it.
    to = d_logits + first.to(tl.int64) * NUM_EXPERTS + tl.arange(0, BLOCK_T)[:, None] * NUM_EXPERTS + expert
    value = tl.zeros((BLOCK_T, COLUMNS), dtype=tl.float32)
    if DENSE:
        grad = _dense_grad(tile, d_probability, top, inverse_total, common, inverse, d_z, MODE, SOFTMAX)
        value = tl.where(real[:, None], grad, 0.0)
    tl.store(to, value, mask=inside[:, None] & valid)
    if d_scores is not None:
        if d_probability_sums is not None:
            d_probability = tl.load(d_probability_sums + at, mask=taken, other=0.0)
        if DENSE:
            own += _dense_grad(logit, d_probability, top, inverse_total, common, inverse, d_z, MODE, SOFTMAX)
        tl.debug_barrier()  # other threads have written to these places above
        tl.store(d_logits + line + at, own, mask=taken)
