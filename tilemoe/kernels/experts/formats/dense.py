"""Dense operands, which are tensors of the layer's dtype with any strides, and the layouts of their gradients.

E experts · R routed rows · p, q a weight's last two dimensions
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes that a layer may have
_BLOCK_BYTES = 1 << 20  # a block of fp32 rows and its temporaries stay in a core's cache


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of ``dtype`` values are accumulated: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_column_major(weight: Tensor) -> bool:
    """Whether a weight (E, p, q) is dense and contiguous along p, like a transposed view of a contiguous (E, q, p)."""
    return not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def empty_weight_grad(like: Tensor, shape: Sequence[int], column_major: bool) -> Tensor:
    """An uninitialised dense gradient of ``shape`` (E, p, q), contiguous along p if ``column_major``, else along q."""
    _, p, q = shape
    return like.new_empty_strided(shape, (p * q, 1, p) if column_major else (p * q, q, 1))


def row_blocks(rows: Tensor) -> list[slice]:
    """Row slices for element-wise work on ``rows`` (R, .): cache-sized in eager mode on a CPU, else one slice.

    docs/lab/cpu.md has the measured gain.
    """
    count, step = rows.shape[0], max(1, _BLOCK_BYTES // (4 * rows.shape[1]))
    if rows.device.type != "cpu" or torch.compiler.is_compiling() or count <= step:
        return [slice(0, count)]  # a traced loop would specialise the graph to this number of rows
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
