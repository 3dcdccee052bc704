"""Per-kernel configuration of the Hopper GEMMs: tile, stages, registers, limits. Pure Python, measured on an H200.

Read by the choice of backend, by the host side and by the kernels alike: a tile size stands here and nowhere else.

d hidden_size · n intermediate_size · BM, BN, BK tile sizes
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilemoe.kernels.experts.triton.configs import Kernel

if TYPE_CHECKING:  # it imports torch, which arithmetic alone needs not
    from tilemoe.runtime.device import Device

# On which the kernels have run: Gluon's interface still moves between Triton's releases.
TRITON_VERSIONS = ("3.6.", "3.9.")
CAPABILITY = 90
SHARED_BYTES = 227 * 1024  # what the stages below fill

CONSUMERS = 2  # consumer warp groups of a CTA, beside one producer warp group
CONSUMER_WARPS = 4
MAX_REGISTERS = 168  # a thread's, at launch: 65536 over three warp groups, before setmaxnreg trades them
WARPGROUP_M = 64  # M of wgmma
BLOCK_K = 64  # 128 bytes of a 16-bit type: the widest swizzle
EPILOGUE_N = 64  # columns of one epilogue store
ADDED_N = EPILOGUE_N // 2  # of one that adds: fp32, so as many bytes
COOPERATIVE_M = CONSUMERS * WARPGROUP_M  # the consumers share a tile
PINGPONG_BLOCKS = 3  # accumulators of 64 x 128 that a consumer's registers hold
PINGPONG_M = PINGPONG_BLOCKS * WARPGROUP_M  # each consumer has a tile of its own
STATIONARY_M = 1024  # rows that share one load of a weight's slices: more, and CTAs end at different times


@dataclass(frozen=True)
class TileConfig:
    """A tile of block_m x block_n, the pipeline's stages, and the registers of a consumer's and a producer's thread.

    Registers are multiples of 8; those of 256 consumer and 128 producer threads are at most 65536. b_stages: steps of
    the contraction whose B stays in shared memory for all of the tile's rows; 0: B streams, as A does.
    """

    block_m: int
    block_n: int
    num_stages: int
    consumer_registers: int
    producer_registers: int
    b_stages: int = 0


_COOPERATIVE = TileConfig(COOPERATIVE_M, 256, 4, 224, 56)
_PINGPONG = TileConfig(PINGPONG_M, 128, 4, 240, 32)
TILES: MappingProxyType[Kernel, TileConfig] = MappingProxyType(
    {
        "up_proj_act": _COOPERATIVE,
        "down_proj": _PINGPONG,
        "down_proj_dgrad_dact": _COOPERATIVE,
        "down_proj_wgrad": _COOPERATIVE,
        "up_proj_dgrad": _PINGPONG,
        "up_proj_wgrad": _COOPERATIVE,
    }
)
# Of down_proj and up_proj_dgrad with so short a contraction: B's 128 KB are all that shared memory has room for. With 8
# steps of 128 columns instead, up to 512, it was 5 to 9% slower than ping-pong.
STATIONARY = TileConfig(STATIONARY_M, 256, 8, 240, 24, 4)
# Beyond these contractions of up_proj_dgrad the portable kernel was faster: there is little epilogue to overlap.
# up_proj_act, down_proj_dgrad_dact and down_proj: within 1% of it or faster nearly everywhere (docs/lab/hopper.md).
MAX_CONTRACTION = 1024
MAX_CONTRACTION_OF_NARROW = 2048
NARROW = 2048  # of d
# Weight gradients contract over an expert's rows, on which no compile-time choice may depend. down_proj_wgrad is faster
# with few rows, up to 9% slower with thousands; up_proj_wgrad no faster with thousands from this width of dh on.
MAX_WIDTH_OF_DH = 2047
# Activations whose B1 epilogue is a loop over slices: unrolled, their code does not fit the instruction cache, and took
# up to 2.4 times as long. The loop moves registers, which made swiglu's kernel 3 to 9% slower.
ACTIVATIONS_IN_A_LOOP = ("swiglu_oai", "swiglu_clamped", "geglu")
# Threadblock swizzle where the output has more column tiles than this: all row tiles of an expert by SWIZZLE_TILES
# column tiles, then the next ones. In row-major order a wave of tiles reads about 40 GB/s of weights for each column
# tile. Measured: 6 to 16 column tiles (no gain or a loss), 56, 112.
MAX_COLUMN_TILES = 32
SWIZZLE_TILES = 8  # 8 column tiles of 256 by 132 / 8 row tiles of 128 are nearly a square
MIN_WIDTH = 64  # of d and n: narrower, most of a tile would be padding


def why_unsupported(device: Device, triton_version: str) -> str | None:
    """Why the Hopper kernels cannot run on a GPU with this release of Triton; None if they can."""
    if device.capability != CAPABILITY:
        return "the Hopper kernels need compute capability 9.0"
    if device.shared_bytes < SHARED_BYTES:
        return f"the Hopper kernels need {SHARED_BYTES} bytes of shared memory"
    if not triton_version.startswith(TRITON_VERSIONS):
        return f"the Hopper kernels need Triton {' or '.join(v + 'x' for v in TRITON_VERSIONS)}, not {triton_version}"
    return None


def tile_of(kernel: Kernel, width_in: int) -> TileConfig:
    """Of a contraction of that length."""
    is_short = width_in <= STATIONARY.b_stages * BLOCK_K
    return STATIONARY if is_short and kernel in ("down_proj", "up_proj_dgrad") else TILES[kernel]


def is_faster(kernel: Kernel, width_in: int, width_out: int) -> bool:
    """Whether the Hopper kernel beats the portable one.

    Row GEMMs: the contraction's length and the output's width. Weight gradients: the widths of the gathered and of the
    contiguous operand.
    """
    if min(width_in, width_out) < MIN_WIDTH:
        return False
    if kernel == "up_proj_wgrad":
        return width_out <= MAX_WIDTH_OF_DH
    if kernel == "up_proj_dgrad":
        return width_in <= (MAX_CONTRACTION_OF_NARROW if width_out <= NARROW else MAX_CONTRACTION)
    return True
