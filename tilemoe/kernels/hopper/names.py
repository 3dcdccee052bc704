"""Functions of Gluon whose names changed between the releases of Triton that these kernels compile with.

copy_rows       cp.async, from pointers to shared memory
load_tile       TMA, from a descriptor's tensor to shared memory; counts towards a barrier
store_tile      TMA, from shared memory to a descriptor's tensor
reinterpret     shared memory as of another dtype, shape and layout
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_HAS_SHORT_NAMES = hasattr(tma, "async_load")  # 3.6 has none, 3.9 no others

copy_rows = async_copy.async_load if _HAS_SHORT_NAMES else async_copy.async_copy_global_to_shared
load_tile = tma.async_load if _HAS_SHORT_NAMES else tma.async_copy_global_to_shared
store_tile = tma.async_store if _HAS_SHORT_NAMES else tma.async_copy_shared_to_global
_shared = gl.shared_memory_descriptor
reinterpret = _shared.reinterpret if _HAS_SHORT_NAMES else _shared._reinterpret
