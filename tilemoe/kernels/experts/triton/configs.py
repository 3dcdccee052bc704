"""Tile, stages and warps of the portable GEMMs: a pure function of the kernel, its widths, the dtype and the GPU.

There is no autotuning, and tiles do not depend on the number of tokens, so that a new batch size compiles nothing. Only
inference with few rows per expert has tiles of its own, of two heights (`small_m`).

T tokens · d hidden_size · n intermediate_size · E experts
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, get_args

if TYPE_CHECKING:  # it imports torch, which this module does not need
    from tilemoe.runtime.device import Device


Kernel = Literal[
    "up_proj_act", "down_proj", "down_proj_dgrad_dact", "down_proj_wgrad", "up_proj_dgrad", "up_proj_wgrad"
]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
WITH_ACTIVATION = ("up_proj_act", "down_proj_dgrad_dact")
WEIGHT_GRADS = ("down_proj_wgrad", "up_proj_wgrad")

WIDTH_MULTIPLE = 8  # n and d must be multiples of it: 8 elements of 16 bits are a 16-byte load
RAGGED_EXTENT = 1 << 30  # rows that any ragged descriptor (triton.tools.ragged_tma) declares, whatever its tensor has
MIN_BLOCK = 16  # the smallest tile dimension that tensor cores take
# Bands of columns (`band_tiles`), measured on an H100, whose column tiles are 128 or 256 wide (docs/lab/hopper.md).
ROW_MAJOR_K = 1024  # no bands for contractions up to this width: each band reads the rows again
ROW_MAJOR_TILES, ROW_MAJOR_TILES_OF_B1 = 8, 32  # no bands for outputs of at most this many column tiles
LONG_K = 2048  # from this contraction width on, down_proj (which gains) and up_proj_dgrad have narrower bands
_MOST_TILES, _MOST_TILES_OF_LONG_K, _MOST_TILES_WITH_ACTIVATION = 8, 4, 6  # most column tiles of a band
_BARRIER_BYTES = 1024  # shared memory reserved for the pipeline's mbarriers and for alignment


@dataclass(frozen=True)
class TileConfig:
    """A tile of block_m x block_n with k-blocks of block_k; in a gated up_proj, gate and up have block_n columns each.

    slices: number of column slices that the epilogue processes one after the other, to save registers.
    flatten: software-pipelines across tiles, so that the epilogue overlaps the next tile's loads.
    tma_stores: stores by TMA where the GPU has it, which costs shared memory and a wait.
    load_ahead: down_proj_dgrad's epilogue prefetches the next slice's h, which costs registers.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    slices: int = 1
    flatten: bool = False
    tma_stores: bool = True
    load_ahead: bool = False


class Limits(Protocol):
    """The device properties that a tile depends on: a `tilemoe.runtime.device.Device`, or a GPU that is not present."""

    @property
    def capability(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def interpreted(self) -> bool: ...


# _HOPPER was measured on an H200 (132 SMs, 227 KB of shared memory). The other tables are derived from shared
# memory and registers: they have the largest tile that leaves room for three stages.
_HOPPER: MappingProxyType[Kernel, TileConfig] = MappingProxyType(
    {
        "up_proj_act": TileConfig(128, 256, 64, 8, 4, slices=2, flatten=True, tma_stores=False),
        "down_proj": TileConfig(128, 256, 64, 8, 4, slices=2, flatten=True),
        "up_proj_dgrad": TileConfig(128, 256, 64, 8, 4, slices=2, flatten=True),
        "down_proj_dgrad_dact": TileConfig(128, 256, 64, 8, 3, slices=4, load_ahead=True),
        "down_proj_wgrad": TileConfig(128, 256, 64, 8, 7, slices=2),
        "up_proj_wgrad": TileConfig(128, 256, 64, 8, 6),
    }
)
_LARGE: MappingProxyType[str, TileConfig] = MappingProxyType(  # B200: also 227 KB; two accumulators fill tensor memory
    {
        "up_proj_act": TileConfig(128, 256, 64, 8, 3, slices=2, flatten=True),
        "up_proj_act interleaved": TileConfig(128, 256, 64, 8, 4, slices=4),  # with flatten it spills more
        "down_proj": TileConfig(128, 256, 64, 8, 3, flatten=True),
        "up_proj_dgrad": TileConfig(128, 256, 64, 8, 3, flatten=True),
        "down_proj_dgrad_dact": TileConfig(128, 256, 64, 8, 3, slices=4),
        "down_proj_wgrad": TileConfig(128, 256, 64, 8, 6),
        "up_proj_wgrad": TileConfig(128, 256, 64, 8, 6),
    }
)
LARGEST_TILE = _HOPPER["down_proj"]
_MEDIUM = TileConfig(128, 128, 64, 8, 3, slices=2)  # A100: 163 KB
_SMALL = TileConfig(128, 128, 32, 8, 3, slices=2)  # RTX and whatever else has 99 KB
_TINY = TileConfig(64, 128, 32, 4, 3, slices=2)  # 64 KB
_FP32 = TileConfig(64, 64, 32, 8, 3, slices=2)
_INTERPRETED = TileConfig(16, 32, 16, 4, 1, slices=2)

# For row GEMMs with a weight in 4 bits. A stage holds rows and codes; the decoded weight has a single buffer.
_PACKED = TileConfig(128, 128, 64, 8, 3, slices=2)
_PACKED_FP32 = TileConfig(64, 64, 32, 8, 3, slices=2)
_PACKED_INTERPRETED = TileConfig(16, 128, 64, 4, 1, slices=2)

_LARGE_BYTES, _MEDIUM_BYTES, _SMALL_BYTES = 220 * 1024, 160 * 1024, 96 * 1024

# Mean rows per expert: up to the first, a row GEMM is bound by reading the weights; up to the second, most experts'
# rows also fit the tensor cores' smallest M.
_FEW_ROWS, _VERY_FEW_ROWS = 32, 8


def band_tiles(kernel: Kernel, column_tiles: int, width_in: int) -> int:
    """Threadblock swizzle of the row GEMMs (up_proj, down_proj, down_proj_dgrad, up_proj_dgrad): the number of column
    tiles in a band, or 0 for plain row-major order.

    All row tiles of all experts are walked within one band of columns before the next band; bands are about equally
    wide. In row-major order a wave of tiles would read few rows and all of a wide weight.
    """
    row_major = ROW_MAJOR_TILES_OF_B1 if kernel == "down_proj_dgrad_dact" else ROW_MAJOR_TILES
    if width_in <= ROW_MAJOR_K or column_tiles <= row_major:
        return 0
    if kernel in WITH_ACTIVATION:
        most = _MOST_TILES_WITH_ACTIVATION
    else:
        most = _MOST_TILES_OF_LONG_K if width_in >= LONG_K else _MOST_TILES
    return -(-column_tiles // -(-column_tiles // most))


def why_unsupported(*widths: int) -> str | None:
    """Why the Triton kernels cannot compute with these d and n; None if they can. torch.compile can trace it."""
    if any(width % WIDTH_MULTIPLE for width in widths):
        return f"hidden_size and intermediate_size must be multiples of {WIDTH_MULTIPLE} for the Triton kernels"
    return None


def choose_tile(
    kernel: Kernel, rows_width: int, out_width: int, itemsize: int, device: Limits, gate_up: str | None = None
) -> TileConfig:
    """The tile of ``kernel`` for elements of ``itemsize`` bytes, no wider than the widths' next power of two.

    Row GEMMs: ``rows_width`` is K and ``out_width`` is N (for up_proj the columns of a). Weight gradients: the widths
    of the gathered and of the contiguous operand.
    ``gate_up``: the layout of gate and up in h; None if the kernel has no h or the activation no gate.
    """
    tile = _base_tile(kernel, itemsize, device, gate_up)
    return _fit(kernel, tile, rows_width, out_width, itemsize, device.shared_bytes, gate_up)


def small_m(num_rows: int, num_experts: int) -> int | None:
    """The tile height if experts have so few rows that reading the weights bounds the GEMMs, else None.

    Only this choice, between two tile heights, depends on the number of tokens.
    """
    if num_rows > _FEW_ROWS * num_experts:
        return None
    return 16 if num_rows <= _VERY_FEW_ROWS * num_experts else 64


def choose_small_m_tile(
    kernel: Kernel, block_m: int, rows_width: int, out_width: int, itemsize: int, device: Device, gate_up: str | None
) -> TileConfig:
    """The tile of ``kernel`` with the block_m that `small_m` gives, small enough for two CTAs per SM: the prologue and
    epilogue of one overlap the loads of the other. Arguments: as for `choose_tile`.
    """
    tile = _base_small_m_tile(block_m, itemsize, device)
    return _fit(kernel, tile, rows_width, out_width, itemsize, device.shared_bytes // 2, gate_up)


def _fit(
    kernel: Kernel, tile: TileConfig, rows_width: int, out_width: int, itemsize: int, budget: int, gate_up: str | None
) -> TileConfig:
    """``tile`` shrunk to the widths, with as many of its stages as fit in ``budget`` bytes of shared memory."""
    parts = _parts(kernel, gate_up)
    across = cover(out_width, tile.block_n // parts)
    if kernel in WEIGHT_GRADS:
        tile = replace(tile, block_m=cover(rows_width, tile.block_m), block_n=across)
    else:
        tile = replace(tile, block_k=cover(rows_width, tile.block_k), block_n=across)
    if gate_up == "interleaved":  # deinterleaving leaves no registers for a prefetch
        tile = replace(tile, load_ahead=False)
    while tile.slices > 1 and tile.block_n // tile.slices < MIN_BLOCK:
        tile = replace(tile, slices=tile.slices // 2)
    if itemsize == 2 and tile.block_m * tile.block_n * parts <= 64 * 128:
        tile = replace(tile, num_warps=min(tile.num_warps, 4))
    while shared_bytes(kernel, tile, itemsize, gate_up) > budget:
        assert tile.num_stages > 1, f"{kernel}: no tile fits {budget} bytes of shared memory"
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def tile_rows(itemsize: int, device: Device) -> int:
    """block_m of the row GEMMs, the same for all of them, so that they share one tile list."""
    return _base_tile("down_proj", itemsize, device).block_m


def choose_packed_tile(rows_width: int, itemsize: int, device: Device) -> TileConfig:
    """The tile of a row GEMM with a weight in 4 bits. Its block_m is `tile_rows`, to share the tile list. Its block_k
    divides ``rows_width``, the width of the contraction and a multiple of 32."""
    block_k = 32 if itemsize == 4 or rows_width % 64 else 64
    if device.interpreted:
        return replace(_PACKED_INTERPRETED, block_k=block_k)
    tile = _PACKED_FP32 if itemsize == 4 else _PACKED
    tile = replace(tile, block_m=tile_rows(itemsize, device), block_k=block_k)
    budget = device.shared_bytes - _BARRIER_BYTES - tile.block_n * tile.block_k * itemsize
    stage = (
        tile.block_m * tile.block_k * itemsize + tile.block_n * tile.block_k // 2 + 4 * (tile.block_n + tile.block_k)
    )
    return replace(tile, num_stages=max(1, min(tile.num_stages, budget // stage)))


def packed_registers(itemsize: int, device: Device) -> int | None:
    """Register limit per thread of a row GEMM with a weight in 4 bits. With it two CTAs share an SM, and one decodes
    while the other multiplies. None (no limit, one CTA per SM) where the tensor cores read operands from registers.
    """
    return 128 if itemsize == 2 and 90 <= device.capability < 120 else None


def shared_bytes(kernel: Kernel, tile: TileConfig, itemsize: int, gate_up: str | None = None) -> int:
    """An upper bound of a CTA's shared memory in bytes; ``gate_up`` as in `choose_tile`."""
    columns = tile.block_n * _parts(kernel, gate_up)
    buffers = tile.num_stages
    if kernel in WEIGHT_GRADS:
        buffers = (tile.num_stages + 1) // 2  # half of the stages prefetch the gather's indices
    operands = buffers * (tile.block_m + columns) * tile.block_k * itemsize
    # The epilogue stages a slice of its output in shared memory; with an activation two or (interleaved) three of them.
    staging = tile.block_m * tile.block_n * itemsize // tile.slices
    if kernel in WITH_ACTIVATION:
        staging *= 3 if gate_up == "interleaved" else 2
    return operands + staging + _BARRIER_BYTES


def choose_bias_products_tile(num_experts: int, itemsize: int, device: Device) -> TileConfig:
    """The tile of ``do b2^T`` (T, E), contracted over d; two CTAs fit on an SM."""
    block_n = cover(num_experts, _max_experts(itemsize, device))
    block_m = MIN_BLOCK if device.interpreted else max(64, block_n)
    return _dense_tile(block_m, block_n, 1, itemsize, device, device.shared_bytes // 2, max_stages=6)


def choose_scores_tile(num_experts: int, parts: int, itemsize: int, device: Device) -> TileConfig:
    """The tile of ``do^T scores`` (d, E), contracted over the tokens; each score is stored in ``parts`` parts."""
    block_n = cover(num_experts, _max_experts(itemsize, device))
    block_m = MIN_BLOCK if device.interpreted else 64 if itemsize == 4 else 128
    return _dense_tile(block_m, block_n, parts, itemsize, device, device.shared_bytes, max_stages=4)


def stage_bytes(tile: TileConfig, parts: int, itemsize: int) -> int:
    """Shared memory of one stage of a dense GEMM with ``parts`` times block_n columns."""
    return (tile.block_m + parts * tile.block_n) * tile.block_k * itemsize


def _max_experts(itemsize: int, device: Device) -> int:
    if device.interpreted:
        return MIN_BLOCK
    return 128 if itemsize == 2 and device.has_tma else 64  # loads by pointer need registers for addresses


def _dense_tile(
    block_m: int, block_n: int, parts: int, itemsize: int, device: Device, budget: int, max_stages: int
) -> TileConfig:
    """The tile with as many stages as fit in ``budget`` bytes of shared memory; a k-block is 128 bytes wide."""
    block_k = MIN_BLOCK if device.interpreted else 128 // itemsize
    num_warps = 4 if block_m * parts * block_n <= 64 * 128 and itemsize == 2 else 8
    tile = TileConfig(block_m, block_n, block_k, num_warps, 1)
    fitting = (budget - _BARRIER_BYTES) // stage_bytes(tile, parts, itemsize)
    return replace(tile, num_stages=max(1, min(max_stages, fitting)))


def _parts(kernel: Kernel, gate_up: str | None) -> int:
    return 2 if kernel == "up_proj_act" and gate_up is not None else 1


def _base_tile(kernel: Kernel, itemsize: int, device: Limits, gate_up: str | None = None) -> TileConfig:
    if device.interpreted:
        return _INTERPRETED
    if itemsize == 4:
        return _FP32
    if device.shared_bytes >= _LARGE_BYTES:
        return _HOPPER[kernel] if device.capability == 90 else _LARGE.get(f"{kernel} {gate_up}", _LARGE[kernel])
    if device.shared_bytes >= _MEDIUM_BYTES:
        return _MEDIUM
    if device.shared_bytes < _SMALL_BYTES:
        return _TINY
    return _SMALL


def _base_small_m_tile(block_m: int, itemsize: int, device: Device) -> TileConfig:
    if device.interpreted:
        return replace(_INTERPRETED, block_m=min(block_m, 32), slices=1)
    if itemsize == 4:
        return TileConfig(block_m, 32, 32, 4, 4)
    if device.shared_bytes >= _LARGE_BYTES:
        return TileConfig(16, 64, 128, 4, 5) if block_m == 16 else TileConfig(64, 128, 64, 4, 4)
    if block_m == 16:
        return TileConfig(16, 64, 64, 4, 5)
    return TileConfig(64, 64, 64 if device.shared_bytes >= _MEDIUM_BYTES else 32, 4, 4)


def cover(width: int, limit: int) -> int:
    """The least power of two that is at least ``width``, kept between MIN_BLOCK and ``limit``."""
    return max(MIN_BLOCK, min(limit, 1 << max(width - 1, 0).bit_length()))
