"""Run every fault of tests/faults, and record how many of each kind there were in results/faults.jsonl.

    TILEMOE_FAULTS=all python benchmarks/faults.py [further arguments of pytest]

`make faults` does that. Exits as pytest does. A run that is interrupted, by SIGTERM too, records what it got to.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from typing import Any

import pytest
from gpu_tests import Outcomes, interrupt_once, unfinished

from tilemoe.bench.record import ROOT, append


class Faults(Outcomes):
    """What came of each test, and how many faults it was: one, or those that it says it has enumerated."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        super().pytest_runtest_logreport(report)
        file, _, name = report.nodeid.rpartition("::")
        kind, is_case, _ = name.partition("[")[2].partition("-")
        if report.when == "call" and is_case:  # the others look at what is enumerated
            topic = file.rpartition("test_faults_")[2].removesuffix(".py")
            said = dict(report.user_properties)
            self.faults[f"{topic}: {said.get('kind', kind)}"] += said.get("cases", 1)


def main(arguments: list[str]) -> int:
    interrupt_once()
    outcomes = Faults()
    start = time.perf_counter()
    command = [f"--rootdir={ROOT}", "-m", "not gpu", "-p", "no:cacheprovider", "-W", "ignore"]
    code = pytest.main([*command, *arguments, str(ROOT / "tests" / "faults")], plugins=[outcomes])
    found = outcomes.summary()
    if not outcomes.by_test:
        raise SystemExit(f"no fault was tried and nothing is recorded; pytest exited with {int(code)}")
    row = {
        "selection": os.environ.get("TILEMOE_FAULTS", "short"),
        "faults": sum(outcomes.faults.values()),
        "faults_of_kind": dict(sorted(outcomes.faults.items())),
        **{name: found[name] for name in ("passed", "failed", "skipped", "not_passed")},
        "arguments": arguments,
        "seconds": round(time.perf_counter() - start, 1),
        **unfinished(code),
    }
    print(f"{row}\nrecorded in {append('faults', [row])}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
