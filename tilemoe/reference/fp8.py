"""One expert's products with FP8 operands, block by block: the definition of ``precision="fp8"`` and ``save="fp8"``.

R rows · d hidden_size · n intermediate_size · w = 2n gated, n ungated

A block's scale is its largest magnitude / 448 in fp32, or 1 for a block of zeros. A value becomes the e4m3 number
nearest to value * (1 / scale), ties to even, times the scale. Sums are in fp32. If a product contracts d or w (``h``,
``da'``, ``dx``), a block is one row of x, do or dh, or the line of a weight that makes one column of the product. If it
contracts n (``y``), blocks are 1 x 128 of a and 128 x 128 of w2. ``save="fp8"`` stores h in blocks of 1 x 128.
Weight gradients contract the expert's rows: see `weight_grad`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK, _LARGEST = 128, 448.0
_WIDE = (1024, 2048 * 2048)  # a weight gradient's operands are rounded if its sides and elements are at least these


def rounded(values: Tensor, rows: int, columns: int) -> Tensor:
    """``values`` (R, p), fp32, rounded to FP8, with one scale for each block of ``rows`` x ``columns``."""
    out = torch.empty_like(values)
    for row in range(0, values.shape[0], rows):
        for column in range(0, values.shape[1], columns):
            place = (slice(row, row + rows), slice(column, column + columns))
            scale = scale_of(values[place])
            out[place] = _e4m3(values[place] * (1 / scale)) * scale
    return out


def scale_of(block: Tensor) -> Tensor:
    """The one scale of ``block``."""
    largest = block.abs().max()
    scale = largest / _LARGEST if largest != 0 else torch.ones_like(largest)
    return torch.maximum(scale, torch.full_like(scale, torch.finfo(torch.float32).tiny))


def product_by_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows weight^T`` (R, out) of rows (R, in) and weight (out, in), rounded with one scale per row."""
    width = rows.shape[1]
    return rounded(rows, 1, width) @ rounded(weight, 1, width).T


def weight_grad(by_token: Tensor, by_row: Tensor) -> Tensor:
    """``by_token^T by_row`` (d, q), for by_token x or do (R, d) and by_row dh or a (R, q); rounded only in wide layers.

    Each row of by_token is divided by its scale and rounded. The same row of by_row is multiplied by that scale; then
    all of by_row is rounded with one scale.
    """
    sides = by_token.shape[1], by_row.shape[1]
    if by_token.shape[0] == 0 or min(sides) < _WIDE[0] or sides[0] * sides[1] < _WIDE[1]:
        return by_token.T @ by_row
    scales = torch.stack([scale_of(row) for row in by_token]).unsqueeze(1)
    return _e4m3(by_token * (1 / scales)).T @ rounded(by_row * scales, *by_row.shape)


def _e4m3(values: Tensor) -> Tensor:
    """The nearest e4m3 numbers (4 exponent bits, 3 mantissa bits), ties to even, clamped to +-448; NaN stays."""
    exponent = torch.frexp(values)[1].clamp(min=-5)  # values: [0.5, 1) x 2^exponent; subnormals: fixed spacing
    spacing = torch.ldexp(torch.ones_like(values), exponent - 4)
    nearest = torch.round(values / spacing) * spacing  # torch.round: ties to even
    return nearest.clamp(-_LARGEST, _LARGEST)


class _UpProj(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor) -> Tensor:
        ctx.save_for_backward(x, w1)
        return product_by_rows(x, w1)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
        x, w1 = ctx.saved_tensors
        return product_by_rows(dh, w1.T), weight_grad(x, dh).T


class _DownProj(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, w2: Tensor, score: Tensor) -> Tensor:
        ctx.save_for_backward(a, w2, score)
        return score * (rounded(a, 1, _BLOCK) @ rounded(w2, _BLOCK, _BLOCK).T)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, w2, score = ctx.saved_tensors
        da_unscaled = product_by_rows(do, w2.T)
        ds = (da_unscaled * a).sum(1, keepdim=True).to(score.dtype)
        return score * da_unscaled, weight_grad(do, score * a), ds


def up_proj(x: Tensor, w1: Tensor) -> Tensor:
    """``h = x w1^T`` (R, w), fp32, of one expert, with x (R, d) and w1 (w, d) rounded.

    Backward: ``dx = dh w1`` with dh and w1 rounded; ``dw1 = dh^T x`` by `weight_grad`.
    """
    return _UpProj.apply(x, w1)


def down_proj(a: Tensor, w2: Tensor, score: Tensor) -> Tensor:
    """``score a w2^T`` (R, d), fp32, of one expert, with a (R, n) and w2 (d, n) rounded; score (R, 1).

    Backward: ``da' = do w2`` with do and w2 rounded; ``da = score da'``, ``dscore = <da', a>``, and by
    `weight_grad` ``dw2 = do^T (score a)``.
    """
    return _DownProj.apply(a, w2, score)


class _WithGradientsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def kept(h: Tensor) -> Tensor:
    """h (R, w), fp32, as ``save="fp8"`` keeps it for the backward; the gradient passes unchanged to h."""
    return with_gradients_of(rounded(h.detach(), 1, _BLOCK), h)


def with_gradients_of(value: Tensor, other: Tensor) -> Tensor:
    """``value``, whose gradient goes to ``other``."""
    return _WithGradientsOf.apply(value, other)
