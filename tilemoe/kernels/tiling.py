"""Which tile each GEMM computes per step: a pure function of the kernel, its widths, the dtype and the GPU.

Nothing is tuned at run time, and the number of tokens takes no part, so that a new batch size compiles nothing. Only
inference with few rows per expert has tiles of its own, two of them (`few_rows`).

M rows of a tile · N its columns · K the step of the contraction · T tokens (varlen) · E experts
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Kernel = Literal[
    "up_proj_act",
    "down_proj",
    "down_proj_act_grad",
    "down_proj_weight_grad",
    "up_proj_act_grad",
    "up_proj_weight_grad",
]
KERNELS: tuple[Kernel, ...] = (
    "up_proj_act",
    "down_proj",
    "down_proj_act_grad",
    "down_proj_weight_grad",
    "up_proj_act_grad",
    "up_proj_weight_grad",
)
WITH_ACTIVATION = ("up_proj_act", "down_proj_act_grad")
WEIGHT_GRADS = ("down_proj_weight_grad", "up_proj_weight_grad")

WIDTH_MULTIPLE = 8  # of n and d: 16 bytes of a 16-bit type, the least that a wide load takes
_MIN_BLOCK = 16  # what a matrix unit takes at least in any dimension
_BARRIER_BYTES = 1024  # room for the pipeline's barriers and for alignment


@dataclass(frozen=True)
class Device:
    """What a GPU offers to one program. ``capability``: 10 * major + minor, 0 for other makes than NVIDIA.

    ``interpreted``: Triton's interpreter plays this GPU on a CPU; it gets the smallest tiles.
    """

    capability: int
    shared_bytes: int
    multiprocessors: int
    interpreted: bool = False

    @property
    def has_tma(self) -> bool:
        return self.capability >= 90


@dataclass(frozen=True)
class Tile:
    """block_m x block_n of the output per step of block_k; gated: gate and up have block_n columns each.

    ``slices``: pieces that the columns are cut into in the epilogue, where registers are short.
    ``flatten``: software-pipeline across tiles, too, so that the epilogue overlaps the next tile's loads.
    ``tma_stores``: whether results leave by TMA where the GPU has it. It takes shared memory and a wait for it.
    ``load_ahead``: read the next slice's h before working on one, which takes registers.
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


# Measured on an H200 (132 multiprocessors, 227 KB of shared memory); the other rows follow from shared memory and
# registers: as large a tile as leaves three buffers.
_HOPPER: MappingProxyType[Kernel, Tile] = MappingProxyType(
    {
        "up_proj_act": Tile(128, 256, 64, 8, 4, slices=2, flatten=True, tma_stores=False),
        "down_proj": Tile(128, 256, 64, 8, 4, slices=2, flatten=True),
        "up_proj_act_grad": Tile(128, 256, 64, 8, 4, slices=2, flatten=True),
        "down_proj_act_grad": Tile(128, 256, 64, 8, 3, slices=4, load_ahead=True),
        "down_proj_weight_grad": Tile(128, 256, 64, 8, 7, slices=2),
        "up_proj_weight_grad": Tile(128, 256, 64, 8, 6),
    }
)
_LARGE: MappingProxyType[Kernel, Tile] = MappingProxyType(  # B200: 227 KB, too
    {
        "up_proj_act": Tile(128, 256, 64, 8, 4, slices=2),
        "down_proj": Tile(128, 256, 64, 8, 3, flatten=True),
        "up_proj_act_grad": Tile(128, 256, 64, 8, 3, flatten=True),
        "down_proj_act_grad": Tile(128, 256, 64, 8, 3, slices=4),
        "down_proj_weight_grad": Tile(128, 256, 64, 8, 6),
        "up_proj_weight_grad": Tile(128, 256, 64, 8, 6),
    }
)
_MEDIUM = Tile(128, 128, 64, 8, 3, slices=2)  # A100: 163 KB
_SMALL = Tile(128, 128, 32, 8, 3, slices=2)  # RTX and whatever else has 99 KB
_TINY = Tile(64, 128, 32, 4, 3, slices=2)  # 64 KB
_FP32 = Tile(64, 64, 32, 8, 3, slices=2)
_INTERPRETED = Tile(16, 32, 16, 4, 1, slices=2)

_LARGE_BYTES, _MEDIUM_BYTES, _SMALL_BYTES = 220 * 1024, 160 * 1024, 96 * 1024

# Rows of a mean expert up to which a GEMM over the rows is bound by reading the weights, and up to which most experts'
# rows fit the least that a matrix unit takes.
_FEW_ROWS, _VERY_FEW_ROWS = 32, 8


def problem_of_widths(*widths: int) -> str | None:
    """Why the Triton kernels cannot compute with these d and n, in a few words; None if they can. Traceable."""
    if any(width % WIDTH_MULTIPLE for width in widths):
        return f"hidden_size and intermediate_size must be multiples of {WIDTH_MULTIPLE} for the Triton kernels"
    return None


def choose_tile(
    kernel: Kernel, rows_width: int, out_width: int, itemsize: int, device: Device, gate_up: str | None = None
) -> Tile:
    """The tile of ``kernel`` for elements of ``itemsize`` bytes.

    Row GEMMs: ``rows_width`` is the contraction's length, ``out_width`` the columns of the output, of one part where
    gate and up are computed side by side. Weight gradients: the widths of the gathered and of the contiguous operand.
    ``gate_up``: the layout of h, None where the kernel has none or the activation is not gated. A tile never exceeds
    the widths by more than a power of two needs.
    """
    return _fit(kernel, _base_tile(kernel, itemsize, device), rows_width, out_width, itemsize, device, gate_up)


def few_rows(num_rows: int, num_experts: int) -> int | None:
    """M of the tiles where experts have so few rows that their weights' bytes bound the GEMMs; None where they do not.

    There are two such tiles, which the number of tokens chooses between: it takes no other part.
    """
    if num_rows > _FEW_ROWS * num_experts:
        return None
    return 16 if num_rows <= _VERY_FEW_ROWS * num_experts else 64


def choose_few_rows_tile(
    kernel: Kernel, block_m: int, rows_width: int, out_width: int, itemsize: int, device: Device, gate_up: str | None
) -> Tile:
    """As `choose_tile`, of ``block_m`` rows, which `few_rows` gives, and such that two programs share a multiprocessor:
    while one begins or ends, the other's loads are in flight.
    """
    half = replace(device, shared_bytes=device.shared_bytes // 2)
    return _fit(kernel, _base_few_rows_tile(block_m, itemsize, device), rows_width, out_width, itemsize, half, gate_up)


def _fit(
    kernel: Kernel, tile: Tile, rows_width: int, out_width: int, itemsize: int, device: Device, gate_up: str | None
) -> Tile:
    """``tile`` cut down to the widths, and to as many stages as the shared memory holds."""
    parts = _parts(kernel, gate_up)
    across = _cover(out_width, tile.block_n // parts)
    if kernel in WEIGHT_GRADS:
        tile = replace(tile, block_m=_cover(rows_width, tile.block_m), block_n=across)
    else:
        tile = replace(tile, block_k=_cover(rows_width, tile.block_k), block_n=across)
    if gate_up == "interleaved":  # taking gate and up apart leaves no registers for it
        tile = replace(tile, load_ahead=False)
    while tile.slices > 1 and tile.block_n // tile.slices < _MIN_BLOCK:
        tile = replace(tile, slices=tile.slices // 2)
    if itemsize == 2 and tile.block_m * tile.block_n * parts <= 64 * 128:
        tile = replace(tile, num_warps=min(tile.num_warps, 4))
    while shared_bytes(kernel, tile, itemsize, gate_up) > device.shared_bytes:
        assert tile.num_stages > 1, f"{kernel}: no tile fits {device.shared_bytes} bytes of shared memory"
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def tile_rows(itemsize: int, device: Device) -> int:
    """M of the row GEMMs of these kernels, which share one list of tiles."""
    return _base_tile("down_proj", itemsize, device).block_m


def shared_bytes(kernel: Kernel, tile: Tile, itemsize: int, gate_up: str | None = None) -> int:
    """Upper bound of the shared memory that one program takes; ``gate_up`` as in `choose_tile`."""
    columns = tile.block_n * _parts(kernel, gate_up)
    buffers = tile.num_stages
    if kernel in WEIGHT_GRADS:
        buffers = (tile.num_stages + 1) // 2  # a load that needs an index loaded first spends stages on that
    operands = buffers * (tile.block_m + columns) * tile.block_k * itemsize
    # Results pass through shared memory on their way out: a slice, or beside an activation two at a time.
    staging = tile.block_m * tile.block_n * itemsize // tile.slices
    if kernel in WITH_ACTIVATION:
        staging *= 3 if gate_up == "interleaved" else 2
    return operands + staging + _BARRIER_BYTES


def _parts(kernel: Kernel, gate_up: str | None) -> int:
    return 2 if kernel == "up_proj_act" and gate_up is not None else 1


def _base_tile(kernel: Kernel, itemsize: int, device: Device) -> Tile:
    if device.interpreted:
        return _INTERPRETED
    if itemsize == 4:
        return _FP32
    if device.shared_bytes >= _LARGE_BYTES:
        return (_HOPPER if device.capability == 90 else _LARGE)[kernel]
    if device.shared_bytes >= _MEDIUM_BYTES:
        return _MEDIUM
    if device.shared_bytes < _SMALL_BYTES:
        return _TINY
    return _SMALL


def _base_few_rows_tile(block_m: int, itemsize: int, device: Device) -> Tile:
    if device.interpreted:
        return replace(_INTERPRETED, block_m=min(block_m, 32), slices=1)
    if itemsize == 4:
        return Tile(block_m, 32, 32, 4, 4)
    if device.shared_bytes >= _LARGE_BYTES:
        return Tile(16, 64, 128, 4, 5) if block_m == 16 else Tile(64, 128, 64, 4, 4)
    if block_m == 16:
        return Tile(16, 64, 64, 4, 5)
    return Tile(64, 64, 64 if device.shared_bytes >= _MEDIUM_BYTES else 32, 4, 4)


def _cover(width: int, limit: int) -> int:
    """The power of two that covers ``width``, within what a matrix unit takes and ``limit``."""
    return max(_MIN_BLOCK, min(limit, 1 << max(width - 1, 0).bit_length()))
