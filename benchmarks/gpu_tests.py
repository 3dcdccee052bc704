"""Run the tests that need a GPU, and record what came of them in results/gpu_tests.jsonl.

    python benchmarks/gpu_tests.py [further arguments of pytest]

Exits as pytest does. Only files with such tests are collected: the others may import what a GPU machine lacks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from record import ROOT, append

SANITIZER = "test_triton_gpu_sanitizer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, more = parser.parse_known_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here: these tests are for a machine with one")
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu and not dist", "-p", "no:cacheprovider"]
        start = time.perf_counter()
        done = subprocess.run([*command, f"--junit-xml={report}", *more, *map(str, files)], cwd=ROOT, check=False)
        seconds = round(time.perf_counter() - start, 1)
        row = (
            summary(report) if report.exists() else {"passed": 0, "unfinished": f"pytest exited with {done.returncode}"}
        )
    path = append("gpu_tests", [{**row, "seconds": seconds, "arguments": more}])
    print(f"{row}\nrecorded in {path.relative_to(ROOT)}")
    return done.returncode


def summary(report: Path) -> dict[str, Any]:
    """Counts of outcomes; the names of what did not pass, skips with their reason; the sanitizer's verdicts."""
    counts: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    not_passed: dict[str, str] = {}
    verdicts: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        outcome = "passed"
        if problems:
            outcome = "skipped" if problems[0].tag == "skipped" else "failed"
            reason = (problems[0].get("message") or "").splitlines()
            not_passed[str(case.get("name"))] = f"{outcome}: {reason[0] if reason else ''}"[:200]
        counts[outcome] += 1
        if SANITIZER in str(case.get("classname")):
            verdicts[str(case.get("name")).removeprefix("test_")] = outcome
    return {**counts, "sanitizer": verdicts, "not_passed": not_passed}


if __name__ == "__main__":
    sys.exit(main())
