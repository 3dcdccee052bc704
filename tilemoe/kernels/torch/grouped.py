"""The two grouped GEMMs in PyTorch: one matrix per expert applied to its rows, and one outer-product sum per expert.

E experts · R_max row capacity · p, q any widths

On a GPU, `F.grouped_mm` is used where it takes the dtype and the strides: it needs no row count on the host. Elsewhere
(fp64, rows not a multiple of 16 bytes) a loop over experts does, which reads the row counts back.

On a CPU `grouped_mm` is a loop itself, and for the 16-bit dtypes the loop here is a different one: oneDNN compiles a
kernel for every new shape, 0.75 ms each, and the rows of an expert change with every batch. So 16-bit GEMMs over rows
are cut into calls of a few recurring row counts (docs/notes/cpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.routing.plan import RoutingPlan

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROW_STEP = 64  # rows: large enough for a GEMM to be efficient, small enough to waste little at an expert's end
_ALIGNMENT = 16  # bytes: what grouped_mm asks of the leading stride and of the base address


def rows_times_experts(rows: Tensor, weight: Tensor, bias: Tensor | None, plan: RoutingPlan) -> Tensor:
    """``rows_r @ weight_e (+ bias_e)`` for each row r of expert e: (R_max, q).

    rows (R_max, p) expert-major, weight (E, p, q) of any strides, bias (E, q). Rows past R are left uninitialised.
    """
    compiles_each_shape = _compiles_each_shape(rows)
    if not compiles_each_shape and _is_groupable(rows) and _is_groupable(weight):
        # grouped_mm pads the row stride to 16 bytes where q is not a multiple of that.
        out = F.grouped_mm(rows, weight, offs=plan.row_start_of_expert[1:]).contiguous()
        return out if bias is None else out.add_(bias.index_select(0, expert_of_row(plan)))
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    multiply = _multiply_in_recurring_shapes if compiles_each_shape else _multiply
    for expert, span in expert_spans(plan):
        multiply(rows[span], weight[expert], None if bias is None else bias[expert], out[span])
    return out


def outer_per_expert(left: Tensor, right: Tensor, plan: RoutingPlan) -> Tensor:
    """``sum over the rows r of expert e of left_r^T right_r``: (E, p, q), zeros for an expert without rows.

    left (R_max, p), right (R_max, q), both expert-major.
    """
    # On a CPU the loop is faster: grouped_mm's fp32 form takes twice its time (docs/notes/cpu.md).
    if left.device.type != "cpu" and _is_groupable(left) and _is_groupable(right):
        return F.grouped_mm(left.t(), right, offs=plan.row_start_of_expert[1:]).contiguous()
    out = left.new_zeros(plan.num_experts, left.shape[1], right.shape[1])
    compiles_each_shape = _compiles_each_shape(left)
    for expert, span in expert_spans(plan):
        left_e, right_e = left[span], right[span]
        if compiles_each_shape:
            left_e, right_e = _pad_rows(left_e), _pad_rows(right_e)
        torch.mm(left_e.t(), right_e, out=out[expert])
    return out


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = rows @ weight (+ bias)``."""
    if bias is None:
        torch.mm(rows, weight, out=out)
    else:
        torch.addmm(bias, rows, weight, out=out)


def _multiply_in_recurring_shapes(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """As `_multiply`, in at most two calls: a round number of rows, and a small block that ends with the last row.

    The second block overlaps the first where the rest is not round itself; those rows are computed twice.
    """
    count = rows.shape[0]
    if count < _ROW_STEP:
        padded_out = out.new_empty(_ROW_STEP, out.shape[1])
        _multiply(_pad_rows(rows), weight, bias, padded_out)
        out.copy_(padded_out[:count])
        return
    step = _row_step(count)
    rest = count % step
    if rest < count:
        _multiply(rows[: count - rest], weight, bias, out[: count - rest])
    if rest:
        start = count - _round_up(rest, _ROW_STEP)
        _multiply(rows[start:], weight, bias, out[start:])


def _pad_rows(rows: Tensor) -> Tensor:
    """``rows`` with zero rows appended up to a recurring count."""
    count = rows.shape[0]
    missing = _round_up(count, _row_step(count)) - count
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _row_step(count: int) -> int:
    """What row counts near ``count`` are rounded to: between 8 and 16 different ones in each octave."""
    return max(_ROW_STEP, 1 << max(0, count.bit_length() - 4))


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def _compiles_each_shape(t: Tensor) -> bool:
    """Whether a GEMM of ``t`` is oneDNN's, which compiles a kernel for each new shape."""
    return t.device.type == "cpu" and t.dtype in (torch.bfloat16, torch.float16)


def expert_spans(plan: RoutingPlan) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for each expert that has rows. Reads the row counts: a host sync on a GPU."""
    starts = plan.row_start_of_expert.tolist()
    for expert, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            yield expert, slice(start, stop)


def expert_of_row(plan: RoutingPlan) -> Tensor:
    """(R_max) int32; rows past R name the last expert."""
    rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
    return torch.searchsorted(plan.row_start_of_expert[1:-1], rows, right=True, out_int32=True)


def _is_groupable(t: Tensor) -> bool:
    if t.dtype not in _GROUPED_DTYPES or t.numel() == 0:
        return False
    row, column = t.stride(-2), t.stride(-1)
    if column == 1:
        leading, width = row, t.shape[-1]
    elif row == 1:
        leading, width = column, t.shape[-2]
    else:
        return False
    byte_strides = [leading * t.element_size(), *(s * t.element_size() for s in t.stride()[:-2])]
    return leading >= width and all(s % _ALIGNMENT == 0 for s in byte_strides) and t.data_ptr() % _ALIGNMENT == 0
