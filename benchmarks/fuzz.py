"""Run tests/fuzz with many cases, and record how many there were and what was wrong in results/fuzz.jsonl.

    python benchmarks/fuzz.py [--share 1] [--seed N] [further arguments of pytest]
    python benchmarks/fuzz.py --report

``--share`` of the parts of a full run: 10^4 wrong calls of several arguments (and every one of a single argument), 10^6
routings through the torch backend, 10^4 through Triton's interpreter and, where there is a GPU, 10^4 on it. On 16
cores the first takes about 8 minutes, the second perhaps 10 and the third 3, by:

    timeout 480 python benchmarks/fuzz.py --seed N -n 16 --dist worksteal -k torch_backend
    timeout 480 python benchmarks/fuzz.py --seed N -n 16 --dist worksteal -k interpreter
    timeout 480 python benchmarks/fuzz.py --seed N -n 16 --dist worksteal -k "triton_backends and not interpreter"

A run that is interrupted, by SIGTERM too, records the parts that were judged until then. The same command does the
rest: parts of its seed that have a row at this commit are left out. ``--report`` prints how many cases there are at
each commit, a part of a seed once. Exits as pytest does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_tests import Outcomes, interrupt_once, unfinished

from tilemoe.bench import record

Parts = dict[str, dict[str, int]]  # test -> its arguments, as pytest has them -> cases


def short_name(test: str, arguments: str = "") -> str:
    suffix = "_interpreter" if arguments.startswith("interpreter") else ""
    return Path(test).name.partition("::")[2] + suffix


class Counted(Outcomes):
    """A plugin of pytest that keeps how many cases each test judged, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: Counter[str] = Counter()
        self.parts: Parts = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        super().pytest_runtest_logreport(report)
        if report.when == "call":
            test, _, arguments = report.nodeid.removesuffix("]").partition("[")
            if report.failed:  # the error, and the least case that has it
                shown = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
                self.reasons[report.nodeid] = " ".join(shown)[:2000]
            if count := dict(report.user_properties).get("cases", 0):
                self.cases[short_name(test, arguments)] += count
                if not report.failed:
                    self.parts.setdefault(test, {})[arguments] = count


def judged_before(seed: int) -> Iterator[str]:
    """The tests of this seed that rows of this very commit have."""
    commit = record.commit()
    if commit == "unknown" or commit.endswith("+dirty"):
        return
    for row in record.rows("fuzz"):
        if (row["seed"], row["commit"]) == (seed, commit):
            for test, parts in row.get("parts", {}).items():
                yield from (f"{test}[{arguments}]" if arguments else test for arguments in parts)


def report() -> str:
    """By commit and test: cases, a part of a seed once; seeds; tests that found a mismatch."""
    cases: dict[tuple[str, str], dict[tuple[int, str, str], int]] = defaultdict(dict)
    wrong: Counter[tuple[str, str]] = Counter()
    for row in record.rows("fuzz"):
        for test, parts in row.get("parts", {}).items():  # rows without them overlap
            for arguments, count in parts.items():
                cases[row["commit"], short_name(test, arguments)][row["seed"], test, arguments] = count
        for name in row["mismatches"] if "parts" in row else ():
            test, _, arguments = name.partition("[")
            wrong[row["commit"], short_name(test, arguments)] += 1
    lines = [f"{'commit':<14} {'test':<34} {'cases':>9} {'seeds':>6} {'mismatches':>11}"]
    for key in {**cases, **wrong}:
        seeds = {seed for seed, *_ in cases[key]}
        lines.append(f"{key[0]:<14} {key[1]:<34} {sum(cases[key].values()):>9} {len(seeds):>6} {wrong[key]:>11}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--report", action="store_true")
    options, more = parser.parse_known_args()
    if options.report:
        print(report())
        return 0
    os.environ |= {"FUZZ": str(options.share), "FUZZ_SEED": str(options.seed), "OMP_NUM_THREADS": "1"}
    interrupt_once()
    before = [f"--deselect={name}" for name in judged_before(options.seed)]
    counted, start = Counted(), time.perf_counter()
    chosen = [] if torch.cuda.is_available() else ["-m", "not gpu"]
    command = [f"--rootdir={record.ROOT}", "-p", "no:cacheprovider", "-W", "ignore", *chosen, *before, *more]
    code = pytest.main([*command, str(record.ROOT / "tests/fuzz")], plugins=[counted])
    if not counted.cases and not counted.reasons:
        raise SystemExit(f"no case was judged, nothing is recorded; rows have {len(before)} tests of this seed")
    row = {
        "share": options.share,
        "seed": options.seed,
        "cases": dict(sorted(counted.cases.items())),
        "mismatches": counted.reasons,
        "parts": counted.parts,
        "seconds": round(time.perf_counter() - start, 1),
        "arguments": more,
        **unfinished(code),
    }
    print(f"{row}\nrecorded in {record.append('fuzz', [row])}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
