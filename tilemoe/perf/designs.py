"""What other designs of the layer compute, move, keep and take, beside ours: ScatterMoE's and PyTorch's grouped_mm's.

T tokens · d hidden_size · n intermediate_size · E experts · R routed rows · w = 2n gated, n not

Both keep y (R, d) for the scores' gradient, and grouped_mm the gathered input (R, d): the two tensors that grow with
finer experts and that tilemoe does without. Bytes count each operand of each kernel once; of what is added atomically
into rows that no cache holds, each addition reads and writes. What is kept, and both peaks, are those recorded in
results/layer.jsonl, which tests hold the sums to.

A step's time is `predict`'s: launch + max(F / f + B / b, roofline). ScatterMoE's f and b are fitted by
benchmarks/fit_planner.py to its recorded layers, since its kernels were never timed one by one. grouped_mm has one
recorded layer, too few to fit: its products take the rates of our own, which the same power limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from tilemoe.perf.costs import Cost
from tilemoe.perf.hardware import Gpu
from tilemoe.perf.padding import padded_rows
from tilemoe.perf.predict import LAUNCH_MS, RATES, Rate, rate_on
from tilemoe.shape import MoEShape

_OFFSET_BYTES = 8  # of an expert's end among the rows
_FP32 = 4
_MOST_BYTES = 1 << 31  # of a tensor that PyTorch sums with 32-bit offsets
_TILE = 128  # rows of ScatterMoE's tiles; of grouped_mm's on Hopper, where experts have more on average
_SMALL_TILE = 64
# Rows that a weight gradient's contraction of each expert is rounded up to.
_SCATTERMOE_UNIT, _GROUPED_MM_UNIT = 32, 64
# Of ScatterMoE, as benchmarks/fit_planner.py prints them: its Triton GEMMs, its sums over K as batched products of
# one row each, and milliseconds of the forward in which the host waits for the experts' counts.
SCATTERMOE_RATES = MappingProxyType({"products": Rate(527.5, 6.901), "sums": Rate(math.inf, 1.214)})
SCATTERMOE_WAIT_MS = 0.9037
_PASSES = RATES["combine"]


@dataclass(frozen=True)
class Step:
    """A kernel: its cost, the FLOPs that its tiles compute, the rates that its time is from, and what it waits besides.

    ``flops`` None: the cost's own.
    """

    cost: Cost
    rate: Rate = _PASSES
    flops: float | None = None
    wait_ms: float = 0.0

    def predicted_ms(self, gpu: Gpu, dtype: str) -> float:
        flops = self.cost.flops if self.flops is None else self.flops
        taken = rate_on(self.rate, gpu, dtype).milliseconds(flops / 1e9, self.cost.bytes / 1e9)
        return LAUNCH_MS + self.wait_ms + max(taken, self.cost.roofline_ms(gpu.ceilings(dtype)))


@dataclass(frozen=True)
class Design:
    """Steps of forward and backward in order; bytes kept for the backward and the most at once in either, all gradients
    counted; rows of a tile of the products, and those computed beyond R, over R.
    """

    forward: dict[str, Step]
    backward: dict[str, Step]
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    tile_rows: int
    padding_waste: float


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
        self.in_fp32 = _FP32 * shape.num_tokens * d
        self.up, self.down = 2 * rows * d * shape.width, 2 * rows * d * shape.intermediate_size


def scattermoe(shape: MoEShape) -> Design:
    """Gathers inside the GEMMs' loads and scatters in their stores; the backward groups do and x into copies.

    The steps of ScatterMoE 0.3's ``GLUMLP`` (arXiv 2403.08245; github.com/shawntan/scattermoe) with plain PyTorch
    between its kernels: y (R, d) in the order of tokens, ``o_t = s_t y_t`` and ``ds_t = y_t do_t`` as batched products,
    gate and up as two tensors, weight gradients written over zeros. Its tiles are of sorted rows, whosever they are: a
    border between experts within one has it computed twice, 127 rows in 128 for each of E - 1.
    """
    b = _Sizes(shape)
    padded = (_TILE - 1) * (shape.num_experts - 1) / shape.num_rows if shape.num_rows else 0.0
    in_wgrad = padded_rows(shape, _SCATTERMOE_UNIT) / shape.num_rows if shape.num_rows else 0.0
    products, sums = SCATTERMOE_RATES["products"], SCATTERMOE_RATES["sums"]

    def rows(flops: int, read: int, written: int) -> Step:
        return Step(Cost(flops, read, written), products, flops * (1 + padded))

    def wgrad(flops: int, read: int, written: int) -> Step:
        return Step(Cost(flops, read, 2 * written), products, flops * in_wgrad)

    silu = b.a if shape.is_gated else 0  # the gate's activation, kept beside a
    forward = {
        "sort and count": Step(Cost(0, b.s, b.s), wait_ms=SCATTERMOE_WAIT_MS),
        "up_proj": rows(b.up, b.x + b.w1 + b.s, b.h),
        "activation": Step(Cost(0, b.h + silu, silu + b.a)),
        "down_proj": rows(b.down, b.a + b.w2 + b.s, b.y),
        "combine": Step(Cost(0, b.y + b.s, b.x), sums),
    }
    gate_and_up = {
        "product's gradient": Step(Cost(0, 2 * b.a + b.h // 2 + silu, 2 * b.a)),
        "activation's gradient": Step(Cost(0, 2 * b.a, b.a)),
        "join gate and up": Step(Cost(0, b.h, b.h)),
    }
    backward = {
        "scores' gradient": Step(Cost(0, b.y + b.x, b.s), sums),
        "group do": Step(Cost(0, b.x + b.s, b.y)),
        "down_proj wgrad": wgrad(b.down, b.y + b.a, b.w2),
        "down_proj dgrad": rows(b.down, b.y + b.w2, b.a),
        **(gate_and_up if shape.is_gated else {"activation's gradient": Step(Cost(0, b.a + b.h, b.h))}),
        "group x": Step(Cost(0, b.x + b.s, b.y)),
        "up_proj wgrad": wgrad(b.up, b.y + b.h, b.w1),
        "up_proj dgrad": rows(b.up, b.h + b.w1, b.y),
        "sum dx": Step(Cost(0, b.y, b.x)),
    }
    kept = 30 * shape.num_rows + b.offsets  # indices and scores
    saved = b.h + silu + b.a + b.y + kept
    summing = b.in_fp32 if b.y > _MOST_BYTES else 0  # what PyTorch sums in where its offsets have 64 bits
    peak = max(
        saved + b.w2 + b.a + shape.element_bytes * shape.num_rows,  # da beside dw2 and the scores' gradient
        saved - b.y + b.w2 + (2 * b.a if shape.is_gated else b.h),  # both factors' gradients beside da, y freed
        kept + b.w2 + b.h + b.y + b.w1 + b.x + summing,  # dx and dw1 beside dx's rows, which took the place of x's
    )
    return Design(forward, backward, saved, saved + b.x, peak, _TILE, padded)


def grouped_mm(shape: MoEShape) -> Design:
    """A copy of x in expert order, two grouped GEMMs, compiled operations between them, a sum in fp32.

    ``tilemoe.bench.peers.grouped_mm_experts``: two calls of ``torch.nn.functional.grouped_mm``, whose Hopper kernel has
    tiles of 128 x 256 (ATen's GroupMM.cu: 64 x 128 where experts have 128 rows or fewer on average), under
    torch.compile, which fuses what is between them and adds o and dx by atomics, o in fp32. Indices in the order of
    experts. Of the backward peak: what is kept, dy and ds; or all of the last steps, dgrad before wgrad.
    """
    b, d, w = _Sizes(shape), shape.hidden_size, shape.width
    n, experts = shape.intermediate_size, shape.num_experts
    tile = _SMALL_TILE if shape.num_rows <= _TILE * experts else _TILE
    padded = padded_rows(shape, tile) / shape.num_rows if shape.num_rows else 1.0
    in_wgrad = padded_rows(shape, _GROUPED_MM_UNIT) / shape.num_rows if shape.num_rows else 1.0

    def rows(flops: int, columns: int, read: int, written: int) -> Step:
        return Step(Cost(flops, read, written), RATES["rows"], flops * padded * _fill(columns, 2 * tile))

    def wgrad(flops: int, columns: int, read: int, written: int) -> Step:
        computed = flops * in_wgrad * _fill(d, _TILE) * _fill(columns, 2 * _TILE)
        return Step(Cost(flops, read, written), RATES["wgrad"], computed)

    rows_in_fp32 = _FP32 * shape.num_rows * d
    forward = {
        "sort": Step(Cost(0, b.s, b.s)),
        "gather x": Step(Cost(0, b.x + b.s, b.y)),
        "up_proj": rows(b.up, w, b.y + b.w1, b.h),
        "activation": Step(Cost(0, b.h, b.a)),
        "down_proj": rows(b.down, d, b.a + b.w2, b.y),
        "combine": Step(Cost(0, b.y + b.s + rows_in_fp32, rows_in_fp32 + b.in_fp32)),
        "o from fp32": Step(Cost(0, b.in_fp32, b.x)),
    }
    backward = {
        "scores' gradient, scatter do": Step(Cost(0, b.y + b.x + b.s, b.y + b.s)),
        "down_proj dgrad": rows(b.down, n, b.y + b.w2, b.a),
        "down_proj wgrad": wgrad(b.down, n, b.y + b.a, b.w2),
        "activation's gradient": Step(Cost(0, b.a + b.h, b.h)),
        "up_proj dgrad": rows(b.up, d, b.h + b.w1, b.y),
        "up_proj wgrad": wgrad(b.up, w, b.y + b.h, b.w1),
        "scatter dx": Step(Cost(0, 2 * b.y + b.s, b.y + b.x)),
    }
    kept = 32 * shape.num_rows + b.offsets  # indices and scores
    saved = 2 * b.y + b.h + b.a + kept
    ds = _FP32 * shape.num_rows
    peak = ds + max(
        saved + b.y,  # dy beside what is kept
        saved + b.a + b.w2,  # da and dw2 beside dy, y freed
        saved - b.y + b.h + b.w2,  # dh beside h and da
        saved - b.a + b.w1 + b.w2,  # dx's rows and dw1 beside dh and x's rows
    )
    return Design(forward, backward, saved, saved + b.in_fp32 + b.x, peak, tile, padded - 1)


def _fill(columns: int, tile: int) -> float:
    """Columns that tiles compute, over those there are."""
    return math.ceil(columns / tile) * tile / columns


DESIGNS: MappingProxyType[str, Callable[[MoEShape], Design]] = MappingProxyType(
    {"scattermoe": scattermoe, "grouped_mm": grouped_mm}
)
