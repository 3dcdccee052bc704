"""One name for each Gluon function whose name differs between Triton 3.6 and 3.9 (3.8 has some names of each).

cp_async        cp.async from global pointers to shared memory
tma_load        TMA load from a descriptor's tensor to shared memory; its bytes count towards an mbarrier
tma_store       TMA store from shared memory to a descriptor's tensor
tma_add         TMA reduce-add from shared memory to a descriptor's tensor
reinterpret     a view of shared memory with another dtype, shape and layout
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_HAS_SHORT_NAMES = hasattr(tma, "async_load")  # from 3.8 on

cp_async = async_copy.async_load if _HAS_SHORT_NAMES else async_copy.async_copy_global_to_shared
tma_load = tma.async_load if _HAS_SHORT_NAMES else tma.async_copy_global_to_shared
tma_store = tma.async_store if _HAS_SHORT_NAMES else tma.async_copy_shared_to_global


@builtin
def _tma_add(descriptor: Any, place: Any, source: Any, _semantic: Any = None) -> None:
    """TMA reduce-add through the IR builder: Triton 3.6 exports no function for it."""
    at = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, source.handle)


tma_add = tma.async_atomic_add if _HAS_SHORT_NAMES else _tma_add
_shared = gl.shared_memory_descriptor
reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret
