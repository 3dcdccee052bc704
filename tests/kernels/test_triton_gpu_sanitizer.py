"""The Triton kernels under compute-sanitizer: no access out of bounds, no race in shared memory."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sanitizer_cases

from tilemoe.kernels.experts import hopper

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
        timeout=1200,  # minutes alone, longer where others share the GPU
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


def test_racecheck_of_the_portable_kernels(sanitizer: str) -> None:
    output = run(sanitizer, "racecheck", "portable")
    assert re.search(r"ran \d\d+ cases", output), output[-3000:]
    assert "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" in output, output[-3000:]


def test_racecheck_of_the_chosen_kernels(sanitizer: str) -> None:
    """No races but two that are none, behind barriers that racecheck does not follow.

    A warp-specialised kernel hands its partitions out through shared memory, behind a barrier of all warps. Triton puts
    that code at lines where no access of ours is. And a producer publishes tile_info to the consumers behind a stage's
    mbarrier, at which one thread arrives for all: that they meet before it does is read from the PTX
    (test_hopper_compiled.py). No other write may be named. The read may be at any line of a consumer: a load that the
    compiler moves into the branch that needs it keeps no line of its own.
    """
    output = run(sanitizer, "racecheck", "chosen", "--print-limit", "0")
    assert re.search(r"ran \d\d+ cases", output), output[-3000:]
    assert "RACECHECK SUMMARY" in output, output[-3000:]
    hazards = re.findall(r"Race reported between (.*(?:\n=+ +and .*)*)", output)
    assert len(hazards) == len(re.findall(r"^=+ (?:Error|Warning):", output, re.MULTILINE)), output[-3000:]
    partitioning, (writes, reads), ours = lines_of_the_partitioning(), lines_of_tile_info(), []
    for hazard in hazards:
        accesses = re.findall(r"(Read|Write) access at .* in (?:\S*/)?(\w+\.py:\d+)", hazard)
        is_partitioning = all(place in partitioning for _, place in accesses)
        is_tile_info = {kind for kind, _ in accesses} == {"Read", "Write"}
        is_tile_info &= all(place in (writes if kind == "Write" else reads | partitioning) for kind, place in accesses)
        if len(accesses) != hazard.count(" access at ") or not (is_partitioning or is_tile_info):
            ours.append(hazard)
    assert not ours, "\n".join(ours[:20])


def lines_of_tile_info() -> tuple[set[str], set[str]]:
    """Where tile_info is written, and where it may be read: by consumers, which call `receive_tile`, and in waits."""
    waiting = {"receive_tile", "consumer_wait", "skip_stages", "mma_mainloop", "issue_mma", "scaled_mainloop"}
    writes, reads = set[str](), set[str]()
    for file, function in functions():
        lines = {f"{file}:{line}" for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)}
        if function.name == "publish_tile":
            writes |= lines
        elif function.name in waiting or calls_of(function, "receive_tile"):
            reads |= lines
    assert writes
    assert reads
    return writes, reads


def lines_of_the_partitioning() -> set[str]:
    """The file and line where each kernel that is split into partitions is defined, and where it is split."""
    found = set[str]()
    for file, function in functions():
        for call in calls_of(function, "gl.warp_specialize"):
            found |= {f"{file}:{function.lineno}", f"{file}:{call.lineno}"}
    assert found, "no kernel is split"
    return found


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The file's name and the function, of all of the warp-specialised kernels."""
    for path in Path(hopper.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield path.name, node


def calls_of(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == name]
