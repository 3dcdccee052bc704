"""Per-kernel configuration of the Blackwell GEMMs: tile, stages, registers, limits. Pure Python; nothing was measured.

The host side and the kernels read this module; no other file has a tile size.

d hidden_size · n intermediate_size · BM, BN, BK tile sizes
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilemoe.kernels.experts.triton.configs import KERNELS, Kernel

if TYPE_CHECKING:  # it imports torch, which this module does not need
    from tilemoe.runtime.device import Device

# Releases of Triton that compile the kernels. To run them, `tilemoe.runtime.device` requires 3.7.1 or later.
TRITON_VERSIONS = ("3.6.", "3.9.")
CAPABILITIES = (100, 103)  # B200, B300
SHARED_BYTES = 227 * 1024  # shared memory of a CTA; the stages below are chosen to fill it
TMEM_COLUMNS = 512  # columns of tensor memory, each with 128 lanes of 32 bits

ACCUMULATORS = 2  # in tensor memory: the epilogue reads one while the tensor cores write the other
EPILOGUE_WARPS = 8
MAX_REGISTERS = 128  # per thread at launch: 65536 over 16 warps; setmaxnreg then gives the epilogue warps more
BLOCK_M = 128  # M of tcgen05.mma: the lanes of tensor memory
BLOCK_K = 64  # 128 bytes of a 16-bit type: the widest swizzle
EPILOGUE_N = 64  # columns of one epilogue TMA store
H_STAGES = 2  # slices of h that down_proj_dgrad keeps in shared memory


@dataclass(frozen=True)
class TileConfig:
    """A tile of block_m x block_n and the pipeline's stages.

    registers: setmaxnreg's registers per thread of all warps but the epilogue's, to which Triton gives the rest.
    """

    block_n: int
    num_stages: int
    registers: int
    block_m: int = BLOCK_M


# down_proj_dgrad has fewer stages, since its epilogue needs 80 KB of buffers instead of 32.
TILES: MappingProxyType[Kernel, TileConfig] = MappingProxyType(
    {**dict.fromkeys(KERNELS, TileConfig(256, 4, 72)), "down_proj_dgrad_dact": TileConfig(256, 3, 72)}
)


def why_unsupported(device: Device, triton_version: str) -> str | None:
    """Why the Blackwell kernels cannot run on a GPU with this release of Triton; None if they can."""
    if device.capability not in CAPABILITIES:
        return "the Blackwell kernels need compute capability 10.0 or 10.3"
    if device.shared_bytes < SHARED_BYTES:
        return f"the Blackwell kernels need {SHARED_BYTES} bytes of shared memory"
    if not triton_version.startswith(TRITON_VERSIONS):
        return (
            f"the Blackwell kernels need Triton {' or '.join(v + 'x' for v in TRITON_VERSIONS)}, not {triton_version}"
        )
    return None
