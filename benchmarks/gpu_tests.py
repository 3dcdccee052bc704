"""Run the tests that need a GPU, and record what came of them in results/gpu_tests.jsonl.

    python benchmarks/gpu_tests.py [further arguments of pytest]

Exits as pytest does. Only files with such tests are collected: the others may import what a GPU machine lacks. A run
that is interrupted, by SIGTERM too, records what it got to.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tilemoe.bench.record import ROOT, append

SANITIZER = "test_triton_gpu_sanitizer"


class Outcomes:
    """A plugin of pytest that keeps what came of each test, and says at once what did not pass."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            last = (reason.strip().splitlines() or [""])[-1]
            self.by_test[report.nodeid] = report.outcome
            self.reasons[report.nodeid] = f"{report.outcome}: {last}"[:200]
            print(f"\n{report.nodeid}\n{reason}", flush=True)
        elif report.when == "call":
            self.by_test.setdefault(report.nodeid, "passed")

    def summary(self) -> dict[str, Any]:
        """Counts of outcomes; what passed by file; what did not, skips with their reason; the sanitizer's verdicts."""
        by_file = Counter(name.split("::")[0] for name, outcome in self.by_test.items() if outcome == "passed")
        verdicts = {name: outcome for name, outcome in self.by_test.items() if SANITIZER in name}
        return {
            "passed": 0,
            "failed": 0,
            "skipped": 0,
            **Counter(self.by_test.values()),
            "passed_of_file": dict(sorted(by_file.items())),
            "sanitizer": {name.split("::test_")[-1]: outcome for name, outcome in sorted(verdicts.items())},
            "not_passed": self.reasons,
        }


def interrupt_once() -> None:
    """SIGTERM interrupts as Ctrl-C does. A second signal is ignored, while what was found is recorded."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, interrupt)


def unfinished(code: int) -> dict[str, str]:
    """What a row says of a run that pytest did not end by itself."""
    ended = code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return {} if ended else {"unfinished": f"pytest exited with {int(code)}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, more = parser.parse_known_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here: these tests are for a machine with one")
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    files.sort(key=lambda path: path.stem != SANITIZER)  # by far the longest: not last, with the other processes idle
    interrupt_once()
    outcomes = Outcomes()
    start = time.perf_counter()
    command = [f"--rootdir={ROOT}", "-m", "gpu and not dist", "-p", "no:cacheprovider", *more, *map(str, files)]
    code = pytest.main(command, plugins=[outcomes])
    seconds = round(time.perf_counter() - start, 1)
    row = {**outcomes.summary(), "seconds": seconds, "arguments": more, **unfinished(code)}
    path = append("gpu_tests", [row])
    print(f"{row}\nrecorded in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
