"""Bytes that the layer keeps for its backward, and the most that it holds at once.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
h (R_max, w) · a (R_max, n) · y and dx_rows (R_max, d), of which a slice of columns exists at a time · o, dx (T, d)

Peaks count what the layer itself allocates, not what is alive anyway: x, the output's gradient, weights, scores, plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from tilemoe.config import FP8_BLOCK
from tilemoe.kernels.experts.slicing import fewest, widest
from tilemoe.shape import MoEShape

if TYPE_CHECKING:
    from torch import Tensor

    from tilemoe.activations import ActivationSpec
    from tilemoe.plan import RoutingPlan

_INDEX_BYTES = 4
_SCORE_BYTES = 4
_SHARE = 5 / 6  # of everything together: what slices bring a peak down to
_FLOPS_PER_BYTE = 200  # an H100's sustained bf16 products over its memory's bandwidth


def shape_of(like: Tensor, d: int, n: int, plan: RoutingPlan, spec: ActivationSpec, save: str = "full") -> MoEShape:
    """The sizes of one call in elements of ``like``; its rows are those that buffers have."""
    return MoEShape(
        num_tokens=plan.num_tokens,
        hidden_size=d,
        intermediate_size=n,
        num_experts=plan.num_experts,
        num_experts_per_tok=1,  # the rows say how many there are
        is_gated=spec.is_gated,
        element_bytes=like.element_size(),
        rows=plan.capacity,
        is_topk=plan.pair_start_of_token is None,
        save=save,
    )


def kept_h_bytes(shape: MoEShape) -> int:
    """h as it is kept: w elements a row, or with ``save="fp8"`` w bytes and a scale of 4 for each 128 of them."""
    if shape.save == "fp8":
        return shape.num_rows * (shape.width + 4 * shape.width // FP8_BLOCK)
    return shape.num_rows * shape.element_bytes * shape.width


def saved_bytes(shape: MoEShape) -> int:
    """Kept beside x and the weights: h, the fp32 scores and the plan's indices.

    ``4 R_max n + 16 R_max + O(E + T)`` for a gated 16-bit layer, ``2.0625 R_max n`` in place of the first term with
    ``save="fp8"``. The pairs are as many as the rows can be.
    """
    starts = shape.num_experts + 1 + (0 if shape.is_topk else shape.num_tokens + 1)
    per_row = _SCORE_BYTES + 3 * _INDEX_BYTES
    return kept_h_bytes(shape) + shape.num_rows * per_row + _INDEX_BYTES * starts


@lru_cache
def forward_slices(shape: MoEShape) -> Sequence[slice]:
    """Slices of d that y is made and combined in where h is kept: none for less than the backward holds anyway."""
    size = _Sizes(shape)
    return _output_slices(size, shape, size.kept_h, max(size.quantizing, backward_peak_bytes(shape)))


@lru_cache
def inference_slices(shape: MoEShape) -> Sequence[slice]:
    """Slices of d that y is made and combined in where h is not kept."""
    return _output_slices(_Sizes(shape), shape, 0, 0)


@lru_cache
def backward_slices(shape: MoEShape) -> Sequence[slice]:
    """Slices of d that dx_rows is made and combined in."""
    size = _Sizes(shape)
    everything = size.h + size.w1 + size.w2 + size.y + size.o
    limit = max(_SHARE * everything, *_peaks_of_other_steps(size))
    return fewest(shape, lambda slices: _input_grad_peak(size, slices), limit, _reread(size, shape, size.h))


def inference_peak_bytes(shape: MoEShape) -> int:
    """The most at once where nothing is differentiated."""
    return _output_peak(_Sizes(shape), 0, inference_slices(shape))


def forward_peak_bytes(shape: MoEShape) -> int:
    """The most at once in a forward that keeps h."""
    size = _Sizes(shape)
    return max(size.quantizing, _output_peak(size, size.kept_h, forward_slices(shape)))


def backward_peak_bytes(shape: MoEShape) -> int:
    """The most at once in a backward that gives every gradient, which are counted; h is freed after its one reader.

    What ``save="fp8"`` keeps is freed before that, as soon as it is h again.
    """
    size = _Sizes(shape)
    return size.s + max(_input_grad_peak(size, backward_slices(shape)), *_peaks_of_other_steps(size))


class _Sizes:
    """Bytes of each tensor, its gradient alike; ``column``: of one column of y.

    ``quantizing``: of a beside h and what is kept of h, while that is made.
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
    """Reading a GEMM's ``operand`` (R_max, n or w) once more, over the GEMM and combine in one slice, by a roofline."""
    flops = 2 * operand // shape.element_bytes * shape.hidden_size
    gemm = max(operand + size.y, flops / _FLOPS_PER_BYTE)
    return operand / max(gemm + size.y + size.o, 1)


def _output_peak(size: _Sizes, h: int, slices: Sequence[slice]) -> int:
    """a is needed until the last slice of y is made, and o exists from the first that is combined."""
    if len(slices) == 1:
        return h + size.y + max(size.a, size.o)
    return h + size.a + size.o + size.column * widest(slices)


def _input_grad_peak(size: _Sizes, slices: Sequence[slice]) -> int:
    """dx is made beside dw2, with dh still to be read by dw1."""
    return size.h + size.w2 + size.o + size.column * widest(slices)


def _peaks_of_other_steps(size: _Sizes) -> tuple[int, int, int]:
    """Of dh beside h and a_scaled, of dw2 from a_scaled, and of dw1, the last gradient, from dh."""
    dh, a_scaled = size.h, size.a
    return size.h + dh + a_scaled, dh + a_scaled + size.w2, dh + size.w2 + size.o + size.w1
