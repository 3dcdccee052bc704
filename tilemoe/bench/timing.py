"""Timing on one GPU: interleaved rounds in changing order, by device events; without a GPU by the host's clock.

The clock moves by 10% with what ran before, so every contestant runs in every round, and after different ones.
"burst" is after idling; "sustained" follows a spell of the same work that lets the clock settle.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IDLE_SECONDS = 0.3
SUSTAINED_MS = 120.0  # of the same work before it is measured
BURST_CALLS, SUSTAINED_CALLS = 3, 10


class HostEvent:
    """A moment by the host's clock, where there is no GPU: the work is done when it is launched."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: HostEvent) -> float:
        """Milliseconds until ``other``."""
        return 1e3 * (other.seconds - self.seconds)

    def synchronize(self) -> None:
        """Nothing is under way."""


Rows = list[dict[str, Any]]
# A moment on the device; what takes two of them takes two of one kind.
Event = Any
# One call gives the moments before, between and after its parts.
Step = Callable[[], list[Event]]


@dataclass(frozen=True)
class Settings:
    """What is timed how: the device, the contestants (the first is what the others are compared to), modes and rounds.

    modes: "burst", "sustained" and, of the layer, "alone". kernels: the backend whose kernels are timed; None: the one
    that is chosen.
    """

    device: torch.device
    peers: Sequence[str] = ("tilemoe",)
    modes: Sequence[str] = ("burst", "sustained")
    rounds: int = 7
    kernels: str | None = None


def event() -> Event:
    """A moment: on a GPU recorded now, on the current stream."""
    if not torch.cuda.is_available():
        return HostEvent()
    recorded = torch.cuda.Event(enable_timing=True)
    recorded.record()
    return recorded


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def one_part(run: Callable[[], Any], ahead: Callable[[], Any] = lambda: None) -> Step:
    """A step that is timed as a whole; ``ahead``, untimed and only on a GPU, as in `forward_and_backward`."""

    def step() -> list[Event]:
        if torch.cuda.is_available():
            ahead()
        start = event()
        run()
        return [start, event()]

    return step


def forward_and_backward(
    forward: Callable[[], Any], inputs: Sequence[Tensor], gradient: Any, ahead: Callable[[], Any] = lambda: None
) -> Step:
    """A step of two parts: ``forward()``, a tensor or several, and the gradients of that with respect to ``inputs``.

    ``ahead`` keeps the GPU busy until both are launched: of kernels this small the host's time would be measured.
    """

    def step() -> list[Event]:
        if torch.cuda.is_available():
            ahead()
        events = [event()]
        out = forward()
        events.append(event())
        torch.autograd.grad(out, inputs, gradient)
        return [*events, event()]

    return step


def rounds(steps: Mapping[str, Step], mode: str, count: int) -> dict[str, list[list[float]]]:
    """Name to, for each round, the median milliseconds of each part of the step. ``mode``: "burst" or "sustained"."""
    names = list(steps)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    settles = mode == "sustained" and torch.cuda.is_available()  # a GPU's clock
    settle = {name: _calls_for(steps[name], SUSTAINED_MS) if settles else 1 for name in names}
    calls = SUSTAINED_CALLS if mode == "sustained" else BURST_CALLS
    for index in range(count):
        if not torch.cuda.is_available():  # where a case may take minutes
            print(f"{mode}: round {index + 1} of {count}", flush=True)
        for name in turn(names, index):
            if mode == "burst":
                synchronize()
                time.sleep(IDLE_SECONDS)
            for _ in range(settle[name]):
                steps[name]()
            samples = [steps[name]() for _ in range(calls)]
            synchronize()
            found[name].append(medians(samples))
    return found


def medians(samples: list[list[Event]]) -> list[float]:
    """The median milliseconds of each part, of calls whose device is done."""
    times = [[start.elapsed_time(end) for start, end in itertools.pairwise(sample)] for sample in samples]
    return [statistics.median(part) for part in zip(*times, strict=True)]


def turn(names: list[str], index: int) -> list[str]:
    """The order of round ``index``: every other round it is turned by one, between them it runs backwards.

    How much power a contestant draws is felt for a while after it: nobody may come after the same one in every round.
    """
    first = index // 2 % len(names)
    order = names[first:] + names[:first]
    return order[::-1] if index % 2 else order


def summary(values: list[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentile, in the unit given."""
    if len(values) == 1:
        return {"median": values[0], "p20": values[0], "p80": values[0]}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": round(statistics.median(values), 4), "p20": round(fifths[0], 4), "p80": round(fifths[3], 4)}


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over the rounds of theirs / ours."""
    return round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 4)


def memory_of(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """(what ``run`` returned, bytes it left allocated, bytes allocated at its peak), both beyond those before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def _calls_for(step: Step, milliseconds: float) -> int:
    step()
    events = step()
    events[-1].synchronize()
    return max(1, round(milliseconds / max(events[0].elapsed_time(events[-1]), 1e-3)))
