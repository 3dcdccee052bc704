"""Run tests/fuzz with many cases, and record how many there were and what was wrong in results/fuzz.jsonl.

    python benchmarks/fuzz.py [--share 1] [--seed N] [further arguments of pytest]

``--share`` of a full run's cases: 10^4 wrong calls of several arguments (and every one of a single argument), 10^6
routings through the torch backend, 10^4 through Triton's interpreter and, where there is a GPU, 10^4 on it. Exits as
pytest does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tests import Outcomes

from tilemoe.bench.record import ROOT, append


class Counted(Outcomes):
    """A plugin of pytest that keeps how many cases each test judged, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        super().pytest_runtest_logreport(report)
        if report.when == "call":
            name = Path(report.nodeid).name.partition("::")[2].replace("[interpreter-", "_interpreter[")
            if report.failed:  # the error, and the least case that has it
                shown = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
                self.reasons[report.nodeid] = " ".join(shown)[:2000]
            self.cases[name.partition("[")[0]] += dict(report.user_properties).get("cases", 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options, more = parser.parse_known_args()
    os.environ |= {"FUZZ": str(options.share), "FUZZ_SEED": str(options.seed), "OMP_NUM_THREADS": "1"}
    counted, start = Counted(), time.perf_counter()
    chosen = [] if torch.cuda.is_available() else ["-m", "not gpu"]
    command = [f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-W", "ignore", *chosen, *more, str(ROOT / "tests/fuzz")]
    code = pytest.main(command, plugins=[counted])
    row = {
        "share": options.share,
        "seed": options.seed,
        "cases": {name: count for name, count in sorted(counted.cases.items()) if count},
        "mismatches": counted.reasons,
        "seconds": round(time.perf_counter() - start, 1),
        "arguments": more,
    }
    print(f"{row}\nrecorded in {append('fuzz', [row])}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
