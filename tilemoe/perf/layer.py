"""One layer on one GPU, as a table of plain values, which `tilemoe plan` prints or gives as JSON.

T tokens · R routed rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from tilemoe.kernels.experts.memory import backward_peak_bytes, forward_peak_bytes, inference_peak_bytes, saved_bytes
from tilemoe.perf.costs import Cost, padding_waste
from tilemoe.perf.designs import DESIGNS, Design
from tilemoe.perf.hardware import Gpu
from tilemoe.perf.predict import (
    LAYER_BACKWARD,
    LAYER_FORWARD,
    costs,
    is_measured,
    layer_ms,
    operand_dtype,
    row_tile,
    step_ms,
)
from tilemoe.shape import MoEShape

PARTS = ("forward", "backward")
MEASURED, SPEC = "measured", "spec"


def layer_plan(shape: MoEShape, gpu: Gpu, dtype: str) -> dict[str, Any]:
    """Sizes, the GPU's ceilings and their source, memory, padding, steps, times, and the other designs.

    Units: bytes, milliseconds, FLOP and FLOP/byte. ValueError: the GPU does not support ``dtype``.
    """
    wide = "bf16" if dtype == "fp8" else dtype  # the other designs' dtype if ours is FP8
    steps = _steps(shape, gpu, dtype)
    rooflines, predicted = sums(steps, "roofline_ms"), dict(zip(PARTS, layer_ms(shape, gpu, dtype), strict=True))
    return {
        "shape": {**asdict(shape), "num_rows": shape.num_rows, "dtype": dtype},
        "gpu": _gpu(gpu, dtype, shape),
        "memory": {
            "weight_bytes": shape.element_bytes
            * shape.num_experts
            * shape.hidden_size
            * (shape.width + shape.intermediate_size),
            "saved_bytes": saved_bytes(shape),
            "inference_peak_bytes": inference_peak_bytes(shape),
            "forward_peak_bytes": forward_peak_bytes(shape),
            "backward_peak_bytes": backward_peak_bytes(shape),
        },
        "padding": {"tile_rows": row_tile(shape, gpu), "waste": padding_waste(shape, row_tile(shape, gpu))},
        "steps": steps,
        "times": {part: {"roofline_ms": rooflines[part], "predicted_ms": predicted[part]} for part in PARTS},
        "others": {name: _other(design(shape), gpu, wide) for name, design in DESIGNS.items()},
    }


def sums(steps: Iterable[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """{part: the sum of ``key`` over its steps that have it}."""
    known = [step for step in steps if key in step]
    return {part: sum(step[key] for step in known if step["part"] == part) for part in PARTS}


def _gpu(gpu: Gpu, dtype: str, shape: MoEShape) -> dict[str, Any]:
    ceilings = gpu.ceilings(dtype)
    note = "; needs Triton >= 3.7.1, else PyTorch's kernels are used" if gpu.capability // 10 == 10 else ""
    why = gpu.why_not_fp8(shape.hidden_size, shape.intermediate_size) if dtype == "fp8" else None
    note += "" if why is None else f"; {why}: the layer would compute in 16 bits"
    return {
        "name": gpu.name,
        "tflops": ceilings.tflops,
        "tbps": ceilings.tbps,
        "ridge_flop_per_byte": ceilings.ridge,
        "ceilings": MEASURED if ceilings.is_measured else SPEC,
        "rates": MEASURED if is_measured(gpu, dtype) else SPEC,
        "source": gpu.source,
        "note": note,
    }


def _steps(shape: MoEShape, gpu: Gpu, dtype: str) -> list[dict[str, Any]]:
    """Each step of forward and backward, in order; routing and planning have negligible FLOPs and bytes."""
    known = costs(shape, dtype)
    return [
        _step(step, part, gpu, operand_dtype(step, shape, dtype), known.get(step), step_ms(step, shape, gpu, dtype))
        for part, steps in zip(PARTS, (LAYER_FORWARD, LAYER_BACKWARD), strict=True)
        for step in steps
    ]


def _step(name: str, part: str, gpu: Gpu, dtype: str, cost: Cost | None, predicted_ms: float) -> dict[str, Any]:
    row: dict[str, Any] = {"step": name, "part": part, "dtype": dtype}
    if cost is not None:
        ceilings = gpu.ceilings(dtype)
        row |= {"flops": cost.flops, "bytes": cost.bytes, "flop_per_byte": cost.intensity}
        row |= {"bound": cost.bound(ceilings), "roofline_ms": cost.roofline_ms(ceilings)}
    return {**row, "predicted_ms": predicted_ms}


def _other(design: Design, gpu: Gpu, dtype: str) -> dict[str, Any]:
    """Another design's experts, without a router."""
    steps = [
        _step(name, part, gpu, dtype, step.cost, step.predicted_ms(gpu, dtype))
        for part, steps_of_part in zip(PARTS, (design.forward, design.backward), strict=True)
        for name, step in steps_of_part.items()
    ]
    return {
        "saved_bytes": design.saved_bytes,
        "forward_peak_bytes": design.forward_peak_bytes,
        "backward_peak_bytes": design.backward_peak_bytes,
        "padding": {"tile_rows": design.tile_rows, "waste": design.padding_waste},
        "moved_bytes": sums(steps, "bytes"),
        "roofline_ms": sums(steps, "roofline_ms"),
        "predicted_ms": sums(steps, "predicted_ms"),
        "steps": steps,
    }
