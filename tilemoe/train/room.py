"""Repeats work with more receive capacity if a process had no room for all rows that its experts were sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from tilemoe.layers.experts import Experts, capacity_of
from tilemoe.train.job.collective import values_of_processes
from tilemoe.train.job.processes import Job

T = TypeVar("T")
_STEPS = 16  # number of recent steps that predict what the next will need


class Room:
    """The receive capacity of processes that share a model's experts; all processes of the job must use it together.

    Without a limit on rows (see `tilemoe.dispatch.base.Capacity`), work runs once and nothing waits.

    ``say`` gets a line for each repeat, and ``repeats`` counts them.
    """

    def __init__(self, model: nn.Module, device: torch.device, job: Job, say: Callable[[str], None]) -> None:
        self._capacity, self._device, self._job, self.say = capacity_of(model, device), device, job, say
        if self._capacity is not None:
            self._capacity.is_watched = True
        self._layers = sum(isinstance(module, Experts) for module in model.modules())
        self._recent: deque[tuple[list[int], int]] = deque(maxlen=_STEPS)
        self.repeats, self._widens = 0, True

    @property
    def rows(self) -> int | None:
        """The most rows that a process can receive in a layer; None: any number."""
        return None if self._capacity is None else self._capacity.rows

    def overflow(self) -> Tensor:
        """(3,) fp64: rows and tokens that did not fit (0: all did), and the layer, see `Capacity`."""
        found = torch.zeros(3, device=self._device) if self._capacity is None else self._capacity.overflow()
        return found.double()

    def until_it_fits(
        self,
        work: Callable[[], T],
        what: str,
        overflows: Callable[[T], Sequence[Sequence[float]]] | None = None,
        undo: Callable[[], None] = lambda: None,
        forwards: int = 1,
    ) -> T:
        """The result of ``work`` once all rows fit, as if it had run only once, with enough room.

        Every attempt starts with the same random numbers; ``undo`` must restore anything else that ``work`` changes.
        ``overflows`` extracts each process' `overflow` from a result; None: it is all-gathered. ``forwards``: the
        number of model forwards in ``work``. ValueError: there is no memory for the rows, or repeats do not help.
        """
        if self._capacity is None:
            return work()
        restore = _random_states(self._device)
        for attempt in range(self._layers * forwards + 1):  # each repeat gives room to the first layer without it
            result = work()
            found = values_of_processes(self.overflow(), self._job) if overflows is None else overflows(result)
            if not any(map(any, found)):
                return result
            self._grow([(round(rows), round(layer)) for rows, _, layer in found], what)
            if attempt == 1:  # other layers will have learnt too little as well
                self._capacity.forget()
            restore()
            undo()
        raise ValueError(
            f"{what}: the same tokens need more rows in each repeat; pass --train.deterministic or "
            "--parallel.exchange collective"
        )

    def _grow(self, needed: list[tuple[int, int]], what: str) -> None:
        """Make room for the rows that this process' group needs. ``needed``: (rows, layer) per process; rows is 0 if
        all fitted.
        """
        capacity, (own, where) = self._capacity, needed[self._job.rank]
        assert capacity is not None, "else there was room"
        if not own:
            capacity.check()  # raises if tokens, not rows, did not fit
        else:
            try:
                capacity.grow(own, where)
            except RuntimeError as error:
                raise ValueError(f"{what}: this process would receive {own:,} rows; {error}") from error
        self.repeats += 1
        most, layer = max(needed)
        self.say(f"{what} is repeated: a process had no room for its {most:,} rows in layer {layer}")

    def learn(self, rows: list[int], most: int) -> None:
        """Call it between steps: fits each layer's room to the rows of recent steps. rows: per layer, the most that
        this process received in a micro-batch; most: the most that any of its group received in any layer.
        """
        self._recent.append((rows, most))
        if self._capacity is None or len(self._recent) < _STEPS:
            return
        of_layers, of_all = zip(*self._recent, strict=True)
        own = [max(each) for each in zip(*of_layers, strict=True)]
        try:
            self._capacity.learn(own, max(of_all) if self._widens else 0)
        except RuntimeError as error:
            self._widens = False
            self.say(f"no room for more than {self._capacity.rows:,} rows: {error}")


def _random_states(device: torch.device) -> Callable[[], None]:
    """A function that restores PyTorch's random-number states of now."""
    host, gpu = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(host)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)

    return restore
