"""The two grouped GEMMs in PyTorch: ``rows_r weight_e``, and ``sum over e's rows r of left_r^T right_r`` (wgrad).

E experts · R_max static row capacity · p, q any widths

`F.grouped_mm` is used where it supports the dtype and the strides: it needs no row count on the host. Elsewhere, and on
a CPU for 16-bit types and any wgrad, a loop over experts reads the row counts back. For 16-bit types on a CPU, oneDNN
compiles a kernel for every new shape, so the loop pads its GEMMs by a few rows, to counts that recur. If PyTorch does
not use oneDNN for these types, their GEMMs are very slow, so the loop multiplies fp32 copies and rounds the products
once (docs/lab/cpu.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.plan import RoutingPlan, experts_of_rows
from tilemoe.runtime.device import has_fast_gemm

_GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GROUPED_DTYPES_OF_CPU = (torch.float32,)
_ROW_STEP = 16  # rows: few enough to waste little, enough for row counts to recur
_ALIGNMENT = 16  # bytes: grouped_mm's requirement for the leading stride and the base address


def rows_times_experts(
    rows: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, plan: RoutingPlan, index: Tensor | None = None
) -> Tensor:
    """``rows_r @ weight_e (+ bias_e)`` for each row r of expert e: (R_max, q).

    rows (R_max, p) are sorted by expert; or, with index (R_max), row r is ``rows[index[r]]``. weight (E, p, q) has any
    strides, or is packed; bias (E, q). Rows past R are left unspecified.
    """
    if isinstance(weight, Tensor) and _are_groupable(rows, weight):
        # grouped_mm pads the row stride to a multiple of 16 bytes.
        gathered = rows if index is None else rows.index_select(0, index)
        out = F.grouped_mm(gathered, weight, offs=plan.row_start_of_expert[1:]).contiguous()
        return out if bias is None else out.add_(bias.index_select(0, expert_of_row(plan)))
    out = rows.new_empty(plan.capacity, weight.shape[2])
    compiles_each_shape, work = _compiles_each_shape(rows), _fast_dtype(rows)
    for expert, span in expert_spans(plan):
        if compiles_each_shape:
            # The results of the padding rows are overwritten by the next experts, or are past R.
            span = _widened(span, plan)
        rows_e = rows[span] if index is None else rows.index_select(0, index[span])
        matrix = weight[expert] if isinstance(weight, Tensor) else weight.expert(expert, rows.dtype)
        _multiply(rows_e.to(work), matrix.to(work), None if bias is None else bias[expert], out[span])
    return out


def outer_per_expert(
    left: Tensor,
    right: Tensor,
    plan: RoutingPlan,
    left_index: Tensor | None = None,
    right_index: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``sum over the rows r of expert e of left_r^T right_r``: (E, p, q), zeros for an expert without rows.

    left (R_max, p) and right (R_max, q) are sorted by expert, or gathered by an index as in `rows_times_experts`. out:
    the result is added to it and it is returned; the loop over experts adds one expert's product at a time.
    """
    # On a CPU the loop is faster: grouped_mm in fp32 takes twice its time (docs/lab/cpu.md).
    if left.device.type != "cpu" and _are_groupable(left, right):
        left = left if left_index is None else left.index_select(0, left_index)
        right = right if right_index is None else right.index_select(0, right_index)
        products = F.grouped_mm(left.t(), right, offs=plan.row_start_of_expert[1:]).contiguous()
        return products if out is None else out.add_(products)
    sums = left.new_zeros(plan.num_experts, left.shape[1], right.shape[1]) if out is None else out
    compiles_each_shape, work = _compiles_each_shape(left), _fast_dtype(left)
    for expert, span in expert_spans(plan):
        count = span.stop - span.start
        block = _widened(span, plan) if compiles_each_shape else span
        left_e = _rows(left, left_index, block, count).to(work).t()
        right_e = _rows(right, right_index, block, count).to(work)
        if out is None:
            _multiply(left_e, right_e, None, sums[expert])
        else:
            out[expert].add_(torch.mm(left_e, right_e))
    return sums


def _fast_dtype(t: Tensor) -> torch.dtype:
    """``t``'s dtype, or fp32 if GEMMs in it are slow; operands are cast one expert at a time, so copies are small."""
    return t.dtype if has_fast_gemm(t.device.type, t.dtype) else torch.float32


def _multiply(left: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = left @ right (+ bias)``, computed in the dtype of left and right and rounded once to out's."""
    if left.dtype != out.dtype:
        product = torch.mm(left, right)
        out.copy_(product if bias is None else product.add_(bias))
    elif bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(bias, left, right, out=out)


def _rows(rows: Tensor, index: Tensor | None, block: slice, count: int) -> Tensor:
    """The rows of ``block``, gathered if there is an index; rows after the first ``count`` are zero."""
    if index is not None:
        out = rows.index_select(0, index[block])
    elif block.stop - block.start == count:
        return rows[block]
    else:
        out = rows[block].clone()
    out[count:] = 0
    return out


def _widened(span: slice, plan: RoutingPlan) -> slice:
    """``span`` extended by the rows after it to a length that recurs, as far as R_max allows."""
    return slice(span.start, min(span.start + _recurring(span.stop - span.start), plan.capacity))


def _recurring(count: int) -> int:
    """``count`` rounded up to a multiple of 16, of 32 from 1024 on, and so on: 32 different counts per power of two."""
    step = max(_ROW_STEP, 1 << max(0, count.bit_length() - 6))
    return -(-count // step) * step


def _compiles_each_shape(t: Tensor) -> bool:
    """Whether a GEMM of ``t`` runs in oneDNN, which compiles a kernel for each new shape."""
    is_16_bit = t.dtype in (torch.bfloat16, torch.float16)
    return t.device.type == "cpu" and is_16_bit and has_fast_gemm(t.device.type, t.dtype)


def expert_spans(plan: RoutingPlan) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for each expert that has rows. Reads the row counts: a host sync on a GPU."""
    starts = plan.row_start_of_expert.tolist()
    for expert, (start, stop) in enumerate(pairwise(starts)):
        if stop > start:
            yield expert, slice(start, stop)


def expert_of_row(plan: RoutingPlan) -> Tensor:
    """The expert of each row (R_max), int32; rows past R get the last expert."""
    rows = torch.arange(plan.capacity, dtype=torch.int32, device=plan.device)
    return experts_of_rows(plan.row_start_of_expert, rows).clamp(max=plan.num_experts - 1).int()


def _are_groupable(*operands: Tensor) -> bool:
    for t in operands:
        dtypes = _GROUPED_DTYPES_OF_CPU if t.device.type == "cpu" else _GROUPED_DTYPES
        if t.dtype not in dtypes or t.numel() == 0:
            return False
        row, column = t.stride(-2), t.stride(-1)
        leading, width = (row, t.shape[-1]) if column == 1 else (column, t.shape[-2])
        if 1 not in (row, column) or leading < width or t.data_ptr() % _ALIGNMENT:
            return False
        if gcd(leading, *t.stride()[:-2]) * t.element_size() % _ALIGNMENT:  # each other stride must be aligned, too
            return False
    return True
