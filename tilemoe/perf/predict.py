"""Predicts a kernel's time from its FLOPs, its bytes and constants fitted to recorded times.

GEMMs run at the board's power limit, where time is proportional to energy: so much per FLOP, so much per byte
(docs/lab/power.md at 36a9631). So

    t = launch + max(F / f + B / b, roofline)

F  FLOPs, including the rows that tiles pad (`padded_rows`) and the SMs that the last wave leaves idle
B  bytes, each operand once (`kernel_costs`)
f, b  TFLOP/s and TB/s of a kind of kernel: loads that overlap with products cost less than their own time, so b may
      exceed the memory's bandwidth

Choosing experts and planning take their launches plus a time per logit (T E) and per pair (R).

benchmarks/fit_planner.py fitted the constants on an H200 and lists the cases. For another GPU f and b are scaled by the
makers' stated figures; nobody has checked them ("spec"). Rates of FP8 GEMMs were measured on an H100, which has the
H200's SMs and power limit, and count as an H200's; rates of FP8 weight gradients were measured on an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

from tilemoe.kernels.experts.hopper import configs as hopper
from tilemoe.kernels.experts.memory import backward_slices, forward_slices
from tilemoe.kernels.experts.triton.configs import KERNELS, WEIGHT_GRADS, Kernel, choose_tile
from tilemoe.perf.costs import BACKWARD, FORWARD, Cost, is_in_fp8, kernel_costs, padded_rows, router_costs
from tilemoe.perf.hardware import DTYPE_BYTES, GPUS, Gpu
from tilemoe.shape import MoEShape

# Steps of the layer with its router, in the order they run.
LAYER_FORWARD = ("logits", "route", *FORWARD)
LAYER_BACKWARD = (*BACKWARD, "route_grad", "logits_grad")
LAUNCH_MS = 0.005
LAUNCHES = MappingProxyType({"route": 3, "logits_grad": 3})  # every other step is one launch
_NOT_SHORT = hopper.STATIONARY.b_stages * hopper.BLOCK_K + 1
SLICE_MS = 0.02  # for each slice of d after the first (tilemoe/kernels/experts/slicing.py)
FITTED_ON = "H200"


@dataclass(frozen=True)
class Rate:
    """In a millisecond, a kind of step does ``first`` GFLOP (f, in TFLOP/s) or ``second`` GB (b, in TB/s).

    For choosing experts: millions of logits and of pairs. Infinite if an amount costs nothing.
    """

    first: float
    second: float

    def milliseconds(self, first: float, second: float) -> float:
        return first / self.first + second / self.second


KINDS = MappingProxyType(
    {
        "gather_act": ("up_proj_act",),
        "rows": ("down_proj", "up_proj_dgrad"),
        "dgrad_dact": ("down_proj_dgrad_dact",),
        "wgrad": ("down_proj_wgrad", "up_proj_wgrad"),
        "combine": ("combine", "combine_grad"),
        "router": ("logits", "logits_grad"),
        "route": ("route",),
        "route_grad": ("route_grad",),
    }
)
KIND_OF = MappingProxyType({step: kind for kind, steps in KINDS.items() for step in steps})
# As benchmarks/fit_planner.py prints them, from results/kernels.jsonl, fp8_rates.jsonl and kernel_variants.jsonl.
RATES = MappingProxyType(
    {
        "gather_act": Rate(626.9, 9.438),
        "rows": Rate(652.7, 14.57),
        "dgrad_dact": Rate(559.7, 10.09),
        "wgrad": Rate(642.8, 7.959),
        "combine": Rate(math.inf, 4.4),
        "router": Rate(938.5, 5.286),
        "route": Rate(215.2, 12.17),
        "route_grad": Rate(276.1, 61.43),
        "fp8 gather_act": Rate(1156, 6.685),
        "fp8 rows": Rate(1223, 5.75),
        "fp8 dgrad_dact": Rate(1200, 4.349),
        "fp8 wgrad": Rate(1290, 4.187),
    }
)


def operand_dtype(step: str, shape: MoEShape, dtype: str) -> str:
    """The dtype of a step's products: in an FP8 layer "bf16" for narrow weight gradients and the router."""
    return "bf16" if dtype == "fp8" and not is_in_fp8(step, shape) else dtype


def costs(shape: MoEShape, dtype: str) -> dict[str, Cost]:
    """{step: cost} of each kernel and of the router's products."""
    logits, logits_grad = router_costs(shape)
    precision = "fp8" if dtype == "fp8" else "bf16"
    return {"logits": logits, **kernel_costs(shape, precision), "logits_grad": logits_grad}


def amounts(step: str, shape: MoEShape, gpu: Gpu, dtype: str = "bf16") -> tuple[float, float]:
    """The amounts for `Rate`: F in GFLOP and B in GB; for choosing experts, millions of logits and of pairs."""
    if step.startswith("route"):
        return shape.num_tokens * shape.num_experts / 1e6, shape.num_rows / 1e6
    cost = costs(shape, dtype)[step]
    flops = _padded_flops(step, shape, gpu) if step in KERNELS else cost.flops
    return flops / 1e9, cost.bytes / 1e9


def _padded_flops(kernel: Kernel, shape: MoEShape, gpu: Gpu) -> float:
    """Expected FLOPs of all tiles under random routing, counting the last wave of tiles as if it filled all SMs."""
    tile_rows, unit, tile_columns = _tile(kernel, shape, gpu)
    width_in, width_out = gemm_widths(kernel, shape.hidden_size, shape.intermediate_size, shape.width)
    across = math.ceil(_parts(kernel, shape) * width_out / tile_columns)
    if kernel in WEIGHT_GRADS:
        tiles = float(shape.num_experts * math.ceil(width_in / tile_rows) * across)
        contraction = padded_rows(shape, unit) / shape.num_experts
    else:
        tiles, contraction = padded_rows(shape, unit) / tile_rows * across, width_in
    waves = math.ceil(tiles / gpu.multiprocessors)
    return 2 * waves * gpu.multiprocessors * tile_rows * tile_columns * contraction


def gemm_widths(kernel: Kernel, d: int, n: int, w: int) -> tuple[int, int]:
    """(contraction, columns) of a row GEMM, for up_proj a's columns; for a weight gradient its (rows, columns)."""
    return {
        "up_proj_act": (d, n),
        "down_proj": (n, d),
        "down_proj_dgrad_dact": (d, n),
        "down_proj_wgrad": (d, n),
        "up_proj_dgrad": (w, d),
        "up_proj_wgrad": (d, w),
    }[kernel]


def _parts(kernel: Kernel, shape: MoEShape) -> int:
    """Column blocks per tile: 2 for a gated up_proj, whose tile has gate and up columns, else 1."""
    return 2 if kernel == "up_proj_act" and shape.is_gated else 1


def _tile(kernel: Kernel, shape: MoEShape, gpu: Gpu) -> tuple[int, int, int]:
    """(rows, the multiple that an expert's rows are rounded up to, columns) of the kernel's tile on ``gpu``.

    For a weight gradient, rows are the output's, and an expert's rows are the contraction.
    """
    width_in, width_out = gemm_widths(kernel, shape.hidden_size, shape.intermediate_size, shape.width)
    takes_hopper = gpu.capability == hopper.CAPABILITY and shape.element_bytes == 2
    if takes_hopper and hopper.why_slower(kernel, width_in, width_out) is None:
        # Short contractions have other tiles now, but the rates were fitted before they had.
        tile = hopper.tile_of(kernel, max(width_in, _NOT_SHORT))
        unit = hopper.WARPGROUP_M if kernel in KINDS["rows"] else tile.block_m
        return tile.block_m, hopper.BLOCK_K if kernel in WEIGHT_GRADS else unit, tile.block_n
    gate_up = "concatenated" if shape.is_gated else None
    portable = choose_tile(kernel, width_in, width_out, shape.element_bytes, gpu, gate_up)
    unit = portable.block_k if kernel in WEIGHT_GRADS else portable.block_m
    return portable.block_m, unit, portable.block_n * _parts(kernel, shape)


def row_tile(shape: MoEShape, gpu: Gpu) -> int:
    """The multiple that up_proj_act rounds each expert's rows up to."""
    return _tile("up_proj_act", shape, gpu)[1]


def step_ms(step: str, shape: MoEShape, gpu: Gpu, dtype: str = "bf16") -> float:
    """Predicted milliseconds of a step of `LAYER_FORWARD` or `LAYER_BACKWARD`, with d in a single slice."""
    cost = costs(shape, dtype).get(step)  # None for choosing experts
    at_least = 0.0 if cost is None else cost.roofline_ms(gpu.ceilings(operand_dtype(step, shape, dtype)))
    taken = _rate(step, shape, gpu, dtype).milliseconds(*amounts(step, shape, gpu, dtype))
    return LAUNCH_MS * LAUNCHES.get(step, 1) + max(taken, at_least)


def layer_ms(shape: MoEShape, gpu: Gpu, dtype: str = "bf16") -> tuple[float, float]:
    """Predicted (forward, backward) milliseconds of the layer with its router."""
    forward, backward = (
        sum(step_ms(step, shape, gpu, dtype) for step in steps) for steps in (LAYER_FORWARD, LAYER_BACKWARD)
    )
    slices = forward_slices(shape), backward_slices(shape)
    return forward + SLICE_MS * (len(slices[0]) - 1), backward + SLICE_MS * (len(slices[1]) - 1)


def is_measured(gpu: Gpu, dtype: str) -> bool:
    """Whether the rates were fitted for this GPU and dtype; otherwise they are scaled by the makers' figures."""
    return gpu.name == FITTED_ON and DTYPE_BYTES.get(dtype) == 2


def rate_on(fitted: Rate, gpu: Gpu, dtype: str, of: str = "bf16") -> Rate:
    """A rate fitted for dtype ``of``, scaled to ``gpu`` and ``dtype`` by the makers' stated figures."""
    on = GPUS[FITTED_ON]
    flops_rate = gpu.stated_tflops(dtype) / on.stated_tflops(of)
    return Rate(fitted.first * flops_rate, fitted.second * gpu.tbps / on.tbps)


def _rate(step: str, shape: MoEShape, gpu: Gpu, dtype: str) -> Rate:
    product = operand_dtype(step, shape, dtype)
    kind = f"fp8 {KIND_OF[step]}" if product == "fp8" else KIND_OF[step]
    if step.startswith("route"):  # scale both amounts like bytes
        bytes_rate = gpu.tbps / GPUS[FITTED_ON].tbps
        return Rate(RATES[kind].first * bytes_rate, RATES[kind].second * bytes_rate)
    return rate_on(RATES[kind], gpu, product, "fp8" if product == "fp8" else "bf16")
