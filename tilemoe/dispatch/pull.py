"""The transport that pulls: each rank writes its rows to a staging buffer that all ranks can read, and reads theirs.

W ranks · a window is memory of every rank that all of a group can read, with two slots for rows, used in turn

One exchange: a rank copies what it sends into its slot, sets its flags, waits until all ranks have set theirs, and
copies its rows from every other rank's slot. It may write a slot again two exchanges later: a rank that has set its
flags for the exchange in between has, by the order of its own work, fetched its rows from the slot before.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

from torch import Tensor

from tilemoe.dispatch.transport import Arrival, Way

if TYPE_CHECKING:
    from tilemoe.dispatch.symmetric import SymmetricWindow

SLOTS = 2
_ROOM = 1 << 21  # bytes: a slot's size is a multiple


class Pull:
    """The `Transport` over a window from ``open_window(slot_bytes)``; a larger one replaces it when rows outgrow it."""

    def __init__(self, here: int, ranks: int, open_window: Callable[[int], SymmetricWindow]) -> None:
        self._here, self._ranks, self._open = here, ranks, open_window
        self._window: SymmetricWindow | None = None
        self._turn = 0

    def send(self, leaving: Tensor, arriving: Tensor, way: Way) -> Arrival:
        row = arriving.element_size() * arriving.shape[1:].numel()
        window = self._with_room(way.most_out * row)
        self._turn += 1
        with window.begin():
            window.put(self._turn, leaving)
            window.tell(self._turn)
            window.wait_for_all(self._turn)
            start_of = list(accumulate(way.into, initial=0))
            # Each rank begins with its neighbour, so that no rank's memory is read by all at once.
            for step in range(1, self._ranks):
                rank = (self._here + step) % self._ranks
                if way.into[rank]:
                    first, start, count = way.first_there[rank] * row, start_of[rank] * row, way.into[rank] * row
                    window.fetch(self._turn, rank, first, arriving, start, count)
            return window.arrival()

    def _with_room(self, slot_bytes: int) -> SymmetricWindow:
        """All ranks know the same ``slot_bytes``, so they make a new window together."""
        if self._window is None or self._window.slot_bytes < slot_bytes:
            # More than needed, since the next batches route differently and opening a window stops the device.
            room = slot_bytes + slot_bytes // 4
            if self._window is not None:
                room = max(room, self._window.slot_bytes + self._window.slot_bytes // 2)
                self._window.close()
                self._window = None  # freed before more memory is allocated
            self._window = self._open(-(-room // _ROOM) * _ROOM or _ROOM)
            self._turn = 0
        return self._window
