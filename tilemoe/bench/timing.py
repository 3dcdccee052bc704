"""Timing on one GPU: interleaved rounds in changing order, by CUDA events; without a GPU by the host's clock.

The GPU's clock rate varies by 10% with the previous work, so every contestant runs in every round, after different
ones. "burst" times after idling; "sustained" after a spell of the same work, which lets the clock settle; "alone" times
the GPU without the host: the host launches a whole window, spell included, while the GPU sleeps and computes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

IDLE_SECONDS = 0.3
SUSTAINED_MS = 120.0  # spell of the same work before it is measured
BURST_CALLS, SUSTAINED_CALLS = 3, 10
ALONE_MS, ALONE_FEWEST, ALONE_MOST = 40.0, 3, 200  # timed length of an "alone" window, and bounds of its calls
HOST_CALLS = 7
_CYCLES_PER_MS = 1.98e6  # an H200's at its highest clock; at lower clocks the kernel sleeps longer
_MARGIN = 1.5  # factor on the GPU's sleep, in case the host is slower than when measured

T = TypeVar("T")
# A moment: a CUDA event or a `HostEvent`. Functions of two moments need two of the same kind.
Event = Any
# One call returns the moments before, between and after its parts.
Step = Callable[[], list[Event]]


class HostEvent:
    """A moment by the host's clock. Without a GPU, work is done when its launch returns."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, other: HostEvent) -> float:
        """Milliseconds until ``other``."""
        return 1e3 * (other.seconds - self.seconds)


@dataclass(frozen=True)
class Settings:
    """What is timed and how: the device, the contestants (the first is the baseline), modes and rounds.

    modes: "burst", "sustained" and, for the layer, "alone". kernels: the backend whose kernels are timed; None: the one
    that `tilemoe.select_kernels` chooses.
    """

    device: torch.device
    peers: Sequence[str] = ("tilemoe",)
    modes: Sequence[str] = ("burst", "sustained")
    rounds: int = 7
    kernels: str | None = None


def event() -> Event:
    """The current moment: on a GPU, an event recorded on the current stream."""
    if not torch.cuda.is_available():
        return HostEvent()
    recorded = torch.cuda.Event(enable_timing=True)
    recorded.record()
    return recorded


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sleep(milliseconds: float) -> None:
    """Keep the GPU, if there is one, idle for ``milliseconds`` before the next launch runs."""
    if torch.cuda.is_available():
        torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))


def in_parts(
    work: Callable[[], Iterable[object]], ahead: Callable[[], object] = lambda: None, mark: Callable[[], Event] = event
) -> Step:
    """A step that runs ``work``, a generator that yields at the end of each part.

    ``ahead``, untimed, keeps a GPU busy until all is launched: with small kernels, the host's time would be measured.
    ``mark``: `HostEvent` gives the moments when the host has launched each part.
    """

    def step() -> list[Event]:
        if torch.cuda.is_available():
            ahead()
        return [mark(), *(mark() for _ in work())]

    return step


def one_part(run: Callable[[], object], **options: Any) -> Step:
    """`in_parts` with one part: ``run`` is timed as a whole."""

    def work() -> Iterator[object]:
        yield run()

    return in_parts(work, **options)


def forward_and_backward(forward: Callable[[], Any], inputs: Sequence[Tensor], gradient: Any, **options: Any) -> Step:
    """`in_parts` with two parts: ``forward()`` (one or more tensors), and its gradients with respect to ``inputs``."""

    def work() -> Iterator[object]:
        out = forward()
        yield None
        yield torch.autograd.grad(out, inputs, gradient)

    return in_parts(work, **options)


def turn(names: Sequence[str], index: int) -> list[str]:
    """The order of round ``index``: rotated by one every second round, and reversed in the rounds between.

    A contestant's power draw affects what runs after it, so no contestant may follow the same one in every round.
    """
    first = index // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if index % 2 else order


def in_turn(
    runs: Mapping[str, Callable[[], T]], count: int, before: Callable[[int], object] = lambda index: None
) -> dict[str, list[T]]:
    """{name: its results in each round}, run in changing order; ``before`` is called with each round's index."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    for index in range(count):
        before(index)
        for name in turn(list(runs), index):
            found[name].append(runs[name]())
    return found


def rounds(steps: Mapping[str, Step], mode: str, count: int) -> dict[str, list[list[float]]]:
    """{name: for each round, the median milliseconds of each part of its step}. ``mode``: see the module."""

    def announce(index: int) -> None:
        if not torch.cuda.is_available():  # where a case may take minutes
            print(f"{mode}: round {index + 1} of {count}", flush=True)

    windows = {name: _window(step, mode) for name, step in steps.items()}
    return in_turn({name: partial(windows[name].medians_of, step) for name, step in steps.items()}, count, announce)


@dataclass(frozen=True)
class _Window:
    """``spell`` untimed calls of a step, then ``calls`` timed ones; before them the GPU is idle."""

    spell: int
    calls: int
    idle_seconds: float = 0.0
    sleep_ms: float = 0.0

    def medians_of(self, step: Step) -> list[float]:
        synchronize()
        time.sleep(self.idle_seconds)
        sleep(self.sleep_ms)
        for _ in range(self.spell):
            step()
        marks = [step() for _ in range(self.calls)]
        synchronize()
        return medians(marks)


def _window(step: Step, mode: str) -> _Window:
    """The window for ``mode``. In "alone" the GPU sleeps so that the host gets ahead; a CPU does not sleep."""
    if mode == "burst":
        return _Window(1, BURST_CALLS, idle_seconds=IDLE_SECONDS)
    if mode == "sustained" and not torch.cuda.is_available():  # no clock has to settle
        return _Window(1, SUSTAINED_CALLS)
    step()  # a first call compiles and records
    host = gpu = 0.0
    for _ in range(3):
        synchronize()
        sleep(2 * _MARGIN * host)
        start = HostEvent()
        marks = step()
        host = start.elapsed_time(HostEvent())
        synchronize()
        gpu = max(marks[0].elapsed_time(marks[-1]), 1e-3)
    if mode == "sustained":  # if the host is slower, the GPU waits for it
        return _Window(max(1, round(SUSTAINED_MS / max(host, gpu))), SUSTAINED_CALLS)
    assert mode == "alone"
    spell = max(1, round(SUSTAINED_MS / gpu))
    calls = min(ALONE_MOST, max(ALONE_FEWEST, round(ALONE_MS / gpu)))
    return _Window(spell, calls, sleep_ms=_MARGIN * (host + max(0.0, host - gpu) * (spell + calls)))


def host_ms(step: Step) -> list[float]:
    """Median milliseconds until the host has launched each part, for a step that marks with `HostEvent`."""
    samples = []
    for _ in range(HOST_CALLS):
        synchronize()
        samples.append(step())
    return medians(samples)


def wall_ms(run: Callable[[], Any], calls: int = 1) -> float:
    """Milliseconds per call by the host's clock, from an idle device until all calls are done."""
    synchronize()
    start = HostEvent()
    for _ in range(calls):
        run()
    synchronize()
    return start.elapsed_time(HostEvent()) / calls


def memory_of(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """(what ``run`` returned, bytes it left allocated, bytes allocated at its peak), both beyond those before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    return result, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def medians(samples: Sequence[Sequence[Event]]) -> list[float]:
    """The median milliseconds of each part over ``samples``, which the device must have finished."""
    times = [[start.elapsed_time(end) for start, end in itertools.pairwise(sample)] for sample in samples]
    return [statistics.median(part) for part in zip(*times, strict=True)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and the 20th and 80th percentile, in the unit given."""
    if len(values) == 1:
        return {"median": values[0], "p20": values[0], "p80": values[0]}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": round(statistics.median(values), 4), "p20": round(fifths[0], 4), "p80": round(fifths[3], 4)}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds of theirs / ours."""
    return round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 4)
