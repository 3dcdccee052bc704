"""`Launch`, which holds everything that a kernel launch, or a compilation without a GPU, needs."""

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
    """A kernel, its grid, its run-time and compile-time arguments by name, and the compiler's options.

    ``max_registers``: the limit per thread; None: the compiler decides.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def run(self) -> None:
        """Launch on the first operand's device, on its current PyTorch stream.

        Triton's own launch binds the arguments by name and derives their types each time, which takes the host longer
        than the rest of the launch. Here that happens only once for each specialisation of the arguments.
        """
        operands = (getattr(value, "base", value) for value in self.args.values())  # `base`: a descriptor's tensor
        first = next(operand for operand in operands if isinstance(operand, Tensor))
        watching = recorder()
        if not isinstance(self.kernel, JITFunction):  # Triton's interpreter
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
        """Everything that the compilation depends on."""
        return (*map(_specialisation, self.args.values()), *self.constants.values(), *self.options.values())

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options by the names that Triton's launch takes."""
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
    """A `Launch`. args: values of the kernel's leading parameters, in order; constants: of all the others, by name."""
    names = kernel.arg_names
    assert len(args) + len(constants) == len(names), "each parameter has one value"
    return Launch(kernel, grid, dict(zip(names, args, strict=False)), constants, num_warps, num_stages, max_registers)


@cache
def _compiled(kernel: JITFunction[Any], device: torch.device) -> dict[tuple[Any, ...], Any]:
    """The compiled forms of ``kernel`` that were launched on a device, by `Launch._key`; `Launch.run` fills it."""
    return {}


def _specialisation(value: Any) -> Any:
    """The properties of an argument that Triton compiles into a kernel: type, whether it is 1 or a multiple of 16.

    For AMD's GPUs also whether 32-bit offsets reach all of a tensor's storage. The layout of a Gluon descriptor follows
    from its dtype and block shape.
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
    """``t`` contiguous, as kernels index it; None stays None. A column or an expanded vector is copied."""
    return None if t is None else t.contiguous()


def int32_vectors(like: Tensor, *lengths: int) -> list[Tensor]:
    """Uninitialised int32 vectors in one allocation, since an allocation takes the host as long as a small launch.

    Each begins at a multiple of 16 bytes: if alignment depended on the lengths, kernels would be compiled again.
    """
    ends = list(accumulate(ceil_div(4 * length, _ALIGNMENT) * (_ALIGNMENT // 4) for length in lengths))
    memory = like.new_empty(ends[-1], dtype=torch.int32)
    return [memory[start : start + length] for start, length in zip([0, *ends], lengths, strict=False)]


def dot_precision(dtype: torch.dtype) -> str:
    """How tensor cores multiply fp32, as ``torch.backends.cuda.matmul`` allows; always "ieee" for 16-bit types."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def persistent_grid(device: Device, tiles: int, ctas: int = 1) -> tuple[int]:
    """A grid of ``ctas`` CTAs per SM, or of one CTA per tile if there are fewer tiles."""
    return (max(1, min(ctas * device.multiprocessors, tiles)),)


# Triton has both as functions for kernels, but on the host they take ten times as long.
def ceil_div(count: int, block: int) -> int:
    """The number of blocks that cover ``count``."""
    return -(-count // block)


def power_of_two(count: int) -> int:
    """The least power of two that is at least ``count``, where count is at least 1."""
    return 1 << (count - 1).bit_length()
