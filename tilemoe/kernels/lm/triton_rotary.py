"""Rotary position embedding, forward and backward: ``(x1 cos - x2 sin, x2 cos + x1 sin)`` for a head's halves x1, x2.

B sequences · S tokens · H heads · D head width

Memory-bound: each query or key is read once and written once, 16 bytes at a time. A CTA has some heads of one token.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import ceil_div, launch_of, power_of_two

_ELEMENTS = 2048  # most elements per CTA, unless a single head has more


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *, back: bool) -> Tensor:
    """x (B, S, H, D) rotated by the angles with these cos and sin (S, 1, D/2): (B, S, H, D), contiguous.

    back: rotate by the negative angles, which is the backward. Computed in the dtype of cos and sin, fp32, and rounded
    once to ``dtype``.
    """
    device_of(x)
    batch, length, heads, width = x.shape
    assert cos.shape == sin.shape == (length, 1, width // 2), "an angle for each position and pair"
    assert cos.is_contiguous(), "the kernel indexes them by position"
    assert sin.is_contiguous(), "the kernel indexes them by position"
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel():
        x = x if x.stride(3) == 1 else x.contiguous()
        columns = power_of_two(width // 2)
        block = min(power_of_two(heads), max(1, _ELEMENTS // (2 * columns)))
        args = (out, x, cos, sin, length, heads, *x.stride()[:3])
        constants = {"HALF": width // 2, "BACK": back, "BLOCK_H": block, "COLUMNS": columns}
        num_warps = max(1, min(4, block * columns // 256))
        launch_of(rotate_kernel, (batch * length * ceil_div(heads, block),), args, constants, num_warps).run()
    return out


@triton.jit
def rotate_kernel(
    out, x, cos, sin, length, heads, stride_batch, stride_token, stride_head,
    HALF: tl.constexpr, BACK: tl.constexpr, BLOCK_H: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token per CTA."""
    blocks = tl.cdiv(heads, BLOCK_H)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    col = tl.arange(0, COLUMNS)[None, :]
    position = token % length
    c = tl.load(cos + position * HALF + col, mask=col < HALF, other=0.0)
    s = tl.load(sin + position * HALF + col, mask=col < HALF, other=0.0)
    if BACK:
        s = -s
    inside = (head < heads) & (col < HALF)
    given = x + (token // length) * stride_batch + position * stride_token + head.to(tl.int64) * stride_head + col
    first = tl.load(given, mask=inside, other=0.0).to(c.dtype)
    second = tl.load(given + HALF, mask=inside, other=0.0).to(c.dtype)
    turned = out + (token * heads + head) * (2 * HALF) + col
    tl.store(turned, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(turned + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
