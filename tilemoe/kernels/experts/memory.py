"""Memory model of the layer: bytes saved for the backward, peaks of forward and backward, and the slices of d.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
h (R_max, w) · a (R_max, n) · y and dx_rows (R_max, d), of which a slice of columns exists at a time · o, dx (T, d)

Peaks count the layer's own allocations, not the caller's tensors: x, the output's gradient, weights, scores, plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tilemoe.config import FP8_BLOCK
from tilemoe.kernels.experts.slicing import fewest, widest
from tilemoe.shape import MoEShape

_INDEX_BYTES = 4
_SCORE_BYTES = 4
_SHARE = 5 / 6  # slicing brings a peak down to this share of all its tensors together
_FLOPS_PER_BYTE = 200  # an H100's sustained bf16 FLOP/s over its memory bandwidth


def kept_h_bytes(shape: MoEShape) -> int:
    """Bytes of the saved h: w elements per row, or with ``save="fp8"`` w bytes and 4 more for each 128 of them."""
    if shape.save == "fp8":
        return shape.num_rows * (shape.width + 4 * shape.width // FP8_BLOCK)
    return shape.num_rows * shape.element_bytes * shape.width


def saved_bytes(shape: MoEShape) -> int:
    """Bytes saved for the backward besides x and the weights: h, the fp32 scores and the plan's indices.

    ``4 R_max n + 16 R_max + O(E + T)`` for a gated 16-bit layer; with ``save="fp8"`` the first term is
    ``2.0625 R_max n``. The number of pairs is assumed to be R_max.
    """
    starts = shape.num_experts + 1 + (0 if shape.is_topk else shape.num_tokens + 1)
    per_row = _SCORE_BYTES + 3 * _INDEX_BYTES
    return kept_h_bytes(shape) + shape.num_rows * per_row + _INDEX_BYTES * starts


@lru_cache
def forward_slices(shape: MoEShape) -> Sequence[slice]:
    """Slices of d for y in a forward that keeps h; the peak need not be lower than the backward's."""
    size = _Sizes(shape)
    return _output_slices(size, shape, size.kept_h, max(size.quantizing, backward_peak_bytes(shape)))


@lru_cache
def inference_slices(shape: MoEShape) -> Sequence[slice]:
    """Slices of d for y in a forward that does not keep h."""
    return _output_slices(_Sizes(shape), shape, 0, 0)


@lru_cache
def backward_slices(shape: MoEShape) -> Sequence[slice]:
    """Slices of d for dx_rows in a backward."""
    size = _Sizes(shape)
    everything = size.h + size.w1 + size.w2 + size.y + size.o
    limit = max(_SHARE * everything, *_peaks_of_other_steps(size))
    return fewest(shape, lambda slices: _input_grad_peak(size, slices), limit, _reread(size, shape, size.h))


def inference_peak_bytes(shape: MoEShape) -> int:
    """Peak bytes of a forward for inference."""
    return _output_peak(_Sizes(shape), 0, inference_slices(shape))


def forward_peak_bytes(shape: MoEShape) -> int:
    """Peak bytes of a forward that keeps h."""
    size = _Sizes(shape)
    return max(size.quantizing, _output_peak(size, size.kept_h, forward_slices(shape)))


def backward_peak_bytes(shape: MoEShape) -> int:
    """Peak bytes of a backward that computes every gradient; the gradients are counted.

    h is freed once down_proj_dgrad has read it; with ``save="fp8"`` the saved h is freed once it is dequantised.
    """
    size = _Sizes(shape)
    return size.s + max(_input_grad_peak(size, backward_slices(shape)), *_peaks_of_other_steps(size))


class _Sizes:
    """Bytes of each tensor, and so of its gradient. ``column``: one column of y.

    ``quantizing``: a, h and the quantised h, which exist together while h is quantised.
    """

    def __init__(self, shape: MoEShape) -> None:
        d, n, w, size = shape.hidden_size, shape.intermediate_size, shape.width, shape.element_bytes
        self.column = size * shape.num_rows
        self.h, self.a, self.y = self.column * w, self.column * n, self.column * d
        self.kept_h = kept_h_bytes(shape)
        self.quantizing = self.a + self.h + self.kept_h if shape.save == "fp8" else 0
        self.o = size * shape.num_tokens * d
        self.s = _SCORE_BYTES * shape.num_rows
        self.w1, self.w2 = size * shape.num_experts * w * d, size * shape.num_experts * d * n


def _output_slices(size: _Sizes, shape: MoEShape, h: int, other_peaks: int) -> Sequence[slice]:
    limit = max(_SHARE * (h + size.a + size.y + size.o), other_peaks)
    return fewest(shape, lambda slices: _output_peak(size, h, slices), limit, _reread(size, shape, size.a))


def _reread(size: _Sizes, shape: MoEShape, operand: int) -> float:
    """Relative cost of one more slice, by a roofline: the time to read the GEMM's ``operand`` (R_max, n or w) again,
    divided by the time of the GEMM and combine in one slice.
    """
    flops = 2 * operand // shape.element_bytes * shape.hidden_size
    gemm = max(operand + size.y, flops / _FLOPS_PER_BYTE)
    return operand / max(gemm + size.y + size.o, 1)


def _output_peak(size: _Sizes, h: int, slices: Sequence[slice]) -> int:
    """Peak of down_proj and combine: a lives until the last slice of y is computed; o is allocated when the first one
    is combined."""
    if len(slices) == 1:
        return h + size.y + max(size.a, size.o)
    return h + size.a + size.o + size.column * widest(slices)


def _input_grad_peak(size: _Sizes, slices: Sequence[slice]) -> int:
    """Peak of up_proj_dgrad and combine_grad: dx is made while dw2 exists and up_proj_wgrad has yet to read dh."""
    return size.h + size.w2 + size.o + size.column * widest(slices)


def _peaks_of_other_steps(size: _Sizes) -> tuple[int, int, int]:
    """Peaks of down_proj_dgrad (h, dh, a_scaled), of down_proj_wgrad (dh, a_scaled, dw2) and of up_proj_wgrad, which
    runs last (dh and all gradients)."""
    dh, a_scaled = size.h, size.a
    return size.h + dh + a_scaled, dh + a_scaled + size.w2, dh + size.w2 + size.o + size.w1
