"""Run a file of tests in a process of its own: Triton reads its switches when it is imported, and keeps its driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent


def passed_in_the_interpreter(file: str, timeout: float = 300) -> int:
    """As `passed_in_a_process`, in Triton's interpreter."""
    return passed_in_a_process(file, timeout, TRITON_INTERPRET="1")


def passed_in_a_process(file: str, timeout: float = 300, **environment: str) -> int:
    """How many tests of ``file``, beside this one, passed; AssertionError with the output unless all did."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(_HERE / file)],
        # Without the plugins that are installed: none of these files uses one, and importing them takes a second.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
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
