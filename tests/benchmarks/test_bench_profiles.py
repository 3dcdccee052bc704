"""What a profile says of a GPU's time, from a trace as torch.profiler writes it."""

import json
from pathlib import Path

import profiles
import pytest
from profiles import Event

# Times in microseconds; NCCL's kernel runs beside others and alone, and from 6 to 8 ms nothing runs.
TRACE = [
    {"cat": "kernel", "name": "gemm", "ts": 1000, "dur": 2000},
    {"cat": "gpu_memset", "name": "Memset (Device)", "ts": 3000, "dur": 500},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 3500, "dur": 500},
    {"cat": "kernel", "name": "gemm", "ts": 8000, "dur": 1000},
    {"cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 3500, "dur": 2500},
    {"cat": "kernel", "name": "gemm", "ts": 4500, "dur": 1000},
    {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0, "dur": 20000},
    {"name": "process_name"},
]


def events(folder: Path) -> list[Event]:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": TRACE}), encoding="utf-8")
    return profiles.read(path)


def test_what_ran_and_for_how_long(tmp_path: Path) -> None:
    found = events(tmp_path)
    assert [event.start for event in found] == [1.0, 3.0, 3.5, 3.5, 4.5, 8.0]
    assert profiles.by_name(found) == [
        ("gemm", pytest.approx(4.0), 3),
        ("ncclDevKernel_AllReduce", pytest.approx(2.5), 1),
        ("Memset (Device)", pytest.approx(0.5), 1),
        ("Memcpy DtoH", pytest.approx(0.5), 1),
    ]


def test_overlapping_work_counts_once(tmp_path: Path) -> None:
    """From 1 to 9 ms: all but 6 to 8; without NCCL's also 4 to 4.5 and 5.5 to 6 are missing."""
    assert profiles.usage(events(tmp_path)) == "8 ms, idle 2, busy 6, computing 5"
    inner = [Event("long", 0.0, 10.0), Event("inside", 1.0, 2.0), Event("after", 9.0, 11.0)]
    assert profiles.busy_ms(inner) == 11.0
