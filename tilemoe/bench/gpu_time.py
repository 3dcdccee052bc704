"""GPU time alone: work is queued behind a sleeping kernel, so that the host's time does not count. Each window begins
with some of the same work, which is not timed.

The host launches a whole window, the spell and what is timed, while the GPU sleeps and computes; the sleep gives it the
lead that it needs. On a CPU nothing sleeps, to see that everything works.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from tilemoe.bench import timing

_CYCLES_PER_MS = 1.98e6  # of an H200 at its highest clock; at a lower one the kernel sleeps for longer
_MARGIN = 1.5  # of the lead, for a host that is slower once
_FEWEST, _MOST = 3, 200  # calls timed in a window


def sleep(milliseconds: float) -> None:
    """Keep the GPU, if there is one, idle that long before what is launched next."""
    if torch.cuda.is_available():
        torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))


def rounds(
    steps: Mapping[str, timing.Step], count: int, spell_ms: float, window_ms: float
) -> dict[str, list[list[float]]]:
    """Name to, for each round, the median milliseconds of each part of the step, in changing order (`timing.turn`).

    A window is ``spell_ms`` of the step, then ``window_ms`` that count.
    """
    plans = {name: _plan(step, spell_ms, window_ms) for name, step in steps.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in steps}
    for index in range(count):
        for name in timing.turn(list(steps), index):
            found[name].append(_window(steps[name], *plans[name]))
    return found


def _plan(step: timing.Step, spell_ms: float, window_ms: float) -> tuple[int, int, float]:
    """(calls of the spell, calls that count, milliseconds of sleep before them)."""
    step()  # what is recorded at a first call is recorded now
    host = gpu = 0.0
    for _ in range(3):
        timing.synchronize()
        sleep(2 * _MARGIN * host)
        start = time.perf_counter()
        marks = step()
        host = 1e3 * (time.perf_counter() - start)
        timing.synchronize()
        gpu = max(marks[0].elapsed_time(marks[-1]), 1e-3)
    spell, calls = max(1, round(spell_ms / gpu)), min(_MOST, max(_FEWEST, round(window_ms / gpu)))
    return spell, calls, _MARGIN * (host + max(0.0, host - gpu) * (spell + calls))


def _window(step: timing.Step, spell: int, calls: int, lead_ms: float) -> list[float]:
    timing.synchronize()
    sleep(lead_ms)
    for _ in range(spell):
        step()
    marks = [step() for _ in range(calls)]
    timing.synchronize()
    return timing.medians(marks)
