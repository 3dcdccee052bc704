"""Gluon functions for tensor memory and gather4 that differ between Triton 3.6 and 3.9, under one name.

tmem_load    all of a view of tensor memory, in registers of the calling warps: a thread has columns of one row
tma_gather   TMA gather4: rows of a descriptor's tensor, by their numbers, to shared memory
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell

tma_gather = blackwell.tma.async_gather

# Triton 3.6 is to be told the registers' layout; later releases find it.
register_layout: Any = getattr(blackwell, "get_tmem_reg_layout", None)
_IS_TOLD = gl.constexpr(register_layout is not None)


@gluon.jit
def tmem_load(view):
    if _IS_TOLD:
        layout: gl.constexpr = register_layout(gl.float32, view.shape, view.layout, gl.num_warps())
        value = view.load(layout)
    else:
        value = view.load()
    return value
