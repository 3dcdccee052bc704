"""Run tests on other releases of PyTorch and transformers, and record what came of them in results/versions.jsonl.

    PYTHONPATH=FOLDER python benchmarks/versions.py [arguments of pytest]

`make newest` and `make oldest-torch` do that, with FOLDER that of the releases. Exits as pytest does. A run that is
interrupted, by SIGTERM too, records what it got to.
"""

from __future__ import annotations

import sys
import time

import pytest
from gpu_tests import Outcomes, interrupt_once, unfinished

from tilemoe.bench.record import ROOT, append, version

PACKAGES = ("transformers", "numpy", "peft", "accelerate", "torchao")


def main(arguments: list[str]) -> int:
    interrupt_once()
    outcomes = Outcomes()
    start = time.perf_counter()
    code = pytest.main([f"--rootdir={ROOT}", "-m", "not gpu", *arguments], plugins=[outcomes])
    found = outcomes.summary()
    if not outcomes.by_test:
        raise SystemExit(f"no test ran and nothing is recorded; pytest exited with {int(code)}")
    row = {
        **{name: version(name) for name in PACKAGES},
        **{name: found[name] for name in ("passed", "failed", "skipped", "passed_of_file", "not_passed")},
        "arguments": arguments,
        "seconds": round(time.perf_counter() - start, 1),
        **unfinished(code),
    }
    print(f"{row}\nrecorded in {append('versions', [row])}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
