"""One way to start a kernel: `Launch` holds everything that a launch, or a compilation without a GPU, needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from tilemoe.runtime.device import Device
from tilemoe.runtime.launch_trace import recorder
from tilemoe.runtime.precompile import active

_ALIGNMENT = 16
_MAX_INT32 = 2**31 - 1
_IS_AMD = torch.version.hip is not None


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel, its grid, its run-time and its compile-time arguments by name, and the compiler's options.

    ``max_registers`` of a thread, None where the compiler decides.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def run(self) -> None:
        """Launch on the device of the first operand, on PyTorch's current stream of it.

        Triton's own way binds the arguments by name and spells out their types each time, which takes the host longer
        than the rest of the launch together. Here it is taken once for each way in which the arguments can be compiled.
        """
        operands = (getattr(value, "base", value) for value in self.args.values())  # a descriptor's tensor
        first = next(operand for operand in operands if isinstance(operand, Tensor))
        watching = recorder()
        if not isinstance(self.kernel, JITFunction):  # the interpreter's
            self.kernel[self.grid](**self.args, **self.constants, **self.options)
            if watching is not None:
                watching.problem = "the interpreter launches nothing"
            return
        with torch.cuda.device_of(first):
            known = _compiled(self.kernel, first.device)
            key = self._key()
            precompile = active()
            if precompile is not None and precompile.withholds(self, key in known):
                return
            given = {**self.args, **self.constants}
            by_position = [given[name] for name in self.kernel.arg_names]
            if key in known:
                known[key][(*self.grid, 1, 1)[:3]](*by_position)
            else:
                known[key] = self.kernel[self.grid](**self.args, **self.constants, **self.options)
            if watching is not None:
                watching.launched(known[key], self.grid, by_position)

    def _key(self) -> tuple[Any, ...]:
        """All that the compilation depends on."""
        return (*map(_specialisation, self.args.values()), *self.constants.values(), *self.options.values())

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options, as a launch takes them."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


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


@cache
def _compiled(kernel: JITFunction[Any], device: torch.device) -> dict[tuple[Any, ...], Any]:
    """What has been launched of ``kernel`` on a device, by all that its compilation depends on; filled by `Launch`."""
    return {}


def _specialisation(value: Any) -> Any:
    """What Triton compiles into a kernel of an argument: the type, whether it is 1, whether it is a multiple of 16.

    For AMD's GPUs also whether 32 bits reach all of the memory that a tensor is part of. The layout of Gluon's
    descriptors follows from the type and the block's shape.
    """
    if isinstance(value, int):
        return 1 if value == 1 else (value % _ALIGNMENT == 0, value > _MAX_INT32)
    if isinstance(value, Tensor):
        is_reached = not _IS_AMD or value.untyped_storage().nbytes() <= _MAX_INT32
        return value.dtype, value.data_ptr() % _ALIGNMENT == 0, is_reached
    if value is None or isinstance(value, float):
        return type(value)
    return value.base.dtype, tuple(value.block_shape)


def contiguous(t: Tensor | None) -> Tensor | None:
    """``t`` as kernels index it, by position alone; None stays None. A column or an expanded vector is copied."""
    return None if t is None else t.contiguous()


def int32_vectors(like: Tensor, *lengths: int) -> list[Tensor]:
    """Uninitialised, in one allocation, which takes the host as long as a small launch.

    Each begins at a multiple of 16 bytes: an alignment that came and went with the lengths would be compiled anew.
    """
    ends = list(accumulate(ceil_div(4 * length, _ALIGNMENT) * (_ALIGNMENT // 4) for length in lengths))
    memory = like.new_empty(ends[-1], dtype=torch.int32)
    return [memory[start : start + length] for start, length in zip([0, *ends], lengths, strict=False)]


def dot_precision(dtype: torch.dtype) -> str:
    """How matrix units multiply fp32: what ``torch.backends.cuda.matmul`` allows; 16-bit types have one way only."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def persistent_grid(device: Device, tiles: int, ctas: int = 1) -> tuple[int]:
    """``ctas`` programs for each multiprocessor, or one for each tile where these are fewer."""
    return (max(1, min(ctas * device.multiprocessors, tiles)),)


# Triton has both, but as functions of kernels, which take the host ten times as long.
def ceil_div(count: int, block: int) -> int:
    """Blocks that cover ``count``."""
    return -(-count // block)


def power_of_two(count: int) -> int:
    """The least power of two that is at least ``count``, of at least 1."""
    return 1 << (count - 1).bit_length()
