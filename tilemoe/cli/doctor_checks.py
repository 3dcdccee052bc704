"""The checks of ``tilemoe doctor``: drivers, folders, the experts against the reference, their speed."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tilemoe.bench import cases, peers, timing
from tilemoe.bench.layer import PARTS, layer_step
from tilemoe.checks import expand_user, require_int
from tilemoe.kernels.choose import select_kernels
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.registry import backend_named, register_backend
from tilemoe.kernels.experts.selftest import SETTING, verdict
from tilemoe.perf import __file__ as _perf
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import TRITON_FOR_10, has_triton, nvidia_smi
from tilemoe.runtime.tensors import device_named
from tilemoe.runtime.verdict import Verdict
from tilemoe.testing import assert_moe_matches_reference, make_inputs
from tilemoe.testing.selftest import problem

SLOW = 1.25  # times the recorded figure: machines differ by a few percent
_ROUNDS = 3
_INSTALL_TRITON = "pip install triton==3.6.0, with which the kernels were measured"
_TOKENS, _WIDTHS, _EXPERTS, _TOP_K = 1000, (256, 128), 16, 4  # ragged tiles of every kernel, all tokens in a second
_SPEED_BYTES = 8 << 30  # free memory that the timed case needs


@dataclass(frozen=True)
class Finding:
    """A line of the report; advice, if something is wrong; ``is_fatal``: the device cannot be used like this."""

    line: str
    advice: str | None = None
    is_fatal: bool = False


def driver() -> str | None:
    """The NVIDIA driver's version; None where there is none."""
    found = nvidia_smi("driver_version")
    return found[0] if found else None


def environment(driver_version: str | None) -> Iterator[Finding]:
    """Problems with PyTorch, Triton and folders. ``driver_version``: what `driver` returns."""
    if driver_version is not None and not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield Finding(
            f"NVIDIA driver {driver_version}, and PyTorch {torch.__version__}, built {built}, sees no GPU",
            "install a PyTorch for the CUDA that nvidia-smi shows, or a newer driver",
            is_fatal=True,
        )
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        chosen, (major, _) = select_kernels(device, torch.bfloat16), torch.cuda.get_device_capability(device)
        advice = f"pip install 'triton>={TRITON_FOR_10}'" if major == 10 else _INSTALL_TRITON
        if not has_triton():
            yield Finding(f"Triton is not installed: on {device} PyTorch's slower kernels serve", advice)
        elif (major == 9 and chosen.name != "hopper") or (major == 10 and chosen.name == "torch"):
            kernels = "Hopper" if major == 9 else "Triton"
            yield Finding(f"{device}: the {kernels} kernels are not used ({chosen.reason})", advice)
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or expand_user("~/.triton/cache"))
    there = next(path for path in (cache, *cache.parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        advice = "correct its permissions, or set TRITON_CACHE_DIR to a folder that can be written"
        yield Finding(f"Triton's cache {cache} cannot be written", advice, is_fatal=True)


def correctness(device: torch.device, dtype: torch.dtype) -> Finding:
    """Compare the experts' output and all their gradients on random inputs with the fp64 reference."""
    name = select_kernels(device, dtype).name
    what = f"self-test, {device}, {dtype}, kernels {name}"
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(_TOKENS, _EXPERTS, generator=generator).topk(_TOP_K).indices
    try:
        plan = plan_topk(ids.to(device), _EXPERTS)
        assert_moe_matches_reference(make_inputs(plan, *_WIDTHS, "swiglu", dtype=dtype), plan)
    except Exception as error:  # of a compiler, a driver or the comparison
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        advice = "pass kernels='torch' meanwhile, and report this output with the whole message"
        return Finding(f"{what}: WRONG ({problem[:300]})", advice, is_fatal=True)
    return Finding(f"{what}: output and gradients agree with the reference")


def judge(name: str, device_name: str, seconds: int) -> Verdict:
    """Self-test a backend of the package, or "module:Class", in this process, which may crash.

    ValueError: there is no such backend or device, or ``seconds`` is no integer >= 1.
    """
    require_int("--seconds", seconds, 1)
    device = device_named(device_name, "--device")
    if device.type == "cuda" and (device.index or 0) >= (gpus := torch.cuda.device_count()):
        raise ValueError(f"--device {device}: torch sees {gpus} CUDA GPUs here; name another, or cpu")
    signal.alarm(seconds)  # the parent process may be gone, and a GPU may hang
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            cls: type[Backend] = getattr(import_module(module), attribute)
            name = cls.name
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--backend {name}: {error}; give a name, or module:Class of a Backend") from error
        register_backend(name, cls)
    backend = backend_named(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        return Verdict(problem(backend, device))
    except torch.OutOfMemoryError:
        return Verdict(f"{device} has too little free memory for it", is_kept=False)


def unproven(device: torch.device) -> Finding:
    """The self-test of kernels that have never run on this kind of GPU, in a process of its own."""
    found = verdict("blackwell", device, again=True)
    line = f"self-test, {device}, kernels blackwell, compiled and emulated but never run by their authors"
    if found.why is None:
        line += f": passed in {found.seconds:.0f} s; {SETTING}=1 lets them serve"
    else:
        line += f": NOT PASSED ({found.why}); other kernels serve"
    return Finding(line, "run `tilemoe bench confirm` and send the file that it writes: nobody has yet")


def recorded_speeds() -> dict[str, dict[str, Any]]:
    """GPU name -> its recorded case, milliseconds and commit."""
    return json.loads(Path(_perf).with_name("recorded.json").read_text(encoding="utf-8"))


def speed(device: torch.device, recorded: Mapping[str, Any]) -> Finding:
    """Time the recorded case's layer, forward and backward, and compare with the recorded milliseconds."""
    shape = cases.ALL[recorded["case"]]
    weights = peers.make_weights(shape, device, torch.bfloat16)
    x = torch.randn(shape.num_tokens, shape.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    step = layer_step(peers.tilemoe_layer(shape, weights), x, torch.randn_like(x))
    rounds = timing.rounds({"layer": step}, recorded["mode"], _ROUNDS)["layer"]
    times = [statistics.median(part) for part in zip(*rounds, strict=True)]
    ratios = [time / recorded[f"{part}_ms"] for part, time in zip(PARTS, times, strict=True)]
    parts = zip(PARTS, times, ratios, strict=True)
    shown = ", ".join(f"{part} {time:.2f} ms, {ratio:.2f} of the recorded" for part, time, ratio in parts)
    line = f"self-test, {device}, layer {recorded['case']}: {shown}"
    if max(ratios) <= SLOW:
        return Finding(line)
    advice = "see with nvidia-smi whether others use the GPU or its clock is held down, then whether the CPU is busy"
    return Finding(f"{line}: SLOW", advice)


def self_test(device: torch.device) -> Iterator[Finding]:
    """Check one device: about eight seconds on a GPU, compiling included, more on a busy host; one on a CPU."""
    if device.type == "cpu":
        yield correctness(device, torch.float32)
        return
    with torch.cuda.device(device):
        checked = correctness(device, torch.bfloat16)
        yield checked
        if torch.cuda.get_device_capability(device)[0] == 10:
            yield unproven(device)
        name, free = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
        recorded = recorded_speeds().get(name)
        if recorded is None:
            yield Finding(f"self-test, {device}: no speed of {name} is recorded to compare with")
        elif free < _SPEED_BYTES:
            line = f"self-test, {device}: {free / 2**30:.1f} GiB are free, too little to time"
            yield Finding(line, "end what else uses the GPU's memory")
        elif not checked.is_fatal:
            yield speed(device, recorded)
