"""Where a GPU's time goes: the kernels of a piece of work, by name, the longest first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_WIDTH = 110  # of a kernel's name


def of_kernels(work: Callable[[], object]) -> list[tuple[str, float, int]]:
    """(name, milliseconds, launches) of everything that the current GPU does in ``work``, which runs once."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    rows = [(event.key, event.self_device_time_total / 1e3, event.count) for event in found.key_averages()]
    return sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def write(path: Path, title: str, rows: list[tuple[str, float, int]]) -> None:
    """Append a table; streams overlap, so their times may add up to more than passed."""
    total = sum(milliseconds for _, milliseconds, _ in rows)
    lines = [f"{title}: {total:.2f} ms of kernels"]
    lines += [f"{ms:10.3f} ms {count:6d}  {name[:_WIDTH]}" for name, ms, count in rows]
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n\n")
