"""combine and combine_grad: ``out_t = sum over t's rows r of s_r rows_r``; combine_grad has no scores.

T tokens · P pairs · R_max static row capacity · BLOCK_D columns of a CTA

Memory-bound: rows are read once, gathered by token, and outputs are written once. A CTA sums BLOCK_D columns of one
token, with several of its rows in flight. There are no atomics, and the order of summation is fixed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import ceil_div, launch_of, power_of_two

_MAX_UNROLL = 16  # most rows of a token in flight
_UNROLL_OF_PAIRS = 4  # rows in flight if the number of rows differs between tokens
_BYTES_OF_CTA = 1024  # bytes of a row per CTA: the largest block that divides every slice of a wide row
_BYTES_OF_THREAD = 32  # bytes of a row per thread: two 16-byte loads, 5 to 8% faster than one at 4.3 TB/s on an H200


def combine(rows: Tensor, s: Tensor | None, plan: RoutingPlan, out: Tensor) -> None:
    """combine, or without s combine_grad: writes to out (T, c) the sum of each token's rows (R_max, c), times their
    scores if there are any; 0 for a token without rows.

    s (P) has any float dtype and the caller's order. Sums are taken in fp32, or in fp64 if s is fp64, in the order of
    the token's pairs. ``out`` and ``rows`` may be column slices of wider tensors: any row stride, columns contiguous.
    """
    assert out.shape == (plan.num_tokens, rows.shape[1]), "one output row for each token"
    device_of(rows)
    if plan.capacity == 0:
        out.zero_()
    if plan.capacity == 0 or out.numel() == 0:
        return
    assert rows.stride(1) == 1, "columns are contiguous"
    assert out.stride(1) == 1, "columns are contiguous"
    width = rows.shape[1]
    # The block is chosen for the full width (the row stride), so that column slices and whole rows share one binary.
    full_width = max(width, out.stride(0))
    block = min(_BYTES_OF_CTA // rows.element_size(), max(32, power_of_two(full_width)))
    pairs_per_token = 0 if plan.pair_start_of_token is not None else plan.num_pairs // plan.num_tokens
    indices = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token)
    args = (out, rows, s, *indices, width, out.stride(0), rows.stride(0))
    constants = {
        "HAS_SCORES": s is not None,
        "ACCUMULATED_IN": tl.float64 if s is not None and s.dtype == torch.float64 else tl.float32,
        "PAIRS_PER_TOKEN": pairs_per_token,
        "UNROLL": _unroll(pairs_per_token),
        "BLOCK_D": block,
    }
    num_warps = max(1, block * rows.element_size() // (_BYTES_OF_THREAD * 32))
    launch_of(combine_kernel, (plan.num_tokens * ceil_div(width, block),), args, constants, num_warps).run()


def _unroll(pairs_per_token: int) -> int:
    """Number of rows in flight: all of a token's rows, or if they exceed the limit, an equal part of them."""
    if pairs_per_token == 0:
        return _UNROLL_OF_PAIRS
    return ceil_div(pairs_per_token, ceil_div(pairs_per_token, _MAX_UNROLL))


@triton.jit
def combine_kernel(
    out,
    rows,
    s,
    row_of_pair,
    pair_of_row,
    pair_start_of_token,
    width,
    stride_out,
    stride_row,
    HAS_SCORES: tl.constexpr,
    ACCUMULATED_IN: tl.constexpr,
    PAIRS_PER_TOKEN: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token and BLOCK_D columns per CTA. PAIRS_PER_TOKEN 0: it varies by token, see pair_start_of_token (T + 1)."""
    # Columns innermost: the CTAs of one token are neighbours and read its whole rows at about the same time.
    blocks = tl.cdiv(width, BLOCK_D)
    token = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = col < width
    if PAIRS_PER_TOKEN > 0:
        first = token * PAIRS_PER_TOKEN
        count = PAIRS_PER_TOKEN
    else:
        first = tl.load(pair_start_of_token + token)
        count = tl.load(pair_start_of_token + token + 1) - first
    acc = tl.zeros((BLOCK_D,), dtype=ACCUMULATED_IN)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            pair = first + start + i
            row = tl.load(row_of_pair + pair, mask=start + i < count, other=-1)
            # Nothing is read for a skipped pair: its score, and any row read in its place, may be NaN.
            value = tl.load(rows + row.to(tl.int64) * stride_row + col, mask=inside & (row >= 0), other=0.0)
            if HAS_SCORES:
                position = pair
                if PAIRS_PER_TOKEN == 0:
                    position = tl.load(pair_of_row + row, mask=row >= 0, other=0)
                score = tl.load(s + position, mask=row >= 0, other=0.0)
                acc += value.to(acc.dtype) * score.to(acc.dtype)
            else:
                acc += value.to(acc.dtype)
    tl.store(out + token.to(tl.int64) * stride_out + col, acc.to(out.dtype.element_ty), mask=inside)
