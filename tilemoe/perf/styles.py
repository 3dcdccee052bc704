"""What other designs of the layer compute, move and keep, beside ours: ScatterMoE's and PyTorch's grouped_mm's.

T tokens · d hidden_size · n intermediate_size · E experts · R routed rows · w = 2n gated, n not

Both keep y (R, d) for the scores' gradient, and grouped_mm the gathered input (R, d): the two tensors that grow with
finer experts and that tilemoe does without. Steps and what they keep follow ScatterMoE 0.3 (arXiv 2403.08245, its
`GLUMLP`) and two calls of `torch.nn.functional.grouped_mm` with compiled operations around them; each operand once.
Bytes of indices and scores are those recorded in results/layer.jsonl, which tests hold the sums to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from tilemoe.perf.costs import Cost
from tilemoe.shape import MoEShape

_OFFSET_BYTES = 8  # of an expert's end among the rows
_FP32 = 4


@dataclass(frozen=True)
class Style:
    """Steps of forward and backward in order, and bytes: kept for the backward, and the most at once in the forward."""

    forward: dict[str, Cost]
    backward: dict[str, Cost]
    saved_bytes: int
    forward_peak_bytes: int


class _Sizes:
    """Bytes of each tensor, its gradient alike; s: one number of fp32 and one index for each row."""

    def __init__(self, shape: MoEShape) -> None:
        size, rows, d = shape.element_bytes, shape.num_rows, shape.hidden_size
        self.x, self.y = size * shape.num_tokens * d, size * rows * d
        self.h, self.a = size * rows * shape.width, size * rows * shape.intermediate_size
        self.w1 = size * shape.num_experts * shape.width * d
        self.w2 = size * shape.num_experts * shape.intermediate_size * d
        self.s = 8 * rows
        self.offsets = _OFFSET_BYTES * shape.num_experts
        self.up, self.down = 2 * rows * d * shape.width, 2 * rows * d * shape.intermediate_size


def scattermoe(shape: MoEShape) -> Style:
    """Gathers inside the GEMMs' loads and scatters in their stores; the backward groups do and x into copies."""
    b = _Sizes(shape)
    silu = b.a if shape.is_gated else 0  # the gate's activation, kept beside a
    forward = {
        "up_proj": Cost(b.up, b.x + b.w1 + b.s, b.h),
        "activation": Cost(0, b.h + silu, silu + b.a),
        "down_proj": Cost(b.down, b.a + b.w2 + b.s, b.y),
        "combine": Cost(0, b.y + b.s, b.x),
    }
    backward = {
        "scores' gradient": Cost(0, b.y + b.x, b.s),
        "group do": Cost(0, b.x + b.s, b.y),
        "down_proj dgrad": Cost(b.down, b.y + b.w2, b.a),
        "down_proj wgrad": Cost(b.down, b.y + b.a, b.w2),
        "activation's gradient": Cost(0, b.a + b.h + silu, b.h),
        "group x": Cost(0, b.x + b.s, b.y),
        "up_proj dgrad": Cost(b.up, b.h + b.w1, b.y),
        "up_proj wgrad": Cost(b.up, b.y + b.h, b.w1),
        "sum dx": Cost(0, b.y, b.x),
    }
    saved = b.h + silu + b.a + b.y + 30 * shape.num_rows + b.offsets
    return Style(forward, backward, saved, saved + b.x)


def grouped_mm(shape: MoEShape) -> Style:
    """A copy of x in expert order, two grouped GEMMs, compiled operations between them, a sum in fp32."""
    b = _Sizes(shape)
    forward = {
        "gather x": Cost(0, b.x + b.s, b.y),
        "up_proj": Cost(b.up, b.y + b.w1, b.h),
        "activation": Cost(0, b.h, b.a),
        "down_proj": Cost(b.down, b.a + b.w2, b.y),
        "combine": Cost(0, b.y + b.s, b.x),
    }
    backward = {
        "scores' gradient, scatter do": Cost(0, b.y + b.x + b.s, b.y + b.s),
        "down_proj dgrad": Cost(b.down, b.y + b.w2, b.a),
        "down_proj wgrad": Cost(b.down, b.y + b.a, b.w2),
        "activation's gradient": Cost(0, b.a + b.h, b.h),
        "up_proj dgrad": Cost(b.up, b.h + b.w1, b.y),
        "up_proj wgrad": Cost(b.up, b.y + b.h, b.w1),
        "scatter dx": Cost(0, b.y + b.s, b.x),
    }
    saved = 2 * b.y + b.h + b.a + 32 * shape.num_rows + b.offsets
    in_fp32 = _FP32 * shape.num_tokens * shape.hidden_size
    return Style(forward, backward, saved, saved + in_fp32 + b.x)


STYLES: MappingProxyType[str, Callable[[MoEShape], Style]] = MappingProxyType(
    {"scattermoe": scattermoe, "grouped_mm": grouped_mm}
)
