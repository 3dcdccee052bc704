"""The loop of `tilemoe bench` and the scripts in benchmarks/: measures case by case, and records each at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from tilemoe.bench import record

T = TypeVar("T")


def selected(what: str, names: str, known: Mapping[str, T]) -> dict[str, T]:
    """The entries of ``known`` that ``names`` lists: "all", or names with commas. SystemExit: a name is unknown."""
    chosen = list(known) if names == "all" else names.split(",")
    for name in chosen:
        if name not in known:
            raise SystemExit(f"no {what} called {name!r}; known are all, {', '.join(known)}")
    return {name: known[name] for name in chosen}


def each_case(
    file: str,
    cases: Mapping[str, T],
    measure: Callable[[str, T], Iterator[list[record.Row]]],
    describe: Callable[[record.Row], str],
    seconds: float = float("inf"),
) -> None:
    """Measure, print and append each case to results/<file>.jsonl; start no case after ``seconds``."""
    start = time.perf_counter()
    for name, case in cases.items():
        begun = time.perf_counter() - start
        print(f"{name}: {case}", flush=True)
        if begun > seconds:
            print(f"{name} and the cases after it are left out: {begun:.0f} s have passed")
            break
        for rows in measure(name, case):
            print("\n".join(map(describe, rows)), flush=True)
            record.append(file, rows)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start - begun:.0f} s", flush=True)
