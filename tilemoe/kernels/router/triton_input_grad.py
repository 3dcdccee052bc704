"""The router's input gradient, fused with the addition to the experts': ``out = dx + d_logits weight``.

T tokens · d hidden_size · E experts

A dense GEMM that loads all operands by TMA. Its time is that of reading dx and writing out once. One tile per CTA,
column tiles innermost.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilemoe.kernels.experts.triton.descriptors import can_describe_rows
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import ceil_div, launch_of, power_of_two

# Small enough for several CTAs per SM, since it is memory-bound (measured on an H200).
_BLOCK_M, _BLOCK_N = 128, 128
_LEAST_STEP, _LARGEST_STEP = 16, 64


def why_unsupported(d_logits: Tensor, weight: Tensor, dx: Tensor) -> str | None:
    """Why `input_grad` cannot take these operands, where d is a multiple of 8; None if it can."""
    return None if can_describe_rows(device_of(dx), d_logits, weight, dx) else "TMA does not reach the operands"


def input_grad(d_logits: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
    """``dx + d_logits weight``, (T, d), from d_logits (T, E), weight (E, d), dx (T, d), all of one 16-bit dtype.

    Sums are taken in fp32 and rounded once.
    """
    (num_tokens, num_experts), d = d_logits.shape, weight.shape[1]
    out = dx.new_empty(num_tokens, d)
    step = max(_LEAST_STEP, min(_LARGEST_STEP, power_of_two(num_experts)))
    column_tiles = ceil_div(d, _BLOCK_N)
    args = (
        TensorDescriptor.from_tensor(out, [_BLOCK_M, _BLOCK_N]),
        TensorDescriptor.from_tensor(dx, [_BLOCK_M, _BLOCK_N]),
        TensorDescriptor.from_tensor(d_logits, [_BLOCK_M, step]),
        TensorDescriptor.from_tensor(weight, [step, _BLOCK_N]),
        column_tiles,
    )
    constants = {"NUM_EXPERTS": num_experts, "BLOCK_M": _BLOCK_M, "BLOCK_N": _BLOCK_N, "BLOCK_K": step}
    grid = (ceil_div(num_tokens, _BLOCK_M) * column_tiles,)
    launch_of(input_grad_kernel, grid, args, constants, num_stages=2).run()
    return out


@triton.jit
def input_grad_kernel(
    out, dx, d_logits, weight, column_tiles,
    NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile per CTA; all operands are descriptors. Neighbouring CTAs have the same tokens and share d_logits."""
    token = (tl.program_id(0) // column_tiles) * BLOCK_M
    col = (tl.program_id(0) % column_tiles) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, NUM_EXPERTS, BLOCK_K):
        acc = tl.dot(d_logits.load([token, k]), weight.load([k, col]), acc)
    # dx is loaded after the mainloop: holding it meanwhile would cost more (occupancy) than this wait.
    acc += dx.load([token, col]).to(tl.float32)
    out.store([token, col], acc.to(out.dtype))
