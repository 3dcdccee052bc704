"""GPU time alone: work is queued behind a sleeping kernel, so that no host counts, and follows a spell of itself.

The host launches a whole window, the spell and what is timed, while the GPU sleeps and computes; the sleep gives it the
lead that it needs. On a CPU the host's clock stands in, to see that everything works.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilemoe.bench import timing

_CYCLES_PER_MS = 1.98e6  # of an H200 at its highest clock; at a lower one the kernel sleeps for longer
_MARGIN = 1.5  # of the lead, for a host that is slower once
_FEWEST, _MOST = 3, 200  # calls timed in a window

# One call: the marks before, between and after its parts.
Step = Callable[[Callable[[], Any]], list[Any]]


@dataclass(frozen=True)
class Clock:
    """How a moment is marked on a device, the milliseconds between two marks, and a kernel that sleeps for some."""

    mark: Callable[[], Any]
    between: Callable[[Any, Any], float]
    synchronize: Callable[[], None]
    sleep: Callable[[float], None]


def clock_of(device: torch.device) -> Clock:
    if device.type == "cuda":
        return Clock(
            timing.event,
            lambda start, end: start.elapsed_time(end),
            torch.cuda.synchronize,
            lambda milliseconds: torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS)),
        )
    return Clock(time.perf_counter, lambda start, end: 1e3 * (end - start), lambda: None, lambda milliseconds: None)


def rounds(
    steps: Mapping[str, Step], clock: Clock, count: int, spell_ms: float, window_ms: float
) -> dict[str, list[list[float]]]:
    """Name to, for each round, the median milliseconds of each part of the step, in changing order (`timing.turn`).

    A window is ``spell_ms`` of the step, then ``window_ms`` that count.
    """
    plans = {name: _plan(step, clock, spell_ms, window_ms) for name, step in steps.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in steps}
    for index in range(count):
        for name in timing.turn(list(steps), index):
            found[name].append(_window(steps[name], clock, *plans[name]))
    return found


def _plan(step: Step, clock: Clock, spell_ms: float, window_ms: float) -> tuple[int, int, float]:
    """(calls of the spell, calls that count, milliseconds of sleep before them)."""
    step(clock.mark)  # what is recorded at a first call is recorded now
    host = gpu = 0.0
    for _ in range(3):
        clock.synchronize()
        clock.sleep(2 * _MARGIN * host)
        start = time.perf_counter()
        marks = step(clock.mark)
        host = 1e3 * (time.perf_counter() - start)
        clock.synchronize()
        gpu = max(clock.between(marks[0], marks[-1]), 1e-3)
    spell, calls = max(1, round(spell_ms / gpu)), min(_MOST, max(_FEWEST, round(window_ms / gpu)))
    return spell, calls, _MARGIN * (host + max(0.0, host - gpu) * (spell + calls))


def _window(step: Step, clock: Clock, spell: int, calls: int, lead_ms: float) -> list[float]:
    clock.synchronize()
    clock.sleep(lead_ms)
    for _ in range(spell):
        step(clock.mark)
    marks = [step(clock.mark) for _ in range(calls)]
    clock.synchronize()
    times = [[clock.between(a, b) for a, b in itertools.pairwise(each)] for each in marks]
    return [statistics.median(part) for part in zip(*times, strict=True)]
