"""What somebody with a GPU runs once, of a kind that kernels were written for and never ran on.

The kernels' self-test, then the layer by them, by the portable kernels and by sonic-moe, each checked before it is
timed; all of it goes to results/confirm.jsonl, a file to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

import torch

from tilemoe.bench import layer, record, run, timing
from tilemoe.kernels.experts.selftest import verdict
from tilemoe.runtime.device import nvidia_smi
from tilemoe.shape import MoEShape

FILE = "confirm"


def confirm(settings: timing.Settings, shapes: Mapping[str, MoEShape], seconds: float) -> None:
    """Try, time and record the backend ``settings.kernels``; one whose self-test does not pass is not timed."""
    backend = settings.kernels
    assert backend is not None, "a backend to confirm"
    print(f"self-test of {backend}: it may take minutes", flush=True)
    found = verdict(backend, settings.device, again=True)
    print(f"self-test of {backend}: {'passed' if found.why is None else found.why}, {found.seconds:.0f} s", flush=True)
    is_gpu = settings.device.type == "cuda"
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if is_gpu else None
    row = {"kernels": backend, "passed": found.why is None, **asdict(found)}
    record.append(FILE, [{**row, "capability": capability, "driver": nvidia_smi("driver_version", "compute_mode")}])
    peers = [peer for peer in settings.peers if found.why is None or peer != f"tilemoe[{backend}]"]
    run.each_case(FILE, shapes, partial(layer.layer, replace(settings, peers=peers)), layer.describe, seconds)
