"""The launches behind the Hopper KernelSet: descriptors, grids and compile-time choices. No device value is read.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilemoe.activations import ActivationSpec
from tilemoe.kernels.hopper.act_grad import act_grad_kernel
from tilemoe.kernels.hopper.choose import SHAPES, Shape
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
    kernel: Kernel, rows: Tensor, weight: Tensor, plan: RoutingPlan, tiles: TileList, device: Device
) -> tuple[Launch, Tensor]:
    """F2 and B3: out (R_max, q) = rows (R_max, p) times weight (E, p, q), whose p or q is contiguous."""
    p, q = weight.shape[1:]
    out = rows.new_empty(plan.capacity, q)
    shape = SHAPES[kernel]
    descriptor, by_n = _weight(weight.unsqueeze(1), shape.columns)
    args = {
        "rows": _described(rows, [_GROUP_ROWS, _STEP]),
        "weight": descriptor,
        "out": _ragged(out, [_GROUP_ROWS, _SLICE]),
        **tiles._asdict(),
        "width_in": p,
        "width_out": q,
    }
    grid = persistent_grid(device, tiles.capacity * ceil_div(q, shape.columns))
    return _launch(gemm_rows_kernel, grid, args, {"RIGHT_BY_N": by_n}, shape), out


def up_proj_act_launch(
    x: Tensor, w1: Tensor, plan: RoutingPlan, tiles: TileList, spec: ActivationSpec, keep_h: bool, device: Device
) -> tuple[Launch, Tensor, Tensor]:
    """F1 for gate and up concatenated, w1 contiguous in d: (a (R_max, n), h (R_max, 2n), or (0, 2n) if not kept)."""
    d, n = x.shape[1], w1.shape[1] // 2
    a, h = x.new_empty(plan.capacity, n), x.new_empty(plan.capacity if keep_h else 0, 2 * n)
    shape = SHAPES["up_proj_act"]
    columns = shape.columns // 2
    args = {
        "x": x,
        "weight": _described(w1.unflatten(1, (2, n)), [1, 2, columns, _STEP]),
        "a": _ragged(a, [_GROUP_ROWS, _SLICE]),
        "h": _ragged(h.unflatten(1, (2, n)), [_GROUP_ROWS, 1, _SLICE]) if keep_h else None,
        "token_of_row": plan.token_of_row,
        **tiles._asdict(),
        "d": d,
        "n": n,
        "stride_x": x.stride(0),
        "limit": spec.limit,
        "alpha": spec.alpha,
    }
    constants = {"ACTIVATION": spec.name, "KEEP_H": keep_h, "EVEN_K": d % _STEP == 0}
    grid = persistent_grid(device, tiles.capacity * ceil_div(n, columns))
    return _launch(up_proj_act_kernel, grid, args, constants, shape), a, h


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
    args = {
        "do": do,
        "weight": descriptor,
        "h": _described(h.unflatten(1, (2, n)).transpose(0, 1), [2, _GROUP_ROWS, _SLICE]),
        "dh": _ragged(dh.unflatten(1, (2, n)).transpose(0, 1), [2, _GROUP_ROWS, _SLICE], rows_at=1),
        "a_scaled": _ragged(a_scaled, [_GROUP_ROWS, _SLICE]),
        "s": s,
        "partial": partial,
        "token_of_row": plan.token_of_row,
        "pair_of_row": plan.pair_of_row,
        **tiles._asdict(),
        "capacity": plan.capacity,
        "d": d,
        "n": n,
        "stride_do": do.stride(0),
        "limit": spec.limit,
        "alpha": spec.alpha,
    }
    constants = {"ACTIVATION": spec.name, "RIGHT_BY_N": by_n, "EVEN_K": d % _STEP == 0}
    grid = persistent_grid(device, tiles.capacity * column_tiles)
    return _launch(act_grad_kernel, grid, args, constants, shape), dh, a_scaled, partial


def weights_launch(
    kernel: Kernel, by_token: Tensor, by_row: Tensor, plan: RoutingPlan, transposed: bool, device: Device
) -> tuple[Launch, Tensor]:
    """B2 and B4: out (E, p, q), or (E, q, p) when ``transposed``, from by_token (T, p) and by_row (R_max, q)."""
    p, q = by_token.shape[1], by_row.shape[1]
    out = by_row.new_empty((plan.num_experts, q, p) if transposed else (plan.num_experts, p, q))
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
    return _launch(gemm_weights_kernel, grid, args, {"TRANSPOSED": transposed}, shape), out


def _launch(kernel: Any, grid: tuple[int], args: dict[str, Any], constants: dict[str, Any], shape: Shape) -> Launch:
    constants = {
        **constants,
        "BN": shape.columns,
        "STAGES": shape.stages,
        "CONSUMER_REGISTERS": shape.consumer_registers,
        "PRODUCER_REGISTERS": shape.producer_registers,
    }
    return Launch(kernel, grid, args, constants, _CONSUMER_WARPS, num_stages=1, max_registers=_MAX_REGISTERS)


def _described(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block, _swizzled(t.element_size(), len(block)))


def _weight(weight: Tensor, columns: int) -> tuple[TensorDescriptor, bool]:
    """A descriptor of a weight (E, 1, in, out), and whether ``in`` is its contiguous dimension."""
    if weight.stride(2) == 1:
        return _described(weight.transpose(2, 3), [1, 1, columns, _STEP]), True
    return _described(weight.transpose(1, 2), [1, _STEP, 1, columns]), False


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
