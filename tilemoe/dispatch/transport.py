"""Transports, which send rows between the ranks that share a layer's experts: their interface, and all_to_all_single.

W ranks · rows of any shape and dtype, those for one rank together, in the order of the ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Way:
    """How many rows go from each rank to each other: ``between[source][destination]``, W x W, 0 from one to itself.

    Every rank holds the same numbers. ``here``: this rank; ``own``: rows that it sends to itself, which do not travel.
    """

    between: tuple[tuple[int, ...], ...]
    here: int
    own: int

    @cached_property
    def out(self) -> list[int]:
        """Rows from here to each rank."""
        return list(self.between[self.here])

    @cached_property
    def into(self) -> list[int]:
        """Rows from each rank to here."""
        return [sent[self.here] for sent in self.between]

    @cached_property
    def first_there(self) -> list[int]:
        """Of each rank's rows that go out, how many lie before those for here."""
        return [sum(sent[: self.here]) for sent in self.between]

    @cached_property
    def most_out(self) -> int:
        """The largest number of rows that any rank sends."""
        return max(sum(sent) for sent in self.between)

    def back(self) -> Way:
        """The reverse exchange of the same rows."""
        return Way(tuple(zip(*self.between, strict=True)), self.here, self.own)


class Arrival(Protocol):
    """The handle of rows in flight."""

    def wait(self) -> object:
        """Wait until the rows have arrived; on a GPU the current stream waits, not the host."""
        ...


class Transport(Protocol):
    """Brings rows to other ranks. All ranks of a group call it in one order; what comes is the same, bit for bit."""

    def send(self, leaving: Tensor, arriving: Tensor, way: Way) -> Arrival:
        """Rows ``leaving`` (sum of ``way.out``, ...) to the others, and theirs to ``arriving`` (sum of ``way.into``,
        ...). Both are contiguous, and stay as they are until the arrival has been waited for.
        """
        ...


class Collective:
    """The transport by the group's ``all_to_all_single``, on any device that the group's backend supports."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, leaving: Tensor, arriving: Tensor, way: Way) -> Arrival:
        return dist.all_to_all_single(arriving, leaving, way.into, way.out, group=self.group, async_op=True)
