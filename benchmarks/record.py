"""Results files: one JSON object a line, each with the commit, the machine and the versions it was measured with."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


def append(name: str, rows: list[dict[str, Any]]) -> Path:
    """Append ``rows``, each with where and when it was measured, to ``results/<name>.jsonl``; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    where = provenance()
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({**row, **where}) + "\n")
    return path


def provenance() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _commit() -> str:
    """The commit of the code that ran; "+dirty" when files of the package or the benchmarks differ from it."""

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
