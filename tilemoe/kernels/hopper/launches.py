"""The launches behind the Hopper KernelSet: descriptors, grids and compile-time choices. No device value is read.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.base import is_column_major
from tilemoe.kernels.hopper.act_grad import act_grad_kernel
from tilemoe.kernels.hopper.choose import ACTIVATIONS_IN_A_LOOP, MAX_COLUMN_TILES, SHAPES, Shape
from tilemoe.kernels.hopper.gemm_rows import up_proj_act_kernel
from tilemoe.kernels.hopper.gemm_weights import gemm_weights_kernel
from tilemoe.kernels.hopper.ping_pong import gemm_rows_kernel
from tilemoe.kernels.tiling import Device, Kernel
from tilemoe.kernels.triton.launch import Launch, ceil_div, persistent_grid
from tilemoe.kernels.triton.tiles import TileList
from tilemoe.routing.plan import RoutingPlan

_STEP = 64  # of the contraction
_SLICE = 64  # columns of a store
_GROUP_ROWS = 64  # of a consumer
_CONSUMER_WARPS = 4
_MAX_REGISTERS = 168  # of each of three warpgroups before they trade them


def rows_launch(
    kernel: Kernel,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: RoutingPlan,
    tiles: TileList,
    device: Device,
) -> tuple[Launch, Tensor]:
    """F2 and B3: out (R_max, q) = rows (R_max, p) times weight (E, p, q), whose p or q is contiguous, plus bias (E, q)
    of contiguous rows.
    """
    p, q = weight.shape[1:]
    out = rows.new_empty(plan.capacity, q)
    shape = SHAPES[kernel]
    descriptor, by_n = _weight(weight.unsqueeze(1), shape.columns)
    args = {
        "rows": _described(rows, [_GROUP_ROWS, _STEP]),
        "weight": descriptor,
        "bias": bias,
        "out": _ragged(out, [_GROUP_ROWS, _SLICE]),
        **tiles._asdict(),
        "width_in": p,
        "width_out": q,
        "stride_bias": 0 if bias is None else bias.stride(0),
    }
    grid = persistent_grid(device, tiles.capacity * ceil_div(q, shape.columns))
    return _launch(gemm_rows_kernel, grid, args, {"RIGHT_BY_N": by_n}, shape), out


def up_proj_act_launch(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    plan: RoutingPlan,
    tiles: TileList,
    spec: ActivationSpec,
    keep_h: bool,
    device: Device,
) -> tuple[Launch, Tensor, Tensor]:
    """F1: (a (R_max, n), h (R_max, w), or (0, w) if not kept). w1's w or d is contiguous, and so are b1's rows."""
    d, width = x.shape[1], w1.shape[1]
    n = width // spec.width_factor
    a, h = x.new_empty(plan.capacity, n), x.new_empty(plan.capacity if keep_h else 0, width)
    shape, gate_up = SHAPES["up_proj_act"], _gate_up(spec)
    parts = 2 if gate_up == "concatenated" else 1
    columns = shape.columns // parts
    weight, by_n = up_proj_weight(w1, spec), w1.stride(2) == 1
    block = [1, parts, columns, _STEP] if by_n else [1, parts, _STEP, columns]
    h_block = [_GROUP_ROWS, 1, _SLICE] if parts == 2 else [_GROUP_ROWS, _SLICE]
    args = {
        "x": x,
        "weight": _described(weight, block),
        "bias": b1,
        "a": _ragged(a, [_GROUP_ROWS, _SLICE]),
        "h": _ragged(h.unflatten(1, (2, n)) if parts == 2 else h, h_block) if keep_h else None,
        "token_of_row": plan.token_of_row,
        **tiles._asdict(),
        "row_start_of_expert": _banded(plan, width // parts, columns),
        "d": d,
        "n": n,
        "stride_x": x.stride(0),
        "stride_bias": 0 if b1 is None else b1.stride(0),
        "limit": spec.limit,
        "alpha": spec.alpha,
    }
    constants = {
        "ACTIVATION": spec.name,
        "GATE_UP": gate_up,
        "RIGHT_BY_N": by_n,
        "KEEP_H": keep_h,
        "EVEN_K": d % _STEP == 0,
    }
    grid = persistent_grid(device, tiles.capacity * ceil_div(width // parts, columns))
    return _launch(up_proj_act_kernel, grid, args, constants, shape), a, h


def up_proj_weight(w1: Tensor, spec: ActivationSpec) -> Tensor:
    """w1 (E, w, d) as F1 reads it: (E, parts, out, d), or (E, parts, d, out) where d is not contiguous."""
    weight = w1.unflatten(1, (2 if _gate_up(spec) == "concatenated" else 1, -1))
    return weight if w1.stride(2) == 1 else weight.transpose(2, 3)


def act_grad_launch(
    do: Tensor,
    w2: Tensor,
    h: Tensor,
    s: Tensor,
    plan: RoutingPlan,
    tiles: TileList,
    spec: ActivationSpec,
    device: Device,
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """B1: (dh like h, a_scaled (R_max, n), partial (column tiles, R_max) fp32 of the scores' gradient)."""
    d, n = w2.shape[1:]
    shape = SHAPES["down_proj_act_grad"]
    column_tiles = ceil_div(n, shape.columns)
    dh, a_scaled = torch.empty_like(h), h.new_empty(plan.capacity, n)
    partial = s.new_empty(column_tiles, plan.capacity, dtype=torch.float32)
    descriptor, by_n = _weight(w2.unsqueeze(1), shape.columns)
    gate_up = _gate_up(spec)
    if gate_up == "concatenated":
        h_view, dh_view = (t.unflatten(1, (2, n)).transpose(0, 1) for t in (h, dh))
        h_block, rows_at = [2, _GROUP_ROWS, _SLICE], 1
    else:
        h_view, dh_view = h, dh
        h_block, rows_at = [_GROUP_ROWS, _SLICE], 0
    args = {
        "do": do,
        "weight": descriptor,
        "h": _described(h_view, h_block),
        "dh": _ragged(dh_view, h_block, rows_at),
        "a_scaled": _ragged(a_scaled, [_GROUP_ROWS, _SLICE]),
        "s": s,
        "partial": partial,
        "token_of_row": plan.token_of_row,
        "pair_of_row": plan.pair_of_row,
        **tiles._asdict(),
        "row_start_of_expert": _banded(plan, n, shape.columns),
        "capacity": plan.capacity,
        "d": d,
        "n": n,
        "stride_do": do.stride(0),
        "limit": spec.limit,
        "alpha": spec.alpha,
    }
    constants = {
        "ACTIVATION": spec.name,
        "GATE_UP": gate_up,
        "ROLLED": spec.name in ACTIVATIONS_IN_A_LOOP,
        "RIGHT_BY_N": by_n,
        "EVEN_K": d % _STEP == 0,
    }
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return _launch(act_grad_kernel, grid, args, constants, shape), dh, a_scaled, partial


def weights_launch(
    kernel: Kernel, by_token: Tensor, by_row: Tensor, out: Tensor, plan: RoutingPlan, device: Device
) -> Launch:
    """B2 and B4: to out (E, p, q), dense with p or q contiguous, from by_token (T, p) and by_row (R_max, q)."""
    p, q = by_token.shape[1], by_row.shape[1]
    transposed = is_column_major(out)
    out = out.transpose(1, 2) if transposed else out
    shape = SHAPES[kernel]
    args = {
        "by_token": by_token,
        "by_row": _ragged(by_row, [_STEP, shape.columns]),
        "out": _described(out, [1, _SLICE, _GROUP_ROWS]),
        "token_of_row": plan.token_of_row,
        "row_start_of_expert": plan.row_start_of_expert,
        "num_experts": plan.num_experts,
        "p": p,
        "q": q,
        "stride_token": by_token.stride(0),
    }
    grid = persistent_grid(device, plan.num_experts * ceil_div(p, shape.rows) * ceil_div(q, shape.columns))
    return _launch(gemm_weights_kernel, grid, args, {"TRANSPOSED": transposed}, shape)


def _launch(kernel: Any, grid: tuple[int], args: dict[str, Any], constants: dict[str, Any], shape: Shape) -> Launch:
    constants = {
        **constants,
        "BN": shape.columns,
        "STAGES": shape.stages,
        "CONSUMER_REGISTERS": shape.consumer_registers,
        "PRODUCER_REGISTERS": shape.producer_registers,
    }
    return Launch(kernel, grid, args, constants, _CONSUMER_WARPS, num_stages=1, max_registers=_MAX_REGISTERS)


def _banded(plan: RoutingPlan, width: int, columns: int) -> Tensor | None:
    """What the order of tiles in bands takes, where the output is wide enough for it; else None."""
    return plan.row_start_of_expert if ceil_div(width, columns) > MAX_COLUMN_TILES else None


def _gate_up(spec: ActivationSpec) -> str:
    """The layout of gate and up as the kernels name it: "none" where there is no gate."""
    return spec.gate_up if spec.is_gated else "none"


def _described(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, _swizzled(t.element_size(), len(block)))


def _weight(weight: Tensor, columns: int) -> tuple[TensorDescriptor, bool]:
    """A descriptor of a weight (E, 1, in, out), and whether ``in`` is its contiguous dimension."""
    if weight.stride(2) == 1:
        return _described(weight.transpose(2, 3), [1, 1, columns, _STEP]), True
    return _described(weight, [1, 1, _STEP, columns]), False


def _ragged(rows: Tensor, block: list[int], rows_at: int = 0) -> TensorDescriptor:
    """As `triton.tools.ragged_tma.create_ragged_descriptor`, whose descriptor Gluon does not take.

    Two leading dimensions, whose strides cancel modulo 2^64, move the end of the rows, which are dimension ``rows_at``,
    to wherever an expert's end.
    """
    stride = rows.stride(rows_at)
    shape = [0x7FFF0000, 0x7FFF0000, *rows.shape]
    shape[2 + rows_at] = 1 << 30
    block = [1, 1, *block]
    return TensorDescriptor(
        rows, shape, [2**34 - stride, stride, *rows.stride()], block, _swizzled(rows.element_size(), len(block))
    )


@cache
def _swizzled(itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * itemsize, rank=rank)
