"""Operands of the FP8 GEMMs: rows, quantised in each call, and weights, quantised once and cached until they change.

E experts
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilemoe.kernels.experts.base import Operand
from tilemoe.kernels.experts.quantize import WEIGHTS
from tilemoe.kernels.experts.triton_fp8.quantize import (
    block_weight_launch,
    dense_rows_launch,
    row_weight_launch,
    rows_launch,
)
from tilemoe.runtime.device import gpu
from tilemoe.runtime.launch_trace import recorder
from tilemoe.runtime.precompile import withholds_values
from tilemoe.runtime.weight_cache import cache_of_unchanged_weights

_MIN_CAPABILITY = 89  # Ada is the first with instructions that multiply e4m3 and convert to it

Scales = Literal["rows", "blocks"]


class _Kept(NamedTuple):
    """A cache entry: a weight's operands, with its version and address and the stream when they were made."""

    version: int
    address: int
    stream: int
    operands: dict[tuple[Scales, int], Operand]  # (scales, contracted dimension) -> operand


# For a single process: an entry lives as long as its weight, and is valid while the version counter is unchanged.
_KEPT = WeakTensorKeyDictionary()


def quantized_rows(rows: Tensor | Operand) -> Operand:
    """``rows`` (R, p), each row contiguous, quantised with one scale per row; an `Operand` is returned as it is."""
    return rows if isinstance(rows, Operand) else quantized_blocks(rows, rows.shape[1])


def quantized_blocks(rows: Tensor, width: int) -> Operand:
    """``rows`` (R, p), each row contiguous, quantised with a scale for each ``width`` elements of a row."""
    launch, operand = rows_launch(rows, width)
    if rows.shape[0]:
        launch.run()
    return operand


def dequantized_rows(rows: Operand) -> Tensor:
    """Values (R, p) of what `quantized_rows` or `quantized_blocks` made, in the dtype that was quantised."""
    launch, values = dense_rows_launch(rows)
    if values.shape[0]:
        launch.run()
    return values


def why_no_e4m3(device: torch.device) -> str | None:
    """Why the kernels cannot use e4m3 on this device; None if they can."""
    if device.type == "cuda" and gpu(device.index or 0).capability < _MIN_CAPABILITY:
        return f"e4m3 needs compute capability {_MIN_CAPABILITY / 10}"
    return None


def row_weight(weight: Tensor | Operand, contracted: int) -> Operand:
    """``weight`` (E, p, q) with a scale for each line along dimension ``contracted``, 1 or 2, and contiguous along it.

    For up_proj, down_proj_dgrad and up_proj_dgrad. Cached as `_cached` says; an `Operand` is returned as it is.
    """
    if isinstance(weight, Operand):
        return weight
    block = (1, weight.shape[2]) if contracted == 2 else (weight.shape[1], 1)
    return _cached(weight, "rows", contracted, block)


def block_weight(weight: Tensor | Operand) -> Operand:
    """``weight`` (E, p, q) with a scale for each 128 x 128, contiguous: for down_proj. Cached as `_cached` says."""
    return weight if isinstance(weight, Operand) else _cached(weight, "blocks", 2, WEIGHTS)


def scales_of(weight: Operand) -> Scales:
    """Which of `row_weight` and `block_weight` made it."""
    return "blocks" if weight.block == WEIGHTS else "rows"


def _cached(weight: Tensor, scales: Scales, contracted: int, block: tuple[int, int]) -> Operand:
    """``weight`` quantised in blocks of ``block``.

    It is cached until PyTorch's version counter says that the weight was written to, which the optimiser's step
    advances and a write through ``.data`` does not. With several processes it is cached only within
    `weights_unchanged`.
    """
    find, watcher = partial(_data_and_scale, scales=scales, contracted=contracted), recorder()
    data, scale = find(weight) if watcher is None or _cache(weight) is None else watcher.kept(find, weight)
    return Operand(data, scale, block, weight.dtype)


def _data_and_scale(weight: Tensor, scales: Scales, contracted: int) -> tuple[Tensor, Tensor]:
    """(data, scale) from the cache, or quantised now."""
    cache, key = _cache(weight), (scales, contracted)
    if cache is None:
        operand = _quantize(weight, scales, contracted)
        return operand.data, operand.scale
    kept, now = cache.get(weight), (weight._version, weight.data_ptr(), _stream_of(weight))
    operands = kept.operands if kept is not None and kept[:3] == now else {}
    if key not in operands:
        # A new dict: a withheld launch has written nothing, and its operands must not get into the cache.
        operands = operands | {key: _quantize(weight, scales, contracted)}
        if not withholds_values():
            cache[weight] = _Kept(*now, operands)
    operand = operands[key]
    return operand.data, operand.scale


def _quantize(weight: Tensor, scales: Scales, contracted: int) -> Operand:
    if scales == "blocks":
        launch, operand = block_weight_launch(weight)
    elif contracted == 2:
        launch, operand = row_weight_launch(weight)
    else:
        launch, transposed = row_weight_launch(weight.transpose(1, 2))
        operand = transposed.transposed()
    launch.run()
    return operand


def _stream_of(weight: Tensor) -> int:
    """The current stream: an entry is valid on the stream that made it only, since no other waits for it."""
    # torch.cuda.current_stream would make an object in each call.
    return triton.runtime.driver.active.get_current_stream(weight.device.index) if weight.is_cuda else 0


def _cache(weight: Tensor) -> WeakTensorKeyDictionary | None:
    """The cache that may hold this weight's operands; None where the version counter does not show every change.

    With several processes (FSDP's all-gather does not advance the counter) it is that of `weights_unchanged`, if one is
    open. No cache while a CUDA graph is captured: each replay is to quantise anew.
    """
    if not weight.is_leaf or weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return cache_of_unchanged_weights() if dist.is_available() and dist.is_initialized() else _KEPT
