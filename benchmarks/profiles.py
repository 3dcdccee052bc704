"""Where a GPU's time goes: what it does in a piece of work, by name, and for how long it does nothing."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_WIDTH = 110  # of a kernel's name
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # the trace's categories
Rows = list[tuple[str, float, int]]


class Event(NamedTuple):
    """Something that the GPU did; its moments in milliseconds."""

    name: str
    start: float
    end: float


def of_gpu(work: Callable[[], object]) -> list[Event]:
    """Everything that the current GPU does in ``work``, which runs once, in the order of its beginning."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return read(path)


def read(path: Path) -> list[Event]:
    """What the GPU did, from a Chrome trace of torch.profiler's."""
    trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [event for event in trace if event.get("cat") in _ON_GPU]
    events = [Event(each["name"], each["ts"] / 1e3, (each["ts"] + each["dur"]) / 1e3) for each in found]
    return sorted(events, key=lambda event: event.start)


def by_name(events: Iterable[Event]) -> Rows:
    """(name, milliseconds, launches), the longest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.end - event.start)
    return sorted(((name, sum(each), len(each)) for name, each in times.items()), key=lambda row: -row[1])


def usage(events: list[Event]) -> str:
    """The work's milliseconds on the GPU, and of these: idle, busy, and busy with more than NCCL's kernels."""
    if not events:
        return "nothing on a GPU"
    span, busy = max(event.end for event in events) - events[0].start, busy_ms(events)
    computing = busy_ms(event for event in events if "nccl" not in event.name)
    return f"{span:.0f} ms, idle {span - busy:.0f}, busy {busy:.0f}, computing {computing:.0f}"


def busy_ms(events: Iterable[Event]) -> float:
    """Milliseconds in which at least one of them ran, given in the order of their beginning."""
    total, until = 0.0, float("-inf")
    for event in events:
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def write(path: Path, title: str, rows: Rows) -> None:
    """Append a table; streams overlap, so their times may add up to more than passed."""
    total = sum(milliseconds for _, milliseconds, _ in rows)
    lines = [f"{title}: {total:.2f} ms of kernels"]
    lines += [f"{ms:10.3f} ms {count:6d}  {name[:_WIDTH]}" for name, ms, count in rows]
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n\n")
