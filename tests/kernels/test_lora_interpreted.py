"""Run the test that needs Triton's interpreter in a process of its own: it is on or off for a whole process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_in_the_interpreter() -> None:
    module = Path(__file__).parent / "interpreted_lora.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", str(module)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) == 7
