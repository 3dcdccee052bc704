"""FLOPs, bytes, memory and time of two other designs of the layer: ScatterMoE's and PyTorch's grouped_mm's.

T tokens · d hidden_size · n intermediate_size · E experts · R routed rows · w = 2n gated, n not

Both keep y (R, d) for the scores' gradient, and grouped_mm also keeps the gathered input (R, d): the two tensors that
grow with finer experts and that tilemoe does not store. Bytes count each operand of each kernel once; an atomic add to
rows that no cache holds counts one read and one write per addition. Tests compare the saved bytes and both peaks with
those recorded in results/layer.jsonl.

A step's time is `predict`'s: launch + max(F / f + B / b, roofline). benchmarks/fit_planner.py fits ScatterMoE's f and b
to its recorded layers, since its kernels were never timed one by one. grouped_mm has one recorded layer, too few to
fit: its products use our own rates, since the same power limit applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from tilemoe.perf.costs import Cost, padded_rows
from tilemoe.perf.hardware import Gpu
from tilemoe.perf.predict import LAUNCH_MS, RATES, Rate, rate_on
from tilemoe.shape import MoEShape

_OFFSET_BYTES = 8  # per expert: where its rows end
_FP32 = 4
_MOST_BYTES = 1 << 31  # largest tensor that PyTorch sums with 32-bit offsets
_TILE = 128  # rows of ScatterMoE's tiles, and of grouped_mm's on Hopper if experts have more rows on average
_SMALL_TILE = 64
# Each expert's contraction in a weight gradient is rounded up to a multiple of these rows.
_SCATTERMOE_UNIT, _GROUPED_MM_UNIT = 32, 64
# ScatterMoE's constants, as benchmarks/fit_planner.py prints them: rates of its Triton GEMMs and of its sums over K (as
# batched products of one row each), and milliseconds that its forward waits on the host for the experts' counts.
SCATTERMOE_RATES = MappingProxyType({"products": Rate(527.5, 6.901), "sums": Rate(math.inf, 1.214)})
SCATTERMOE_WAIT_MS = 0.9037
_PASSES = RATES["combine"]


@dataclass(frozen=True)
class Step:
    """A kernel: its cost, its rates, the FLOPs that its tiles compute, and its additional waiting time.

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
    """The steps of forward and backward in order; bytes saved for backward; peak bytes of forward and of backward,
    gradients included; rows of a GEMM tile; and the rows computed beyond R, divided by R.
    """

    forward: dict[str, Step]
    backward: dict[str, Step]
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    tile_rows: int
    padding_waste: float


class _Sizes:
    """Bytes of each tensor; its gradient has as many. s: one fp32 number and one index per row."""

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
    """ScatterMoE: gathers in the GEMMs' loads, scatters in their stores; the backward copies do and x in expert order.

    The steps of ScatterMoE 0.3's ``GLUMLP`` (arXiv 2403.08245; github.com/shawntan/scattermoe) with plain PyTorch
    between its kernels: y (R, d) in the order of tokens, ``o_t = s_t y_t`` and ``ds_t = y_t do_t`` as batched products,
    gate and up as two tensors, weight gradients written over zeros. Its tiles are cut from all experts' sorted rows:
    a tile that two experts share is computed twice. Each of the E - 1 borders costs 127 / 128 of a tile on average.
    """
    b = _Sizes(shape)
    padded = (_TILE - 1) * (shape.num_experts - 1) / shape.num_rows if shape.num_rows else 0.0
    in_wgrad = padded_rows(shape, _SCATTERMOE_UNIT) / shape.num_rows if shape.num_rows else 0.0
    products, sums = SCATTERMOE_RATES["products"], SCATTERMOE_RATES["sums"]

    def rows(flops: int, read: int, written: int) -> Step:
        return Step(Cost(flops, read, written), products, flops * (1 + padded))

    def wgrad(flops: int, read: int, written: int) -> Step:
        return Step(Cost(flops, read, 2 * written), products, flops * in_wgrad)

    silu = b.a if shape.is_gated else 0  # the gate's activation, kept besides a
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
    summing = b.in_fp32 if b.y > _MOST_BYTES else 0  # PyTorch's fp32 sum buffer if offsets have 64 bits
    peak = max(
        saved + b.w2 + b.a + shape.element_bytes * shape.num_rows,  # da, dw2 and the scores' gradient
        saved - b.y + b.w2 + (2 * b.a if shape.is_gated else b.h),  # both factors' gradients and da; y is freed
        kept + b.w2 + b.h + b.y + b.w1 + b.x + summing,  # dx, dw1 and dx's rows, which replace x's
    )
    return Design(forward, backward, saved, saved + b.x, peak, _TILE, padded)


def grouped_mm(shape: MoEShape) -> Design:
    """grouped_mm: a copy of x in expert order, two grouped GEMMs, compiled operations between them, a sum in fp32.

    ``tilemoe.bench.peers.grouped_mm_experts``: two calls of ``torch.nn.functional.grouped_mm``, whose Hopper kernel has
    tiles of 128 x 256 (ATen's GroupMM.cu: 64 x 128 if experts have at most 128 rows on average), under
    torch.compile, which fuses the operations between them and adds o and dx by atomics, o in fp32. Rows are in expert
    order. The backward peak is either what is kept, dy and ds, or the last steps, which run dgrad before wgrad.
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
        saved + b.y,  # dy and what is kept
        saved + b.a + b.w2,  # da, dw2 and dy; y is freed
        saved - b.y + b.h + b.w2,  # dh, h and da
        saved - b.a + b.w1 + b.w2,  # dx's rows, dw1, dh and x's rows
    )
    return Design(forward, backward, saved, saved + b.in_fp32 + b.x, peak, tile, padded - 1)


def _fill(columns: int, tile: int) -> float:
    """Columns that tiles compute, divided by ``columns``."""
    return math.ceil(columns / tile) * tile / columns


DESIGNS: MappingProxyType[str, Callable[[MoEShape], Design]] = MappingProxyType(
    {"scattermoe": scattermoe, "grouped_mm": grouped_mm}
)
