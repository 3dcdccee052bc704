"""Run transformers' own tests of its MoE models with tilemoe's experts, and say what passes only without them.

    python benchmarks/hf_suite.py CHECKOUT [--models olmoe gpt_oss ...] [--jobs 2]

CHECKOUT is a source tree of transformers, whose own package is what is tested. Its tests need some packages more than
transformers does (datasets, parameterized, Pillow). Each model's test_modeling file runs twice, as it is and with
`hf_suite_plugin`; what passed the first time alone runs again both ways, once, since some of the tests draw random
models. Exits with 1 where a difference is left. Recorded in results/hf_suite.jsonl.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_suite_plugin import CALLS_VARIABLE

from tilemoe.bench.record import ROOT, append

MODELS = ["olmoe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "granitemoe", "qwen3_next"]
PLUGIN = "hf_suite_plugin"


class Outcome(NamedTuple):
    kind: str  # "passed", "failed" or "skipped"
    reason: str


class Run(NamedTuple):
    outcomes: dict[str, Outcome]  # by the test's id in pytest
    calls: int  # of tilemoe, by the tests' processes themselves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders of CHECKOUT/tests/models")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    row = compare(given.checkout.resolve(), given.models, given.jobs)
    for test, reason in row["differences"].items():
        print(f"{test}\n    {reason}")
    print({key: value for key, value in row.items() if key != "differences"})
    append("hf_suite", [row])
    return int(bool(row["differences"]))


def compare(checkout: Path, models: Sequence[str], jobs: int) -> dict[str, Any]:
    files = [f"tests/models/{model}/test_modeling_{model}.py" for model in models]
    if missing := [file for file in files if not (checkout / file).is_file()]:
        raise SystemExit(
            f"{checkout}/{missing[0]} is missing: give a checkout of transformers, and folders of its models"
        )
    start = time.perf_counter()
    before, after = (run(checkout, files, jobs, plugins) for plugins in ((), (PLUGIN,)))
    if not after.calls:
        raise SystemExit("tilemoe has computed no layer: nothing was tested")
    found = differences(before.outcomes, after.outcomes)
    again = found
    if found:
        repeated = [run(checkout, sorted(found), jobs, plugins).outcomes for plugins in ((), (PLUGIN,))]
        again = differences(*repeated)
    return {
        "models": list(models),
        "transformers": _version(checkout),
        "without": Counter(outcome.kind for outcome in before.outcomes.values()),
        "with": Counter(outcome.kind for outcome in after.outcomes.values()),
        "failed_both_ways": sorted(failed(before.outcomes) & failed(after.outcomes)),
        "calls": after.calls,
        "differed_once": sorted(found.keys() - again.keys()),
        "differences": again,
        "seconds": round(time.perf_counter() - start),
    }


def run(checkout: Path, tests: Sequence[str], jobs: int, plugins: Sequence[str]) -> Run:
    """``tests``, files or ids, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        report, calls = Path(folder) / "report.xml", Path(folder) / "calls"
        paths = [checkout / "src", ROOT, ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
            "OMP_NUM_THREADS": "1",
            CALLS_VARIABLE: str(calls),
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-W", "ignore", "-n", str(jobs)]
        command += [f"--junit-xml={report}", *(word for plugin in plugins for word in ("-p", plugin)), *tests]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1):  # 1: some failed
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        counts = calls.read_text(encoding="utf-8").split() if calls.exists() else []
        return Run(read_report(report), sum(map(int, counts)))


def read_report(path: Path) -> dict[str, Outcome]:
    """Of each test in a JUnit file, subtests counted in: failed where a part of it did."""
    outcomes: dict[str, Outcome] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        module, _, group = case.attrib["classname"].rpartition(".")
        test = f"{module.replace('.', '/')}.py::{group}::{case.attrib['name']}"
        outcome = _outcome(case)
        if test not in outcomes or outcome.kind == "failed":
            outcomes[test] = outcome
    return outcomes


def _outcome(case: ElementTree.Element) -> Outcome:
    for tag, kind in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(tag)) is not None:
            return Outcome(kind, found.get("message", "").split("\n")[0][:300])
    return Outcome("passed", "")


def differences(before: Mapping[str, Outcome], after: Mapping[str, Outcome]) -> dict[str, str]:
    """What passed ``before`` and not ``after``, with the reason."""
    missing = Outcome("missing", "it was not run")
    found = {test: after.get(test, missing) for test, outcome in before.items() if outcome.kind == "passed"}
    return {test: f"{kind}: {reason}" for test, (kind, reason) in found.items() if kind != "passed"}


def failed(outcomes: Mapping[str, Outcome]) -> set[str]:
    return {test for test, outcome in outcomes.items() if outcome.kind == "failed"}


def _version(checkout: Path) -> str:
    for line in (checkout / "src" / "transformers" / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
