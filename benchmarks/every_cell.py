"""Compile F1 and B1 for every cell that the Hopper backend serves, and record it in results/every_cell.jsonl.

    TILEMOE_CELLS=all python benchmarks/every_cell.py [further arguments of pytest]

`make every-cell` does that, without a GPU: `tests/kernels/test_hopper_cells.py` says what is asserted. Exits as
pytest does. A run that is interrupted, by SIGTERM too, records what it got to, and the next one finds in Triton's cache
what was compiled; with an empty ``TRITON_CACHE_DIR`` all is compiled anew. A row says how many came from the cache.
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


class Cells(Outcomes):
    """What came of each test; of those that compiled a cell, how many it stands for, and the spills of its family."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: Counter[str] = Counter()
        self.compiled = self.from_cache = 0
        self.spills: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        super().pytest_runtest_logreport(report)
        said = dict(report.user_properties)
        if report.when == "call" and "cells" in said:
            kernel, family = said["family"].partition(" ")[0], said["family"]
            self.cells[kernel] += said["cells"]
            self.compiled += 1
            self.from_cache += said["cached"]
            self.spills[family] = max(self.spills.get(family, 0), said["spills"])


def main(arguments: list[str]) -> int:
    interrupt_once()
    cells = Cells()
    start = time.perf_counter()
    command = [f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-W", "ignore", *arguments]
    code = pytest.main([*command, str(ROOT / "tests" / "kernels" / "test_hopper_cells.py")], plugins=[cells])
    if not cells.compiled:
        raise SystemExit(f"no cell was compiled and nothing is recorded; pytest exited with {int(code)}")
    found = cells.summary()
    row = {
        "selection": os.environ.get("TILEMOE_CELLS", "short"),
        "cells": dict(sorted(cells.cells.items())),
        "compiled": cells.compiled,
        "from_cache": cells.from_cache,
        "spill_loads_of_family": {family: count for family, count in sorted(cells.spills.items()) if count},
        **{name: found[name] for name in ("passed", "failed", "skipped", "not_passed")},
        "arguments": arguments,
        "seconds": round(time.perf_counter() - start, 1),
        **unfinished(code),
    }
    print(f"{row}\nrecorded in {append('every_cell', [row])}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
