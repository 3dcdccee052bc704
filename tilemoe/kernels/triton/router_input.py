"""The router's share of dx, added to the experts' in the product that makes it: one reading and one writing of dx,
where a product and then a sum take two of each.

T tokens · d hidden_size · E experts · BM tokens and BN columns of a tile · BK experts of a step
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.triton.launch import Launch, ceil_div, device_of, power_of_two

_BLOCK_M, _BLOCK_N = 128, 128
_MAX_STEP = 64


def input_grad(d_logits: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    """``dx + d_logits weight``, (T, d), from d_logits (T, E), weight (E, d), dx (T, d), all of one 16-bit dtype.

    Products and sums are taken in fp32 and rounded once.
    """
    device_of(dx)
    out = torch.empty_like(dx, memory_format=torch.contiguous_format)
    if out.numel():
        input_grad_launch(out, d_logits.contiguous(), weight.contiguous(), dx.contiguous()).run()
    return out


def input_grad_launch(out: Tensor, d_logits: Tensor, weight: Tensor, dx: Tensor) -> Launch:
    """The launch behind `input_grad`, for contiguous operands and at least one token."""
    num_tokens, num_experts = d_logits.shape
    d = weight.shape[1]
    return Launch(
        input_grad_kernel,
        (ceil_div(num_tokens, _BLOCK_M) * ceil_div(d, _BLOCK_N),),
        {"out": out, "d_logits": d_logits, "weight": weight, "dx": dx, "num_tokens": num_tokens, "d": d},
        {
            "NUM_EXPERTS": num_experts,
            "BLOCK_M": _BLOCK_M,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": max(16, min(_MAX_STEP, power_of_two(num_experts))),
        },
        num_warps=8,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def input_grad_kernel(
    out,
    d_logits,
    weight,
    dx,
    num_tokens,
    d,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile. The tiles of the same tokens are neighbours, so that d_logits are read from memory once."""
    column_tiles = tl.cdiv(d, BLOCK_N)
    token = (tl.program_id(0) // column_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_token, is_column = (token < num_tokens)[:, None], (col < d)[None, :]
    at = token.to(tl.int64)[:, None] * d + col[None, :]
    left = d_logits + token.to(tl.int64)[:, None] * NUM_EXPERTS
    so_far = tl.load(dx + at, mask=is_token & is_column, other=0.0)  # ahead of the products, which hide it
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, NUM_EXPERTS, BLOCK_K):
        expert = k + tl.arange(0, BLOCK_K)
        is_expert = expert < NUM_EXPERTS
        grads = tl.load(left + expert[None, :], mask=is_token & is_expert[None, :], other=0.0)
        rows = tl.load(weight + expert[:, None] * d + col[None, :], mask=is_expert[:, None] & is_column, other=0.0)
        acc = tl.dot(grads, rows, acc)
    tl.store(out + at, (acc + so_far.to(tl.float32)).to(out.dtype.element_ty), mask=is_token & is_column)
