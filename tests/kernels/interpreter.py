"""Run a file of tests in Triton's interpreter, in a process of its own: Triton reads the switch when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def passed_in_the_interpreter(file: str, timeout: float = 300) -> int:
    """How many tests of ``file``, beside this one, passed; AssertionError with the output unless all did."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(_HERE / file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=_HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])
