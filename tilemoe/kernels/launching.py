"""`Launch` objects from positional arguments, in the kernel's own order, as Triton's calls take them."""

from __future__ import annotations

from typing import Any

from tilemoe.runtime.launch import Launch


def launch_of(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    constants: dict[str, Any],
    num_warps: int = 4,
    num_stages: int = 1,
    max_registers: int | None = None,
) -> Launch:
    """``args``: values of the kernel's leading parameters, in its order. ``constants``: all the others, by name."""
    names = kernel.arg_names
    assert len(args) + len(constants) == len(names), "each parameter has one value"
    return Launch(kernel, grid, dict(zip(names, args, strict=False)), constants, num_warps, num_stages, max_registers)
