"""Confirms a backend on a kind of GPU that its kernels were written for but never ran on; a GPU's owner runs it once.

It runs the kernels' self-test, then times the layer with these kernels, the portable kernels and sonic-moe, each
checked before it is timed. All results go to results/confirm.jsonl, a file to send.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

import torch

from tilemoe.bench import layer, record, timing
from tilemoe.kernels.experts.selftest import verdict
from tilemoe.runtime.device import nvidia_smi
from tilemoe.shape import MoEShape

FILE = "confirm"
TEST_SECONDS = 3600


def confirm(settings: timing.Settings, shapes: Mapping[str, MoEShape], seconds: float) -> None:
    """Test, time and record the backend ``settings.kernels``; it is not timed if its self-test fails."""
    backend = settings.kernels
    assert backend is not None, "a backend to confirm"
    print(f"self-test of {backend}: it may take minutes", flush=True)
    found = verdict(backend, settings.device, again=True)
    print(f"self-test of {backend}: {'passed' if found.why is None else found.why}, {found.seconds:.0f} s", flush=True)
    is_gpu = settings.device.type == "cuda"
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if is_gpu else None
    row = {"kernels": backend, "passed": found.why is None, **asdict(found)}
    record.append(FILE, [{**row, "capability": capability, "driver": nvidia_smi("driver_version", "compute_mode")}])
    if found.why is None and is_gpu:
        run_tests(backend)
    peers = [peer for peer in settings.peers if found.why is None or peer != f"tilemoe[{backend}]"]
    record.each_case(FILE, shapes, partial(layer.layer, replace(settings, peers=peers)), layer.describe, seconds)


def run_tests(backend: str) -> None:
    """In a checkout, also run its GPU tests whose names have the backend's name; elsewhere, do nothing."""
    script = record.ROOT / "benchmarks" / "record_tests.py"
    if not script.exists():
        return
    command, known = [sys.executable, str(script), "gpu", "-k", backend], len(record.rows("gpu_tests"))
    print(f"running the checkout's GPU tests of {backend}", flush=True)
    with suppress(subprocess.TimeoutExpired):
        environment = {**os.environ, "TILEMOE_RESULTS": str(record.RESULTS)}
        subprocess.run(command, env=environment, timeout=TEST_SECONDS, check=False)
    found = record.rows("gpu_tests")[known:]
    record.append(FILE, found or [{"unfinished": f"{' '.join(command)} recorded nothing in {TEST_SECONDS} s"}])
