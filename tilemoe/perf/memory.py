"""Bytes that the layer keeps for its backward, and the most that it holds at once.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated

Peaks count what the layer itself allocates: not x, the output's gradient, the weights, the scores and the plan, which
are alive anyway. Allocators round up; kernels that split a sum over programs hold its parts for a moment. Not counted.
"""

from __future__ import annotations

from tilemoe.perf.shape import MoEShape

_INDEX_BYTES = 4
_SCORE_BYTES = 4


def saved_bytes(shape: MoEShape) -> int:
    """Kept beside x and the weights: h, the fp32 scores and the plan's indices.

    ``4 R_max n + 16 R_max + O(E + T)`` for a gated 16-bit layer. The pairs are as many as the rows can be.
    """
    starts = shape.num_experts + 1 + (0 if shape.is_topk else shape.num_tokens + 1)
    per_row = shape.element_bytes * shape.width + _SCORE_BYTES + 3 * _INDEX_BYTES
    return shape.num_rows * per_row + _INDEX_BYTES * starts


def inference_peak_bytes(shape: MoEShape) -> int:
    """The most at once where nothing is differentiated: a beside y, or y beside the output."""
    size = _sizes(shape)
    return size["y"] + max(size["a"], size["o"])


def forward_peak_bytes(shape: MoEShape) -> int:
    """The most at once in a forward that keeps h."""
    return _sizes(shape)["h"] + inference_peak_bytes(shape)


def backward_peak_bytes(shape: MoEShape) -> int:
    """The most at once in a backward that gives every gradient, which are counted; h is freed after its one reader."""
    size = _sizes(shape)
    dh, a_scaled, ds = size["h"], size["a"], size["s"]
    gradients = size["w1"] + size["w2"]
    return ds + max(
        size["h"] + dh + a_scaled,
        dh + a_scaled + size["w2"],
        dh + gradients + size["y"] + size["o"],
    )


def _sizes(shape: MoEShape) -> dict[str, int]:
    rows, tokens, size = shape.num_rows, shape.num_tokens, shape.element_bytes
    d, n, w, experts = shape.hidden_size, shape.intermediate_size, shape.width, shape.num_experts
    return {
        "h": size * rows * w,
        "a": size * rows * n,
        "y": size * rows * d,
        "o": size * tokens * d,
        "s": _SCORE_BYTES * rows,
        "w1": size * experts * w * d,
        "w2": size * experts * d * n,
    }
