"""Results files: one JSON object per line, each with the commit, machine and versions of its measurement; and the loop
that measures case by case and records each at once.

    python -m tilemoe.bench.record

prints the commit of this checkout. For a copy elsewhere, set ``TILEMOE_COMMIT=...`` to it. The files are in the
checkout's ``results``, in ``./results`` if the package is installed, or in the folder ``TILEMOE_RESULTS``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parents[2]  # the root of a checkout
RESULTS = Path(os.environ.get("TILEMOE_RESULTS", (ROOT if (ROOT / "results").is_dir() else Path.cwd()) / "results"))
COMMIT_VARIABLE = "TILEMOE_COMMIT"
Row = dict[str, Any]
T = TypeVar("T")


def append(name: str, rows: list[Row]) -> Path:
    """Append ``rows``, each with its `provenance`, to ``results/<name>.jsonl``; prints and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    where = provenance()
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, **where}) + "\n")
    print(f"appended to {path}", flush=True)
    return path


def rows(name: str, **wanted: Any) -> list[Row]:
    """The rows of results/<name>.jsonl with the values ``wanted``, the oldest first; none if there is no such file."""
    path = RESULTS / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if wanted.items() <= row.items()]


def newest(name: str, *keys: str, **wanted: Any) -> dict[Any, Row]:
    """{values of ``keys``, a tuple if there are several: the last such row of `rows`}. ValueError: there is none."""
    found = [(tuple(map(row.get, keys)), row) for row in rows(name, **wanted)]
    if not found:
        raise ValueError(f"results/{name}.jsonl has no row of {wanted or 'any kind'}; run that benchmark first")
    return {values if len(keys) > 1 else values[0]: row for values, row in found}


def provenance() -> Row:
    return {
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
    }


def version(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the running code, with "+dirty" if files of the package or the benchmarks differ from it.

    The environment variable comes first, for a copy whose own history lags behind; without it and git, "unknown".
    """
    told = os.environ.get(COMMIT_VARIABLE)
    if told:
        return told
    if not (ROOT / ".git").exists():  # installed: a repository around it is not ours
        return "unknown"

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--", "tilemoe", "benchmarks")
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
    measure: Callable[[str, T], Iterator[list[Row]]],
    describe: Callable[[Row], str],
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
        for measured in measure(name, case):
            print("\n".join(map(describe, measured)), flush=True)
            append(file, measured)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start - begun:.0f} s", flush=True)


if __name__ == "__main__":
    print(commit())
