"""The error message of an operator that runs out of GPU memory: what the layer needs, and what to change.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from typing import Any

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.experts.base import shape_of
from tilemoe.kernels.experts.memory import backward_peak_bytes, forward_peak_bytes
from tilemoe.plan import RoutingPlan
from tilemoe.shape import MoEShape

_MIB, _GIB = 1 << 20, 1 << 30
# Where to read d, n and w: operand's name -> its dimension. The first operand among the arguments is read.
_D = {"w2": 1, "w1": 2, "do": 1, "x": 1}
_N = {"w2": 2, "a_scaled": 1}
_W = {"w1": 1, "dh": 1}


def advise(name: str, found: str, arguments: dict[str, Any]) -> str:
    """`out_of_memory_message` for an operator whose ``arguments`` (by name) end with plan, spec and backend."""
    if "up_a" in arguments:  # the memory model knows no adapters, and they cannot recompute
        return out_of_memory_message(name, found, None, can_recompute=False)
    plan: RoutingPlan = arguments["plan"]
    spec: ActivationSpec = arguments["spec"]
    d, n, w = (_size_of(arguments, places) for places in (_D, _N, _W))
    n = w // spec.width_factor if n is None and w is not None else n
    shape = None
    if d is not None and n is not None:
        shape = shape_of(next(iter(arguments.values())), d, n, plan, spec, arguments.get("save", "full"))
    return out_of_memory_message("forward" if name == "moe" else name, found, shape)


def _size_of(arguments: dict[str, Any], places: dict[str, int]) -> int | None:
    return next((arguments[name].shape[dim] for name, dim in places.items() if name in arguments), None)


def out_of_memory_message(step: str, found: str, shape: MoEShape | None, *, can_recompute: bool = True) -> str:
    """One line: the step, what PyTorch's message ``found`` says about the GPU, the layer's need, and what to change.

    ``shape`` is None if the sizes cannot be read from the step's operands, or the need is not known.
    """
    sentences = found.strip().splitlines()[0].split(". ") if found.strip() else ["out of memory"]
    reason = ". ".join(sentences[:3]).rstrip(".")  # the rest is about the allocator
    need = "" if shape is None else f" {_need(shape)}"
    more = ", or recompute='up_proj', which keeps no pre-activations" if can_recompute else ""
    return f"tilemoe.moe, {step}: {reason}.{need} Pass fewer tokens per call{more}."


def _need(shape: MoEShape) -> str:
    sizes = (
        f"{shape.num_tokens} tokens in {shape.num_rows} rows, hidden_size {shape.hidden_size}, "
        f"intermediate_size {shape.intermediate_size} and {shape.num_experts} experts"
    )
    forward, backward = _size(forward_peak_bytes(shape)), _size(backward_peak_bytes(shape))
    return f"With {sizes} the call takes {forward} in forward and {backward} in backward, gradients included."


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.2f} MiB"
