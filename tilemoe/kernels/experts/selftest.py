"""The self-test of kernels that were compiled and emulated but never ran on their GPU; it decides if they are used.

It runs once for each GPU model, driver, Triton version and kernel source, in its own process (`runtime.verdict`).
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import torch

from tilemoe.files import digest_of_sources
from tilemoe.runtime.device import nvidia_smi, triton_version
from tilemoe.runtime.tracing import warn_once
from tilemoe.runtime.verdict import Verdict, verdict_of

SETTING = "TILEMOE_BLACKWELL"
OFF, ON, UNTESTED = "0", "1", "untested"  # used only if asked for by name; used if the self-test passes; always used
SECONDS = 600  # time limit of the self-test, which mostly compiles
_SOURCES = Path(__file__).parent
# `python -m tilemoe`, but without the current folder on the path: it may have another package of this name.
_RUN = "import runpy, sys; sys.path = list(filter(None, sys.path)); runpy.run_module('tilemoe', run_name='__main__')"


def setting() -> str:
    """The setting's value, OFF, ON or UNTESTED. ValueError: it has another value."""
    value = os.environ.get(SETTING, OFF)
    if value not in (OFF, ON, UNTESTED):
        raise ValueError(f"{SETTING} must be {OFF}, {ON} or {UNTESTED}, got {value!r}")
    return value


def say_off(why: str) -> None:
    """Warn once, in one process of each host, that the requested kernels are not used."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warn_once(f"{SETTING}={setting()}: the Blackwell kernels are not used: {why}")


@cache  # each kernel call asks
def why_not(backend: str, device: torch.device) -> str | None:
    """Why the backend of this name may not be used on ``device``, in one line; None: its self-test passed there.

    The first call may run the self-test. With TILEMOE_BLACKWELL=untested, and on a CPU, there is no test: None.
    """
    if device.type != "cuda" or setting() == UNTESTED:
        return None
    return said_of(verdict(backend, device))


def said_of(found: Verdict) -> str | None:
    """The verdict's reason against the kernels, as a message; None if it has none."""
    return None if found.why is None else f"their self-test has not passed: {found.why}; tilemoe doctor repeats it"


def verdict(backend: str, device: torch.device, again: bool = False) -> Verdict:
    """The self-test's verdict; the test runs if none is kept, or if ``again``. backend: a name or "module:Class"."""
    key, hindrance = {"backend": backend, "triton": triton_version(), "source": _digest_of_kernels()}, None
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        gpu = torch.cuda.get_device_properties(device)
        asked = nvidia_smi("driver_version", "compute_mode", gpu=f"GPU-{gpu.uuid}")
        if asked is None:
            return Verdict("nvidia-smi does not report the driver's version", is_kept=False)
        driver, mode = asked
        key |= {"gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "driver": driver}
        if mode != "Default":
            hindrance = f"no second process can open the GPU, whose compute mode is {mode}; run nvidia-smi -c DEFAULT"
    test = ["doctor", "--backend", backend, "--device", str(device), "--seconds", str(SECONDS)]
    environment = {**os.environ, SETTING: UNTESTED, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    name = backend.replace(":", "-")
    return verdict_of(name, key, [sys.executable, "-c", _RUN, *test], environment, SECONDS, hindrance, again)


@cache
def _digest_of_kernels() -> str:
    return digest_of_sources(_SOURCES)[:16]
