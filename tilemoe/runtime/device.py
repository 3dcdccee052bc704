"""What a GPU offers to one CTA of a kernel, whether Triton's kernels run on it, and which GEMMs are fast."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

# The first release with a proxy fence between cp.async and the matrix instructions of compute capability 10.x. Without
# it they may read shared memory too early, and results differ from run to run.
TRITON_FOR_10 = "3.7.1"


@dataclass(frozen=True)
class Device:
    """The resources of a GPU for one CTA. ``capability``: 10 * major + minor, or 0 for a GPU that is not NVIDIA's.

    ``interpreted``: Triton's interpreter on a CPU stands in for a GPU; it gets the smallest tiles.
    """

    capability: int
    shared_bytes: int
    multiprocessors: int
    interpreted: bool = False

    @property
    def has_tma(self) -> bool:
        return self.capability >= 90

    @property
    def gathers(self) -> bool:
        """Whether TMA can gather rows into a layout that the tensor cores read."""
        return self.capability // 10 == 10


_INTERPRETER = Device(capability=0, shared_bytes=1 << 20, multiprocessors=3, interpreted=True)


def device_of(t: Tensor) -> Device:
    """The `Device` of the GPU that holds ``t``. ValueError: Triton cannot run there."""
    if t.device.type == "cuda":
        if (why := why_no_triton(t.device)) is not None:
            raise ValueError(f"Triton's kernels cannot compute on {t.device}: {why}; or pass kernels='torch'")
        return gpu(t.device.index)
    if t.device.type == "cpu":
        from triton import knobs  # only kernels get here, and they have imported Triton

        if knobs.runtime.interpret:
            return _INTERPRETER
    raise ValueError(f"Triton's kernels need a GPU but x is on {t.device}; move x to one or pass kernels='torch'")


@cache
def gpu(index: int) -> Device:
    """The `Device` of the GPU with this index."""
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor if torch.version.hip is None else 0
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return Device(capability, shared, properties.multi_processor_count)


def gpu_of(device: torch.device) -> Device:
    """The `Device` of a GPU; for a device without an index that of the current GPU."""
    return gpu(torch.cuda.current_device() if device.index is None else device.index)


@cache
def has_fast_gemm(device_type: str, dtype: torch.dtype) -> bool:
    """Whether GEMMs run at full speed. 16-bit ones on a CPU do if PyTorch runs them in oneDNN (docs/lab/cpu.md)."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    onednn = torch.ops.mkldnn
    return bool(onednn._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else onednn._is_mkldnn_fp16_supported())


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


@cache  # every forward asks, and the answer queries the GPU
def why_no_triton(device: torch.device) -> str | None:
    """Why no Triton kernel runs on ``device``, in a few words; None if they do. Not to be traced."""
    if device.type != "cuda":
        return f"Triton does not run on {device.type}"
    if not has_triton():
        return "Triton is not installed"
    if capability_of(device) < (8, 0):
        return "the Triton kernels need compute capability 8.0"
    if capability_of(device)[0] == 10:
        found = triton_version()
        if TorchVersion(found) < TRITON_FOR_10:
            return f"Triton {found} can be wrong on capability 10.x: pip install 'triton>={TRITON_FOR_10}'"
    return None


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (8, 0) for another vendor's, or if no GPU is present."""
    is_asked = torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if is_asked else (8, 0)


def triton_version() -> str:
    from triton import __version__ as found  # only here: Triton is not on every machine

    return str(found)


def nvidia_smi(*fields: str, gpu: str | None = None) -> list[str] | None:
    """nvidia-smi's values of these fields, for the first GPU or the one with this UUID; None if it gives none."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", *(["-i", gpu] if gpu else [])]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0].split(", ") if found else None
