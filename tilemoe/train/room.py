"""Work whose rows did not fit where processes that share experts receive them is done again, with more room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from tilemoe.layers.experts import Experts, capacity_of
from tilemoe.train.job.collective import values_of_processes
from tilemoe.train.job.processes import Job

T = TypeVar("T")
_NEARLY_FULL = 15 / 16  # of the room: rows that fill more of it may soon not fit


class Room:
    """What the processes that share a model's experts have room for, which all processes of the job ask together.

    Where there is room for any number of rows (`tilemoe.dispatch.base.Capacity`), work is done once and nothing waits.

    ``say`` is told what was repeated, ``repeats`` how often.
    """

    def __init__(self, model: nn.Module, device: torch.device, job: Job, say: Callable[[str], None]) -> None:
        self._capacity, self._device, self._job, self.say = capacity_of(model, device), device, job, say
        if self._capacity is not None:
            self._capacity.is_watched = True
        self._layers = sum(isinstance(module, Experts) for module in model.modules())
        self.repeats, self._learns = 0, True

    @property
    def rows(self) -> int | None:
        """That a process can receive; None: any number."""
        return None if self._capacity is None else self._capacity.rows

    def overflow(self) -> Tensor:
        """(2,) fp64: rows and tokens that did not fit, see `Capacity`."""
        found = torch.zeros(2, device=self._device) if self._capacity is None else self._capacity.overflow()
        return found.double()

    def until_it_fits(
        self,
        work: Callable[[], T],
        what: str,
        overflows: Callable[[T], Sequence[Sequence[float]]] | None = None,
        undo: Callable[[], None] = lambda: None,
        forwards: int = 1,
    ) -> T:
        """The result of ``work`` when all rows fitted, as if it had been done once, with that room.

        Each time ``work`` finds the same random numbers; whatever else it changes, ``undo`` restores. ``overflows``
        takes from a result what `overflow` was in each process; None: it is read. ``forwards``: of the model, in it.

        ValueError: the room that is needed cannot be had.
        """
        if self._capacity is None:
            return work()
        restore = _random_states(self._device)
        for _ in range(self._layers * forwards + 1):  # each time the first layer that had no room has it
            result = work()
            found = values_of_processes(self.overflow(), self._job) if overflows is None else overflows(result)
            if not any(map(any, found)):
                return result
            self._grow([round(rows) for rows, _ in found], what)
            restore()
            undo()
        raise ValueError(
            f"{what}: the same tokens need more rows each time that they are routed; pass --train.deterministic, or "
            "--parallel.exchange collective"
        )

    def _grow(self, needed: list[int], what: str) -> None:
        """Room for the rows that this process' group needs, 0 if they fitted there. ``needed``: of each process."""
        capacity = self._capacity
        assert capacity is not None, "else there was room"
        rooms = values_of_processes(torch.tensor([float(capacity.rows)]), self._job)
        most, (room,) = max(zip(needed, rooms, strict=True))
        if not (own := needed[self._job.rank]):
            capacity.check()  # it is not for rows
        else:
            try:
                capacity.grow(own)
            except RuntimeError as error:
                raise ValueError(f"{what}: a process is to receive {own:,} rows; {error}") from error
        self.repeats += 1
        self.say(f"{what} is repeated: a process was to receive {most:,} rows, and had room for {round(room):,}")

    def learn(self, rows: int) -> None:
        """Between steps: more room, if there is memory, where the most rows that a process of this one's group has
        received nearly fill it.
        """
        if self._capacity is not None and self._learns and rows > _NEARLY_FULL * self._capacity.rows:
            try:
                self._capacity.grow(rows)
            except RuntimeError as error:
                self._learns = False
                self.say(f"no room for more than {self._capacity.rows:,} rows: {error}")


def _random_states(device: torch.device) -> Callable[[], None]:
    """Restores PyTorch's random numbers as they are now."""
    host, gpu = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(host)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)

    return restore
