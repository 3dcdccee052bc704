"""Initial weights from a counter-based generator: an element's value depends only on a key and the element's index.

So weights have the same bits on any device and in any sharding, and each process draws only its shard. The generator
uses only integers and separately rounded fp32 products and sums. PyTorch's own generators give different numbers on a
GPU and on a CPU; DTensor's differ from mesh to mesh, and on CPUs give every process the same rows.

R rows, all dimensions but the last · C columns
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_CELLS = 1 << 16  # cells of equal probability; the normal distribution's quantiles are interpolated in each
_CPU_CHUNK = 1 << 16  # elements that each thread of a CPU draws at once; they fit in a core's cache
_GPU_CHUNK = 1 << 24


def normal_(weight: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill ``weight`` (..., C), a tensor or a DTensor of any device and float dtype, from normal(0, std).

    The key is drawn from ``generator`` (None: the CPU's default), which may be on another device. A value is one of
    2^32 quantiles, at most 4.7 std, computed in fp32 and rounded once to the weight's dtype.
    """

    def value(bits: Tensor) -> Tensor:
        low, slope = _quantiles(bits.device)
        cell = ((bits >> 16) + _CELLS // 2).flatten()
        within = (bits & 0xFFFF).float()
        interpolated = slope.index_select(0, cell).view_as(bits).mul_(within)
        return interpolated.add_(low.index_select(0, cell).view_as(bits)).mul_(std)

    _fill(weight, value, generator)


def uniform_(weight: Tensor, bound: float, generator: torch.Generator | None = None) -> None:
    """Fill ``weight`` as `normal_` does, from the uniform distribution within ±bound."""
    _fill(weight, lambda bits: bits.float().mul_(bound * 2.0**-31), generator)


@torch.no_grad()
def _fill(weight: Tensor, value: Callable[[Tensor], Tensor], generator: torch.Generator | None) -> None:
    """Fill ``weight`` with ``value(bits)``, which maps 32 random bits (r, C) int32 to fp32."""
    local, starts = local_part(weight)
    if isinstance(local, FakeTensor):
        return
    home = torch.device("cpu") if generator is None else generator.device
    key = torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device=home, generator=generator)
    if local.is_meta or not local.numel():
        return
    *leading, columns = local.shape
    rows = torch.zeros((), dtype=torch.int64, device=local.device)  # each row's index in the whole weight
    for size, start, extent in zip(leading, starts, weight.shape, strict=False):
        rows = (rows.unsqueeze(-1) * extent) + torch.arange(start, start + size, device=local.device)
    seeds = _mix64(rows.flatten() * _signed(0x9E3779B97F4A7C15, 64) + key.to(local.device))
    seeds = seeds.view(torch.int32).view(-1, 2)
    first = starts[-1] if starts else 0
    column = torch.arange(first, first + columns, dtype=torch.int32, device=local.device) * _signed(0x9E3779B9, 32)
    whole = local.contiguous()
    matrix = whole.view(-1, columns)
    chunk = _CPU_CHUNK * torch.get_num_threads() if local.device.type == "cpu" else _GPU_CHUNK
    step = max(1, chunk // columns)
    for begin in range(0, matrix.shape[0], step):
        of_rows = seeds[begin : begin + step]
        matrix[begin : begin + step] = value(_mix32(column + of_rows[:, :1], of_rows[:, 1:]))
    if whole is not local:
        local.copy_(whole)


def local_part(weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(this process's shard of ``weight``, where the shard begins in each dimension of the whole)."""
    if not hasattr(weight, "to_local"):
        return weight, (0,) * weight.ndim
    from torch.distributed.tensor import DTensor  # the import takes most of a second
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(weight, DTensor), type(weight)
    _, starts = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight.to_local(), tuple(starts)


def local_of(tensor: Tensor) -> Tensor:
    """This process's shard of ``tensor``, sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def shared_as(whole: Tensor, local: Tensor, *shape: int) -> Tensor:
    """The inverse of `local_part`: a tensor sharded like ``whole``, with ``local`` as this process's shard. shape: its
    shape, by default ``whole``'s.
    """
    if not hasattr(whole, "to_local"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(whole, DTensor), type(whole)
    size, stride = torch.Size(shape or whole.shape), (1,) if shape else whole.stride()
    return DTensor.from_local(local, whole.device_mesh, whole.placements, run_check=False, shape=size, stride=stride)


def _mix32(z: Tensor, key: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser (Appleby, public domain) of z (r, C), in place, with a key (r, 1) inside."""
    z ^= (z >> 16) & 0xFFFF  # PyTorch's right shift is arithmetic
    z *= _signed(0x85EBCA6B, 32)
    z ^= key
    z ^= (z >> 13) & 0x7FFFF
    z *= _signed(0xC2B2AE35, 32)
    z ^= (z >> 16) & 0xFFFF
    return z


def _mix64(z: Tensor) -> Tensor:
    """SplitMix64's output function (Steele, Lea and Flood 2014) of int64, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= (z >> shift) & ((1 << (64 - shift)) - 1)
        z *= _signed(factor, 64)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def _signed(value: int, bits: int) -> int:
    """The two's complement of an unsigned number."""
    return value - (1 << bits) if value >> (bits - 1) else value


@lru_cache
def _quantiles(device: torch.device) -> tuple[Tensor, Tensor]:
    """For each cell, the least value, and its difference to the next cell's divided by 2^16; fp32 (2^16) each."""
    normal, share = NormalDist(), 1 / _CELLS
    upper = [normal.inv_cdf(0.5 + cell * share) for cell in range(_CELLS // 2)]
    last = upper[-1]
    upper.append(2 * normal.pdf(last) / share - last)  # makes the last cell's mean equal to the tail's
    knots = torch.tensor([-each for each in upper[:0:-1]] + upper, dtype=torch.float64)
    low, slope = knots[:-1].float(), (knots.diff() / (1 << 16)).float()
    return low.to(device), slope.to(device)
