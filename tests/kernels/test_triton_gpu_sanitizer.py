"""The Triton kernels under compute-sanitizer: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
import sanitizer_cases

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """Path of compute-sanitizer. CUDA's toolkit brings it, PyTorch does not: without it there is no verdict."""
    path = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if path is None:
        pytest.skip("compute-sanitizer is not installed here: no verdict on memory accesses and races")
    return path


def run(sanitizer: str, tool: str, cases: str, *options: str) -> str:
    """The tool's output; skipped with the tool's own words where it cannot work on this machine's GPU."""
    command = [sanitizer, "--tool", tool, "--target-processes", "application-only", *options]
    done = subprocess.run(
        [*command, sys.executable, sanitizer_cases.__file__, cases],
        # Every tensor is an allocation of its own, so that its end is known.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    output = done.stdout + done.stderr
    refusal = re.search(r".*Device not supported.*", output)
    if refusal is not None:
        pytest.skip(f"compute-sanitizer does not work on this machine: {refusal[0]}")
    return output


def test_a_planted_error_is_found(sanitizer: str) -> None:
    output = run(sanitizer, "memcheck", "planted")
    assert "Invalid __global__ write" in output, output[-3000:]
    assert "write_past_the_end_kernel" in output


def test_memcheck(sanitizer: str) -> None:
    output = run(sanitizer, "memcheck", "all")
    assert re.search(r"ran \d\d+ cases", output), output[-3000:]
    assert "ERROR SUMMARY: 0 errors" in output, output[-3000:]


def test_racecheck(sanitizer: str) -> None:
    output = run(sanitizer, "racecheck", "few")
    assert re.search(r"ran \d\d+ cases", output), output[-3000:]
    assert "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" in output, output[-3000:]
