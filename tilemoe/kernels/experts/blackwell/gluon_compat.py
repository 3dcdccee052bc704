"""One name for each Gluon function for tensor memory and gather4 that differs between Triton 3.6 and 3.9.

tma_gather    TMA gather4 of rows of a descriptor's tensor, given by index, to shared memory
tmem_load     all of a view of tensor memory, to registers of the calling warps: a thread has columns of one row
tmem_zeros    zeros in the same registers
tmem_slices   a view (rows, columns) of tensor memory as (columns / WIDTH, rows, WIDTH)
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell

tma_gather = blackwell.tma.async_gather

# For the layout of the registers Triton 3.6 has a function, later releases have a method.
register_layout: Any = getattr(blackwell, "get_tmem_reg_layout", None)
_IS_FUNCTION = gl.constexpr(register_layout is not None)
_memory = blackwell.tensor_memory_descriptor
_reinterpret = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret


@gluon.jit
def tmem_load(view):
    if _IS_FUNCTION:
        value = view.load(register_layout(gl.float32, view.shape, view.layout, gl.num_warps()))
    else:
        value = view.load()
    return value


@gluon.jit
def tmem_zeros(view):
    shape: gl.constexpr = view.shape
    if _IS_FUNCTION:
        value = gl.zeros(shape, gl.float32, register_layout(gl.float32, shape, view.layout, gl.num_warps()))
    else:
        value = gl.zeros(shape, gl.float32, view.get_reg_layout())
    return value


@gluon.jit
def tmem_slices(view, WIDTH: gl.constexpr):
    layout: gl.constexpr = blackwell.TensorMemoryLayout([view.shape[0], WIDTH], col_stride=1)
    return _reinterpret(view, gl.float32, [view.shape[1] // WIDTH, view.shape[0], WIDTH], layout)
