"""Measuring case by case, each recorded as soon as it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch

from tilemoe.bench import record, timing
from tilemoe.bench.kernels import each_kernel
from tilemoe.bench.layer import layer
from tilemoe.bench.step import step
from tilemoe.shape import MoEShape

Measure = Callable[[timing.Settings, str, MoEShape], Iterator[timing.Rows]]
MEASURES: Mapping[str, Measure] = MappingProxyType({"layer": layer, "kernels": each_kernel, "step": step})


def each_case(what: str, shapes: Mapping[str, MoEShape], settings: timing.Settings, seconds: float) -> None:
    """Measure ``what`` of `MEASURES`, and append to its file of results; no case is begun after ``seconds``."""
    start = time.perf_counter()
    for name, shape in shapes.items():
        begun = time.perf_counter() - start
        print(f"{name}: {shape}", flush=True)
        if begun > seconds:
            print(f"{name} and the cases after it are left out: {begun:.0f} s have passed")
            break
        for rows in MEASURES[what](settings, name, shape):
            path = record.append(what, rows)
            print(f"appended to {path}", flush=True)
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start - begun:.0f} s", flush=True)
