"""Per-kernel configuration of the Hopper GEMMs: tile, stages, registers, limits. Pure Python, measured on an H200.

The choice of backend, the host side and the kernels all read this module; no other file has a tile size.

d hidden_size · n intermediate_size · BM, BN, BK tile sizes
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tilemoe.config import quantizes_wgrad
from tilemoe.kernels.experts.triton.configs import Kernel

if TYPE_CHECKING:  # it imports torch, which this module does not need
    from tilemoe.runtime.device import Device

# Releases that the kernels have run on: Gluon's API still changes between Triton's releases.
TRITON_VERSIONS = ("3.6.", "3.9.")
CAPABILITY = 90
SHARED_BYTES = 227 * 1024  # shared memory of a CTA; the stages below are chosen to fill it

CONSUMERS = 2  # consumer warp groups of a CTA, besides one producer
CONSUMER_WARPS = 4
MAX_REGISTERS = 168  # per thread at launch: 65536 over three warp groups; setmaxnreg then gives consumers more
WARPGROUP_M = 64  # M of wgmma
BLOCK_K = 64  # 128 bytes of a 16-bit type: the widest swizzle
EPILOGUE_N = 64  # columns of one epilogue TMA store
ADDED_N = EPILOGUE_N // 2  # columns of one epilogue TMA reduce-add: fp32, so the same bytes
COOPERATIVE_M = CONSUMERS * WARPGROUP_M  # cooperative: the consumers share a tile
PINGPONG_BLOCKS = 3  # accumulators of 64 x 128 that a consumer's registers hold
PINGPONG_M = PINGPONG_BLOCKS * WARPGROUP_M  # ping-pong: each consumer has tiles of its own
STATIONARY_M = 1024  # rows that share one load of a weight's k-blocks; with more, CTAs finish at different times


@dataclass(frozen=True)
class TileConfig:
    """A tile of block_m x block_n, the pipeline's stages, and setmaxnreg's registers per consumer and producer thread.

    Registers are multiples of 8; those of 256 consumer and 128 producer threads add up to at most 65536. b_stages: how
    many k-blocks of B stay in shared memory for all rows of the tile (weight-stationary); 0: B is streamed like A.
    """

    block_m: int
    block_n: int
    num_stages: int
    consumer_registers: int
    producer_registers: int
    b_stages: int = 0


_COOPERATIVE = TileConfig(COOPERATIVE_M, 256, 4, 224, 56)
_PINGPONG = TileConfig(PINGPONG_M, 128, 4, 240, 32)
# Weight-stationary tile of down_proj and up_proj_dgrad for contractions of up to 4 k-blocks: shared memory has no room
# for more than these 128 KB of B. With 8 k-blocks (512) of 128 columns it was 5 to 9% slower than ping-pong.
STATIONARY = TileConfig(STATIONARY_M, 256, 8, 240, 24, 4)
# Tiles for FP8 operands: of all row GEMMs, of row GEMMs with a stationary weight, and of the weight gradients.
FP8_TILE = TileConfig(COOPERATIVE_M, 256, 4, 224, 56)
FP8_STATIONARY = TileConfig(STATIONARY_M, 256, 8, 232, 40, 4)
FP8_WGRAD = TileConfig(COOPERATIVE_M, 256, 4, 240, 32)
CHUNK = 40  # most k-blocks (5120 rows) of a weight gradient that tensor cores sum; chunks are added in fp32
# Longest contractions of up_proj_dgrad for the Hopper kernel. Beyond them the portable one was faster, since there is
# little epilogue to overlap. up_proj_act, down_proj_dgrad_dact and down_proj need no limit: nearly everywhere they are
# faster than the portable kernel or within 1% of it (docs/lab/hopper.md).
MAX_CONTRACTION = 1024
MAX_CONTRACTION_OF_NARROW = 2048
NARROW = 2048  # largest d for which the limit is MAX_CONTRACTION_OF_NARROW
# Weight gradients contract over an expert's rows, and no compile-time choice may depend on their number. Compared to
# the portable kernel, down_proj_wgrad is faster with few rows and up to 9% slower with thousands; up_proj_wgrad of a
# wider dh than this is not faster with thousands.
MAX_WIDTH_OF_DH = 2047
# Activations for which down_proj_dgrad's epilogue is a rolled loop over slices. Their unrolled code does not fit the
# instruction cache and took up to 2.4 times as long. Other activations are unrolled: the loop's register moves made
# swiglu's kernel 3 to 9% slower.
ACTIVATIONS_IN_A_LOOP = ("swiglu_oai", "swiglu_clamped", "geglu")
MIN_WIDTH = 64  # smallest d and n: below it, most of a tile would be padding


def why_unsupported(device: Device, triton_version: str) -> str | None:
    """Why the Hopper kernels cannot run on a GPU with this release of Triton; None if they can."""
    if device.capability != CAPABILITY:
        return "the Hopper kernels need compute capability 9.0"
    if device.shared_bytes < SHARED_BYTES:
        return f"the Hopper kernels need {SHARED_BYTES} bytes of shared memory"
    if not triton_version.startswith(TRITON_VERSIONS):
        return f"the Hopper kernels need Triton {' or '.join(v + 'x' for v in TRITON_VERSIONS)}, not {triton_version}"
    return None


class GemmRow(NamedTuple):
    """A kernel that computes some GEMMs with operands in one format, and its tile.

    kernel: "module:function" of this folder. contractions: the lengths of the contraction that it supports.
    why_slower: takes K and N (for weight gradients, the widths of the gathered and of the contiguous operand) and
    returns why to use the portable kernel instead, or None.
    """

    gemms: tuple[Kernel, ...]
    format: str
    kernel: str
    tile: TileConfig
    why_slower: Callable[[int, int], str | None]
    contractions: Container[int] = range(1 << 31)


def _narrow(width_in: int, width_out: int) -> str | None:
    return f"d or n is below {MIN_WIDTH}" if min(width_in, width_out) < MIN_WIDTH else None


def _long(width_in: int, width_out: int) -> str | None:
    longest = MAX_CONTRACTION_OF_NARROW if width_out <= NARROW else MAX_CONTRACTION
    return f"the contraction is longer than {longest}" if width_in > longest else _narrow(width_in, width_out)


def _wide(width_in: int, width_out: int) -> str | None:
    return f"dh is wider than {MAX_WIDTH_OF_DH}" if width_out > MAX_WIDTH_OF_DH else _narrow(width_in, width_out)


def _unquantised(width_in: int, width_out: int) -> str | None:
    return None if quantizes_wgrad(width_in, width_out) else "the weight gradient is too narrow to gain from FP8"


def _never(width_in: int, width_out: int) -> str | None:
    return None


# A GEMM uses the first row for it and its format that supports the contraction.
GEMMS = (
    GemmRow(("up_proj_act",), "dense", "gemm_gather_act:up_proj_act_kernel", _COOPERATIVE, _narrow),
    GemmRow(("down_proj_dgrad_dact",), "dense", "gemm_dgrad_dact:gemm_dgrad_dact_kernel", _COOPERATIVE, _narrow),
    GemmRow(
        ("down_proj", "up_proj_dgrad"), "dense", "gemm_stationary:gemm_stationary_kernel", STATIONARY, _narrow,
        range(STATIONARY.b_stages * BLOCK_K + 1),
    ),
    GemmRow(("down_proj",), "dense", "gemm_pingpong:gemm_rows_kernel", _PINGPONG, _narrow),
    GemmRow(("up_proj_dgrad",), "dense", "gemm_pingpong:gemm_rows_kernel", _PINGPONG, _long),
    GemmRow(("down_proj_wgrad",), "dense", "gemm_wgrad:gemm_wgrad_kernel", _COOPERATIVE, _narrow),
    GemmRow(("up_proj_wgrad",), "dense", "gemm_wgrad:gemm_wgrad_kernel", _COOPERATIVE, _wide),
    GemmRow(("up_proj_act",), "fp8", "gemm_gather_act:up_proj_act_kernel", FP8_TILE, _never),
    GemmRow(("down_proj_dgrad_dact",), "fp8", "gemm_dgrad_dact:gemm_dgrad_dact_kernel", FP8_TILE, _never),
    # Only if the k-blocks of two blocks divide the stages: then each consumer always waits at the same stages, whose
    # phases it has followed. Loads complete in any order, so another consumer's stage might be a phase behind.
    GemmRow(
        ("down_proj", "up_proj_dgrad"), "fp8", "gemm_stationary:gemm_stationary_kernel", FP8_STATIONARY, _never,
        (2 * BLOCK_K, 4 * BLOCK_K, 8 * BLOCK_K),
    ),
    GemmRow(("down_proj", "up_proj_dgrad"), "fp8", "gemm_cooperative:gemm_cooperative_kernel", FP8_TILE, _never),
    GemmRow(
        ("down_proj_wgrad", "up_proj_wgrad"), "fp8", "gemm_wgrad:gemm_transposed_kernel", FP8_WGRAD, _unquantised
    ),
)  # fmt: skip


@cache
def row_of(gemm: Kernel, width_in: int, form: str = "dense") -> GemmRow:
    """The row for a GEMM with operands in the format ``form`` and a contraction of length ``width_in``."""
    return next(row for row in GEMMS if gemm in row.gemms and row.format == form and width_in in row.contractions)


def tile_of(gemm: Kernel, width_in: int, form: str = "dense") -> TileConfig:
    """The tile of the row that `row_of` returns."""
    return row_of(gemm, width_in, form).tile


def why_slower(gemm: Kernel, width_in: int, width_out: int) -> str | None:
    """Why the portable kernel is used instead of the Hopper kernel with dense operands; None if it is not."""
    return row_of(gemm, width_in).why_slower(width_in, width_out)
