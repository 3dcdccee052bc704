"""Frozen weights in 4 bits, two codes to a byte and a scale for each block of neighbours: the base of NF4 and MXFP4.

E experts · p, q a weight's last two dimensions
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="PackedWeight")  # `typing` has it from Python 3.11 on


@dataclass(frozen=True)
class PackedWeight(ABC):
    """A frozen weight (E, p, q): codes (E, p, q / 2) uint8 and scales (E, p, q / block), or a transposed view of both,
    whose blocks run along p.

    It is indexed and transposed like the tensor that it stands for (along the blocks only by whole blocks), and can be
    multiplied in any dtype. A subclass is a dataclass; its fields are the stored tensors, with experts as first dim.
    """

    name: ClassVar[str]  # the key in `tilemoe.kernels.experts.table.PACKED`
    block: ClassVar[int]  # number of values that share a scale
    values: ClassVar[tuple[float, ...]]  # the value of each of the 16 codes
    high_first: ClassVar[bool]  # whether a byte's high half holds the first of its two neighbours

    codes: Tensor

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8, "two codes a byte"
        assert self.codes.device == self.scales.device, "moved together"
        assert 2 * self.codes.numel() == self.block * self.scales.numel(), "a scale for each whole block"

    @property
    @abstractmethod
    def scales(self) -> Tensor:
        """The scales as they are stored, one for each block."""

    @abstractmethod
    def factors(self) -> Tensor:
        """The scales (E, p, q / block), or their transposed view, converted to fp32 factors."""

    @abstractmethod
    def _view(self: Self, codes: Tensor, scales: Tensor) -> Self:
        """A weight of the same class from views of this one's codes and scales."""

    @classmethod
    def why_not(cls, hidden_size: int, intermediate_size: int) -> str | None:
        """Why experts of these widths cannot be stored in this format, with the fix; None if they can."""
        for name, width in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if width % cls.block:
                of = f"{cls.block}, the block of {cls.name.upper()}"
                return f"{name} must be a multiple of {of}, got {width}; pad it, or leave {cls.name.upper()} out"
        return None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name: the codes first, then the scales."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_whole_scales(self: Self) -> Self:
        """The same weight, its scales not quantised themselves, so that slices and kernels can read them by block."""
        return self

    @property
    def blocked(self) -> int:
        """The dimension, 1 or 2, along which blocks run."""
        return 2 if self.codes.shape[1] == self.scales.shape[1] else 1

    @property
    def shape(self) -> torch.Size:
        experts, p, q = self.codes.shape
        return torch.Size((experts, p, 2 * q) if self.blocked == 2 else (experts, 2 * p, q))

    def transpose(self: Self, first: int, second: int) -> Self:
        """The weight with its last two dimensions exchanged."""
        assert {first, second} == {1, 2}, "experts stay first"
        return self._view(self.codes.transpose(1, 2), self.scales.transpose(1, 2))

    def __getitem__(self: Self, parts: tuple[slice, ...]) -> Self:
        """A view; parts has a slice for each leading dimension."""
        return self._view(self.codes[self._scaled(parts, 2)], self.scales[self._scaled(parts, self.block)])

    def _scaled(self, parts: tuple[slice, ...], values: int) -> tuple[slice, ...]:
        """``parts`` for a tensor whose elements each hold ``values`` values along the blocks."""
        if len(parts) <= self.blocked:
            return parts
        return (*parts[: self.blocked], blocks_of(parts[self.blocked], values), *parts[self.blocked + 1 :])

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """The dense matrix (p, q) of one expert: values times factors in fp32, rounded once to ``dtype``."""
        one = self[index : index + 1,]
        codes, factors = one.codes[0], one.factors()[0]
        if self.blocked == 1:
            codes, factors = codes.t(), factors.t()
        halves = (codes >> 4, codes & 15) if self.high_first else (codes & 15, codes >> 4)
        table = torch.tensor(self.values, dtype=torch.float32, device=codes.device)
        values = table[torch.stack(halves, -1).flatten(-2).int()].unflatten(-1, (-1, self.block))
        matrix = (values * factors.unsqueeze(-1)).flatten(-2).to(dtype)
        return matrix if self.blocked == 2 else matrix.t()


Weight: TypeAlias = Tensor | PackedWeight


def codes_of(nibbles: Tensor, high_first: bool) -> Tensor:
    """Codes (..., q) uint8, each below 16, packed to bytes (..., q / 2)."""
    first, second = nibbles[..., ::2], nibbles[..., 1::2]
    return first << 4 | second if high_first else second << 4 | first


def blocks_of(part: slice, size: int) -> slice:
    """``part`` with its bounds counted in blocks of ``size``."""
    start, stop = (None if at is None else -(-at // size) for at in (part.start, part.stop))
    return slice(start, stop)
