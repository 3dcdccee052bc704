"""Run the tests that need Triton's interpreter in a process of their own: it is on or off for a whole process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilemoe.kernels.triton.launch import device_of


@pytest.mark.parametrize("module", ["interpreted_gemms.py"])
def test_in_the_interpreter(module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", str(Path(__file__).parent / module)]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) > 20


def test_without_the_interpreter_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="need a GPU but x is on cpu"):
        device_of(torch.zeros(1))
