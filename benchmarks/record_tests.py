"""Run one kind of tests and append a row of what came of them to results/.

    OMP_NUM_THREADS=1 python benchmarks/record_tests.py gpu -n 8       # what needs a GPU, on a machine with one
    python benchmarks/record_tests.py thorough -n 2 --dist worksteal        # make thorough
    TILEMOE_FAULTS=all python benchmarks/record_tests.py faults             # make faults
    TILEMOE_CELLS=all python benchmarks/record_tests.py cells               # make every-cell
    PYTHONPATH=FOLDER python benchmarks/record_tests.py versions PATHS      # make newest, make oldest-torch
    python benchmarks/record_tests.py fuzz --share 1 --seed 3 -n 16 --dist worksteal        # make fuzz

Further arguments are pytest's, and so is the exit code. A run that is interrupted, by SIGTERM too, records what it got
to. The next run of cells finds in Triton's cache what was compiled; its row says how many came from there. The same
command of fuzz does what is left: parts of its seed that have a row at this commit are left out. ``--share`` is of a
full run: every wrong call of a single argument, 10^4 routings through Triton's interpreter and, where there is a GPU,
10^4 on it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tilemoe.bench import record

SANITIZER = "test_triton_gpu_sanitizer"
PACKAGES = ("transformers", "numpy", "peft", "accelerate", "torchao")  # besides those that each row has
COUNTS = ("passed", "failed", "skipped")
QUIET = ("-W", "ignore")

Row = dict[str, Any]


class Outcomes:
    """A plugin of pytest that keeps what came of each test and what it says of itself, and shows what did not pass."""

    def __init__(self) -> None:
        self.of_test: dict[str, str] = {}
        self.said: dict[str, Row] = {}
        self.shown: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":
            shown = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.of_test[report.nodeid] = report.outcome
            self.shown[report.nodeid] = shown.strip()
            print(f"\n{report.nodeid}\n{shown}", flush=True)
        elif report.when == "call":
            self.of_test.setdefault(report.nodeid, "passed")
        if report.when == "call":
            self.said[report.nodeid] = dict(report.user_properties)

    def summary(self) -> Row:
        """Counts of outcomes; what did not pass, with the last line that was shown."""
        last = {name: (shown.splitlines() or [""])[-1] for name, shown in self.shown.items()}
        not_passed = {name: f"{self.of_test[name]}: {line}"[:200] for name, line in last.items()}
        return {**dict.fromkeys(COUNTS, 0), **Counter(self.of_test.values()), "not_passed": not_passed}

    def passed_of_file(self) -> dict[str, int]:
        passed = (name.split("::")[0] for name, outcome in self.of_test.items() if outcome == "passed")
        return dict(sorted(Counter(passed).items()))


def gpu_row(found: Outcomes) -> Row:
    verdicts = {name.split("::test_")[-1]: each for name, each in sorted(found.of_test.items()) if SANITIZER in name}
    return {**found.summary(), "passed_of_file": found.passed_of_file(), "sanitizer": verdicts}


def suite_row(found: Outcomes) -> Row:
    versions = {name: record.version(name) for name in PACKAGES}
    return {**versions, **found.summary(), "passed_of_file": found.passed_of_file()}


def faults_row(found: Outcomes) -> Row:
    """A test is one fault, or as many as it says; its kind is what it says, or its first parameter."""
    faults: Counter[str] = Counter()
    for test, said in found.said.items():
        file, _, name = test.rpartition("::")
        kind, is_case, _ = name.partition("[")[2].partition("-")
        if is_case:  # the others look at what is enumerated
            topic = file.rpartition("test_faults_")[2].removesuffix(".py")
            faults[f"{topic}: {said.get('kind', kind)}"] += said.get("cases", 1)
    selection = os.environ.get("TILEMOE_FAULTS", "short")
    of_kind = dict(sorted(faults.items()))
    return {"selection": selection, "faults": sum(faults.values()), "faults_of_kind": of_kind, **found.summary()}


def cells_row(found: Outcomes) -> Row:
    """Of the tests that compiled a cell: how many cells each stands for, and the most spills of its family."""
    cells: Counter[str] = Counter()
    spills: dict[str, int] = {}
    compiled = [said for said in found.said.values() if "cells" in said]
    for said in compiled:
        family = said["family"]
        cells[family.partition(" ")[0]] += said["cells"]
        spills[family] = max(spills.get(family, 0), said["spills"])
    return {
        "selection": os.environ.get("TILEMOE_CELLS", "short"),
        "cells": dict(sorted(cells.items())),
        "compiled": len(compiled),
        "from_cache": sum(said["cached"] for said in compiled),
        "spill_loads_of_family": {family: count for family, count in sorted(spills.items()) if count},
        **found.summary(),
    }


def fuzz_row(found: Outcomes) -> Row:
    """Cases by test; of what was wrong the error with its least case; cases of each part that found nothing."""
    cases: Counter[str] = Counter()
    parts: dict[str, dict[str, int]] = {}
    for name, said in found.said.items():
        test, _, arguments = name.removesuffix("]").partition("[")
        if count := said.get("cases", 0):
            interpreted = "_interpreter" if arguments.startswith("interpreter") else ""
            cases[test.partition("::")[2] + interpreted] += count
            if found.of_test[name] == "passed":
                parts.setdefault(test, {})[arguments] = count
    wrong = {name: shown for name, shown in found.shown.items() if found.of_test[name] == "failed"}
    errors = {
        name: [line[1:].strip() for line in shown.splitlines() if line.startswith("E ")]
        for name, shown in wrong.items()
    }
    mismatches = {name: " ".join(lines)[:2000] for name, lines in errors.items()}
    return {"cases": dict(sorted(cases.items())), "mismatches": mismatches, "parts": parts}


def judged_before(seed: int) -> Iterator[str]:
    """The tests of this seed that rows of this very commit have."""
    commit = record.commit()
    if commit == "unknown" or commit.endswith("+dirty"):
        return
    for row in record.rows("fuzz", seed=seed, commit=commit):
        for test, parts in row.get("parts", {}).items():
            yield from (f"{test}[{arguments}]" if arguments else test for arguments in parts)


def files_with_gpu_tests() -> list[Path]:
    """Alone: the others may import what a GPU machine lacks. By far the longest comes first."""
    files = [
        path for path in sorted((record.ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")
    ]
    return sorted(files, key=lambda path: path.stem != SANITIZER)


@dataclass(frozen=True)
class Kind:
    """Where its rows go and how they are made, of which fields at least one is not empty, and what pytest gets."""

    name: str
    row: Callable[[Outcomes], Row]
    counted: tuple[str, ...]
    options: tuple[str, ...]
    paths: tuple[str, ...] = ()


KINDS = {
    "gpu": Kind("gpu_tests", gpu_row, COUNTS, ("-m", "gpu and not dist")),
    "thorough": Kind("thorough", suite_row, COUNTS, ("-m", "thorough and not gpu", *QUIET)),
    "faults": Kind("faults", faults_row, ("faults",), ("-m", "not gpu", *QUIET), ("tests/faults",)),
    "fuzz": Kind("fuzz", fuzz_row, ("cases", "mismatches"), QUIET, ("tests/fuzz",)),
    "cells": Kind("every_cell", cells_row, ("compiled",), QUIET, ("tests/kernels/test_hopper_cells.py",)),
    "versions": Kind("versions", suite_row, COUNTS, ("-m", "not gpu")),
}


def interrupt_once() -> None:
    """SIGTERM interrupts as Ctrl-C does. A second signal is ignored, while what was found is recorded."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, interrupt)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--share", type=float, default=1.0, help="of fuzz")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of fuzz")
    args, more = parser.parse_known_args(arguments)
    kind, drawn, options = KINDS[args.kind], {}, list[str]()
    paths = [str(record.ROOT / path) for path in kind.paths]
    if args.kind == "gpu":
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA GPU here: these tests are for a machine with one")
        paths = list(map(str, files_with_gpu_tests()))
    if args.kind == "fuzz":
        drawn = {"share": args.share, "seed": args.seed}
        os.environ |= {"FUZZ": str(args.share), "FUZZ_SEED": str(args.seed), "OMP_NUM_THREADS": "1"}
        options = [] if torch.cuda.is_available() else ["-m", "not gpu"]
        options += [f"--deselect={name}" for name in judged_before(args.seed)]
    interrupt_once()
    found, start = Outcomes(), time.perf_counter()
    command = [f"--rootdir={record.ROOT}", "-p", "no:cacheprovider", *kind.options, *options, *more, *paths]
    code = pytest.main(command, plugins=[found])
    row = {**drawn, **kind.row(found), "arguments": more, "seconds": round(time.perf_counter() - start, 1)}
    if not any(row[name] for name in kind.counted):
        raise SystemExit(f"none of these tests ran and nothing is recorded; pytest exited with {int(code)}")
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        row["unfinished"] = f"pytest exited with {int(code)}"
    print(row)
    record.append(kind.name, [row])
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
