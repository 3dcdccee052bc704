"""The time that a kernel takes, from its FLOPs, its bytes and constants fitted to recorded times.

A GEMM runs here at the board's power limit, where time is energy: so much for a FLOP, so much for a byte
(docs/lab/power.md at 36a9631). So

    t = launch + max(F / f + B / b, roofline)

F  FLOPs with the rows that tiles pad (`padding`) and the SMs that the last wave leaves idle
B  bytes, each operand once (`costs`)
f, b  TFLOP/s and TB/s of a kind of kernel: a byte that hides behind products costs less than its time, so b may exceed
      the memory's bandwidth

Choosing experts and planning take launches and a time for each logit (T E) and for each pair (R).

Fitted on an H200 by benchmarks/fit_planner.py, which says on which cases; on another GPU f and b are scaled by what the
makers state, and nobody has checked them ("spec"). Those of GEMMs in FP8 are from an H100, which has the H200's SMs and
power limit, and count as an H200's; those of weight gradients are an H200's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

from tilemoe.kernels.experts.hopper import configs as hopper
from tilemoe.kernels.experts.memory import backward_slices, forward_slices
from tilemoe.kernels.experts.triton.configs import KERNELS, WEIGHT_GRADS, Kernel, choose_tile
from tilemoe.perf.costs import BACKWARD, FORWARD, Cost, is_in_fp8, kernel_costs, router_costs
from tilemoe.perf.hardware import DTYPE_BYTES, GPUS, Gpu
from tilemoe.perf.padding import padded_rows
from tilemoe.shape import MoEShape

# Steps of the layer with its router, in the order they run.
LAYER_FORWARD = ("logits", "route", *FORWARD)
LAYER_BACKWARD = (*BACKWARD, "route_grad", "logits_grad")
LAUNCH_MS = 0.005
LAUNCHES = MappingProxyType({"route": 3, "logits_grad": 3})  # every other step is one
_NOT_SHORT = hopper.STATIONARY.b_stages * hopper.BLOCK_K + 1
SLICE_MS = 0.02  # of each slice of d beyond the first (tilemoe/kernels/experts/slicing.py)
FITTED_ON = "H200"


@dataclass(frozen=True)
class Rate:
    """What a kind of step does in a millisecond: ``first`` GFLOP (f, in TFLOP/s), or ``second`` GB (b, in TB/s).

    For choosing experts: millions of logits, or of pairs. Infinite where an amount costs nothing.
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
    """What a step's products are in: of a layer in FP8 all but narrow weight gradients and the router."""
    return "bf16" if dtype == "fp8" and not is_in_fp8(step, shape) else dtype


def costs(shape: MoEShape, dtype: str) -> dict[str, Cost]:
    """Cost of each kernel and of the router's products, by step."""
    logits, logits_grad = router_costs(shape)
    precision = "fp8" if dtype == "fp8" else "bf16"
    return {"logits": logits, **kernel_costs(shape, precision), "logits_grad": logits_grad}


def amounts(step: str, shape: MoEShape, gpu: Gpu, dtype: str = "bf16") -> tuple[float, float]:
    """The amounts that `Rate` is for: F in GFLOP and B in GB; for choosing experts, millions of logits and of pairs."""
    if step.startswith("route"):
        return shape.num_tokens * shape.num_experts / 1e6, shape.num_rows / 1e6
    cost = costs(shape, dtype)[step]
    flops = _padded_flops(step, shape, gpu) if step in KERNELS else cost.flops
    return flops / 1e9, cost.bytes / 1e9


def _padded_flops(kernel: Kernel, shape: MoEShape, gpu: Gpu) -> float:
    """Expected FLOPs of all tiles under random routing, the last wave of tiles counted as if it filled all SMs."""
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
    """(contraction, columns) of a row GEMM, of up_proj the columns of a; of a weight gradient its rows and columns."""
    return {
        "up_proj_act": (d, n),
        "down_proj": (n, d),
        "down_proj_dgrad_dact": (d, n),
        "down_proj_wgrad": (d, n),
        "up_proj_dgrad": (w, d),
        "up_proj_wgrad": (d, w),
    }[kernel]


def _parts(kernel: Kernel, shape: MoEShape) -> int:
    """Of a tile's columns: gate and up have as many each."""
    return 2 if kernel == "up_proj_act" and shape.is_gated else 1


def _tile(kernel: Kernel, shape: MoEShape, gpu: Gpu) -> tuple[int, int, int]:
    """(rows, rows that an expert's are rounded up to, columns) of the kernel's tile there.

    Of a weight gradient the rows are the output's, and an expert's rows are the contraction.
    """
    width_in, width_out = gemm_widths(kernel, shape.hidden_size, shape.intermediate_size, shape.width)
    takes_hopper = gpu.capability == hopper.CAPABILITY and shape.element_bytes == 2
    if takes_hopper and hopper.why_slower(kernel, width_in, width_out) is None:
        # Of short contractions, too: the rates are of times before they had others.
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
    """Predicted milliseconds of a step of `LAYER_FORWARD` or `LAYER_BACKWARD`; of a kernel in one slice."""
    cost = costs(shape, dtype).get(step)  # None of choosing experts
    at_least = 0.0 if cost is None else cost.roofline_ms(gpu.ceilings(operand_dtype(step, shape, dtype)))
    taken = _rate(step, shape, gpu, dtype).milliseconds(*amounts(step, shape, gpu, dtype))
    return LAUNCH_MS * LAUNCHES.get(step, 1) + max(taken, at_least)


def layer_ms(shape: MoEShape, gpu: Gpu, dtype: str = "bf16") -> tuple[float, float]:
    """Predicted milliseconds of (forward, backward) of the layer with its router."""
    forward, backward = (
        sum(step_ms(step, shape, gpu, dtype) for step in steps) for steps in (LAYER_FORWARD, LAYER_BACKWARD)
    )
    slices = forward_slices(shape), backward_slices(shape)
    return forward + SLICE_MS * (len(slices[0]) - 1), backward + SLICE_MS * (len(slices[1]) - 1)


def is_measured(gpu: Gpu, dtype: str) -> bool:
    """Whether the rates were fitted on that GPU and for that dtype; otherwise they are the makers' figures scaled."""
    return gpu.name == FITTED_ON and DTYPE_BYTES.get(dtype) == 2


def rate_on(fitted: Rate, gpu: Gpu, dtype: str, of: str = "bf16") -> Rate:
    """A rate fitted for dtype ``of``, scaled by the figures that the makers state for both GPUs and dtypes."""
    on = GPUS[FITTED_ON]
    flops_rate = gpu.stated_tflops(dtype) / on.stated_tflops(of)
    return Rate(fitted.first * flops_rate, fitted.second * gpu.tbps / on.tbps)


def _rate(step: str, shape: MoEShape, gpu: Gpu, dtype: str) -> Rate:
    product = operand_dtype(step, shape, dtype)
    kind = f"fp8 {KIND_OF[step]}" if product == "fp8" else KIND_OF[step]
    if step.startswith("route"):  # both amounts as bytes are
        bytes_rate = gpu.tbps / GPUS[FITTED_ON].tbps
        return Rate(RATES[kind].first * bytes_rate, RATES[kind].second * bytes_rate)
    return rate_on(RATES[kind], gpu, product, "fp8" if product == "fp8" else "bf16")
