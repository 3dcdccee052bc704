"""The two grouped GEMMs in PyTorch: one matrix per expert applied to its rows, and one outer-product sum per expert.

E experts · R_max row capacity · p, q any widths

`F.grouped_mm` is used where it takes the dtype and the strides, and needs no row count on the host. Elsewhere (fp64,
rows not a multiple of 16 bytes) a loop over experts does; on a GPU the loop reads the row counts back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.routing.plan import RoutingPlan

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16  # bytes: what grouped_mm asks of the leading stride and of the base address


def rows_times_experts(rows: Tensor, weight: Tensor, bias: Tensor | None, plan: RoutingPlan) -> Tensor:
    """``rows_r @ weight_e (+ bias_e)`` for each row r of expert e: (R_max, q).

    rows (R_max, p) expert-major, weight (E, p, q) of any strides, bias (E, q). Rows past R are left uninitialised.
    """
    if _is_groupable(rows) and _is_groupable(weight):
        # grouped_mm pads the row stride to 16 bytes where q is not a multiple of that.
        out = F.grouped_mm(rows, weight, offs=plan.row_start_of_expert[1:]).contiguous()
        return out if bias is None else out.add_(bias.index_select(0, expert_of_row(plan)))
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, span in expert_spans(plan):
        if bias is None:
            torch.mm(rows[span], weight[expert], out=out[span])
        else:
            torch.addmm(bias[expert], rows[span], weight[expert], out=out[span])
    return out


def outer_per_expert(left: Tensor, right: Tensor, plan: RoutingPlan) -> Tensor:
    """``sum over the rows r of expert e of left_r^T right_r``: (E, p, q), zeros for an expert without rows.

    left (R_max, p), right (R_max, q), both expert-major.
    """
    # On CPU the loop is faster: grouped_mm's fp32 form takes twice its time (docs/notes/cpu.md).
    if left.device.type != "cpu" and _is_groupable(left) and _is_groupable(right):
        return F.grouped_mm(left.t(), right, offs=plan.row_start_of_expert[1:]).contiguous()
    out = left.new_zeros(plan.num_experts, left.shape[1], right.shape[1])
    for expert, span in expert_spans(plan):
        torch.mm(left[span].t(), right[span], out=out[expert])
    return out


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
