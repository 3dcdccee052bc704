"""What the FP8 GEMMs read: rows quantised for a call, weights once for each of their values; and rows again of them.

E experts
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilemoe.kernels.experts.base import Operand
from tilemoe.kernels.experts.quantize import WEIGHTS
from tilemoe.kernels.experts.triton_fp8.quantize import dense_rows_launch, rows_launch, weight_launch
from tilemoe.runtime.device import gpu
from tilemoe.runtime.launch_trace import recorder
from tilemoe.runtime.precompile import withholds_values
from tilemoe.runtime.weight_cache import cache_of_unchanged_weights

_MIN_CAPABILITY = 89  # Ada's are the first instructions that multiply e4m3, and convert to it


class _Kept(NamedTuple):
    """The operands of a weight, what it was when they were made, and the stream that makes them."""

    version: int
    address: int
    stream: int
    operands: dict[int, Operand]  # by the dimension that is contracted


# A cache of a process alone: an entry ends with its weight, and counts only while the version counter stands.
_KEPT = WeakTensorKeyDictionary()


def quantized_rows(rows: Tensor | Operand) -> Operand:
    """Rows (R, p), each contiguous, unless they are quantised already."""
    if isinstance(rows, Operand):
        return rows
    launch, operand = rows_launch(rows)
    if rows.shape[0]:
        launch.run()
    return operand


def dequantized_rows(rows: Operand) -> Tensor:
    """The values (R, p) of what `quantized_rows` gave, in the dtype that was quantised."""
    launch, values = dense_rows_launch(rows)
    if values.shape[0]:
        launch.run()
    return values


def why_no_e4m3(device: torch.device) -> str | None:
    """Why the kernels have no e4m3 on this device, in a few words; None if they have."""
    if device.type == "cuda" and gpu(device.index or 0).capability < _MIN_CAPABILITY:
        return f"e4m3 needs compute capability {_MIN_CAPABILITY / 10}"
    return None


def quantized_weight(weight: Tensor | Operand, contracted: int) -> Operand:
    """A weight (E, p, q) as what is contiguous along ``contracted``, 1 or 2, unless it is quantised already.

    It is kept until the weight is written to, as PyTorch counts it: by the optimiser's step, not through ``.data``.
    Among processes it is kept within `weights_unchanged`. A 16-bit weight that will be trained is quantised for both
    contractions at once.
    """
    if isinstance(weight, Operand):
        return weight
    find, watcher = partial(_data_and_scale, contracted=contracted), recorder()
    data, scale = find(weight) if watcher is None or _cache(weight) is None else watcher.kept(find, weight)
    return Operand(data, scale, WEIGHTS, weight.dtype)


def _data_and_scale(weight: Tensor, contracted: int) -> tuple[Tensor, Tensor]:
    """Those that are kept, or made now."""
    cache = _cache(weight)
    if cache is None:
        operand = _quantize(weight, (contracted,))[contracted]
        return operand.data, operand.scale
    kept, now = cache.get(weight), (weight._version, weight.data_ptr(), _stream_of(weight))
    operands = kept.operands if kept is not None and kept[:3] == now else {}
    if contracted not in operands:
        both = weight.requires_grad and weight.element_size() == 2
        # A new dict: a withheld launch has written nothing, which must not join what is kept.
        operands = operands | _quantize(weight, (1, 2) if both else (contracted,))
        if not withholds_values():
            cache[weight] = _Kept(*now, operands)
    operand = operands[contracted]
    return operand.data, operand.scale


def _quantize(weight: Tensor, contracted: tuple[int, ...]) -> dict[int, Operand]:
    launch, operands = weight_launch(weight, contracted)
    launch.run()
    return operands


def _stream_of(weight: Tensor) -> int:
    """The current one: nobody makes another wait until the operands are made."""
    return torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0


def _cache(weight: Tensor) -> WeakTensorKeyDictionary | None:
    """Where a later call may find the same operands: the version counter tells of every change.

    Where another process may change the weight (FSDP's all-gather leaves the counter), only while weights are known to
    stand; in a CUDA graph, which is to quantise whenever it is replayed, never.
    """
    if not weight.is_leaf or weight.is_inference() or (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return cache_of_unchanged_weights() if dist.is_available() and dist.is_initialized() else _KEPT
