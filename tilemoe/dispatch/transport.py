"""Transports, which send rows between the ranks that share a layer's experts: their interface, and all_to_all_single.

W ranks · rows of any shape and dtype, grouped by rank, in rank order
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Way:
    """How many rows go from each rank to each: ``between[source][destination]``, W x W, 0 from a rank to itself.

    Every rank has the same numbers. ``here``: this rank; ``own``: rows for itself, which are not sent.
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
        """For each rank, how many of the rows that it sends come before those for this rank."""
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
    """Sends rows to other ranks. All ranks of a group call it in the same order; rows arrive bit for bit."""

    def send(self, leaving: Tensor, arriving: Tensor, way: Way) -> Arrival:
        """Send ``leaving`` (sum of ``way.out``, ...) to the other ranks, and receive their rows in ``arriving`` (sum of
        ``way.into``, ...). Both are contiguous, and must not be changed until the arrival has been waited for.
        """
        ...


class Collective:
    """The transport by the group's ``all_to_all_single``, on any device that the group's backend supports."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, leaving: Tensor, arriving: Tensor, way: Way) -> Arrival:
        return dist.all_to_all_single(arriving, leaving, way.into, way.out, group=self.group, async_op=True)
