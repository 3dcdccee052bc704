"""What a user is told when an operator's tensors do not fit the GPU.

T tokens · d hidden_size · n intermediate_size · E experts
"""

from __future__ import annotations

from collections.abc import Callable
from traceback import clear_frames
from typing import Any

import torch

from tilemoe.perf.memory import backward_peak_bytes, forward_peak_bytes
from tilemoe.perf.shape import MoEShape

_MIB, _GIB = 1 << 20, 1 << 30


def with_advice(step: str, run: Callable[..., Any], shape_of: Callable[..., MoEShape | None]) -> Callable[..., Any]:
    """``run``, whose torch.OutOfMemoryError says in one line what to do. ``shape_of``: the sizes, of its arguments."""

    def run_with_advice(*args: Any) -> Any:
        try:
            return run(*args)
        except torch.OutOfMemoryError as error:
            found = str(error)
            clear_frames(error.__traceback__)  # which would keep the step's buffers for as long as the error lives
        raise torch.OutOfMemoryError(out_of_memory_message(step, found, shape_of(*args)))

    return run_with_advice


def out_of_memory_message(step: str, found: str, shape: MoEShape | None) -> str:
    """One line: the step, what PyTorch's message ``found`` says of the GPU, the layer's need, and what to change.

    ``shape`` is None where the step's operands do not tell the sizes.
    """
    sentences = found.strip().splitlines()[0].split(". ") if found.strip() else ["out of memory"]
    reason = ". ".join(sentences[:3]).rstrip(".")  # whatever follows is about the allocator
    need = "" if shape is None else f" {_need(shape)}"
    advice = "Pass fewer tokens per call, or recompute='up_proj', which keeps no pre-activations."
    return f"tilemoe.moe, {step}: {reason}.{need} {advice}"


def _need(shape: MoEShape) -> str:
    sizes = (
        f"{shape.num_tokens} tokens in {shape.num_rows} rows, hidden_size {shape.hidden_size}, "
        f"intermediate_size {shape.intermediate_size} and {shape.num_experts} experts"
    )
    forward, backward = _size(forward_peak_bytes(shape)), _size(backward_peak_bytes(shape))
    return f"With {sizes} it takes {forward} in forward and {backward} in backward, gradients included."


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.2f} MiB"
