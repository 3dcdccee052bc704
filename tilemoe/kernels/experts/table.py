"""The table of backends, a row for each architecture and precision, and the formats that frozen experts are stored in.

`tilemoe.kernels.choose.choose_experts` goes through the rows of a precision and takes the first that is supported.

d hidden_size · n intermediate_size
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

from tilemoe.kernels.experts import selftest
from tilemoe.kernels.experts.blackwell import configs as blackwell
from tilemoe.kernels.experts.formats import fp8
from tilemoe.kernels.experts.formats.mxfp4 import Mxfp4Weight, quantize_mxfp4
from tilemoe.kernels.experts.formats.nf4 import Nf4Weight, quantize_nf4, quantize_nf4_double
from tilemoe.kernels.experts.formats.packed import PackedWeight
from tilemoe.kernels.experts.hopper import configs as hopper
from tilemoe.kernels.experts.triton.configs import why_unsupported as why_not_of_widths
from tilemoe.runtime.device import Device, capability_of, gpu_of, triton_version, why_no_triton

WhyNot: TypeAlias = str | None  # why a row cannot be used, in a few words; None if it can


class Row(NamedTuple):
    """A backend of the package.

    name: what ``kernels=`` takes. architecture: "module:Class", imported at first use. serves: how the reason begins.
    because: the reason for choosing this row; None: the reason is why the row before cannot be used.
    why_not_layer: takes ``(dtype, d, n)``, or only a dtype; torch.compile traces it.
    why_not: takes ``(device, dtype, why_not_layer's answer)`` and returns the first reason that applies.
    format: the module, a `Format`, that quantises the GEMMs' operands; None: they are not quantised.
    batch_invariance: overrides the architecture's; None: the architecture's.
    needs_triton: whether importing the architecture needs Triton.
    """

    name: str
    architecture: str
    precision: str
    serves: str
    because: str | None
    why_not_layer: Callable[..., WhyNot]
    why_not: Callable[[torch.device, torch.dtype, WhyNot], WhyNot]
    format: str | None = None
    batch_invariance: str | None = None
    needs_triton: bool = True


def why_not_triton(device: torch.device, dtype: torch.dtype, why: WhyNot = None) -> WhyNot:
    """Why Triton kernels are not used for GEMMs in ``dtype``; ``why``: why the widths rule them out, or None."""
    if (found := why_no_triton(device)) is not None:
        return found
    if dtype == torch.float64:
        return f"no Triton kernel computes in {dtype}"
    if dtype == torch.float32:
        return "cuBLAS's fp32 GEMMs are faster; pass kernels='triton' if the host must not wait for the GPU"
    return why


def _why_not_hopper(device: torch.device, dtype: torch.dtype, why: WhyNot) -> WhyNot:
    return why_not_triton(device, dtype, why) or why_not_hopper_gpu(device)


def why_not_hopper_gpu(device: torch.device) -> WhyNot:
    """Why a GPU that runs the Triton kernels does not run the warp-specialised ones; None if it does."""
    if not torch.cuda.is_available():
        return "no GPU is visible"
    return hopper.why_unsupported(gpu_of(device), triton_version())


def why_not_blackwell_gpu(device: torch.device, found: Device) -> WhyNot:
    """Why the Blackwell kernels do not run on ``device``, described by ``found``; None if their self-test passed."""
    return blackwell.why_unsupported(found, triton_version()) or selftest.why_not("blackwell", device)


def _why_not_blackwell(device: torch.device, dtype: torch.dtype, why: WhyNot) -> WhyNot:
    """On another GPU the answer is that of the Hopper row: the next row, Triton's, gives it as its reason."""
    if device.type != "cuda" or capability_of(device)[0] != 10:
        return _why_not_hopper(device, dtype, why)
    of_gpu, found = why_no_triton(device), why_not_triton(device, dtype, why)
    if selftest.setting() == selftest.OFF:
        return found or f"the Blackwell kernels are untested; {selftest.SETTING}=1 uses them if they pass a self-test"
    if found is None:
        found = of_gpu = why_not_blackwell_gpu(device, gpu_of(device))
    if of_gpu is not None:
        selftest.say_off(of_gpu)
    return found


def _why_not_hopper_fp8(device: torch.device, dtype: torch.dtype, why: WhyNot) -> WhyNot:
    if why is None and dtype == torch.float32:
        return f"FP8 kernels give bfloat16 and float16, not {dtype}"
    if why is None and _why_not_hopper(device, dtype, None) is not None:
        return "the FP8 kernels are for Hopper alone, compute capability 9.0"
    return why


def _why_not_emulated(device: torch.device, dtype: torch.dtype, why: WhyNot) -> WhyNot:
    return "PyTorch only emulates FP8, which is for tests on a CPU" if why is None and device.type != "cpu" else why


def _nothing(*given: object) -> None:
    return None


def _why_not_widths(dtype: torch.dtype, *widths: int) -> WhyNot:
    return why_not_of_widths(*widths)


_HOME = "tilemoe.kernels.experts"
TORCH, TRITON, HOPPER, BLACKWELL = (
    f"{_HOME}.torch.backend:TorchBackend",
    f"{_HOME}.triton.backend:TritonBackend",
    f"{_HOME}.hopper.backend:HopperBackend",
    f"{_HOME}.blackwell.backend:BlackwellBackend",
)
ROWS = (
    Row(
        "hopper",
        HOPPER,
        "bf16",
        "warp-specialised kernels are used for",
        "the GPU has compute capability 9.0",
        _why_not_widths,
        _why_not_hopper,
    ),
    Row(
        "blackwell",
        BLACKWELL,
        "bf16",
        "warp-specialised kernels are used for",
        f"{selftest.SETTING} turns them on",
        _why_not_widths,
        _why_not_blackwell,
    ),
    Row("triton", TRITON, "bf16", "Triton kernels are used for", None, _why_not_widths, why_not_triton),
    Row("torch", TORCH, "bf16", "plain PyTorch is used for", None, _nothing, _nothing, needs_triton=False),
    Row(
        "hopper_fp8",
        HOPPER,
        "fp8",
        "warp-specialised kernels with FP8 operands are used for",
        "FP8 is asked for, and the GPU has compute capability 9.0",
        fp8.why_not,
        _why_not_hopper_fp8,
        f"{_HOME}.triton.formats.fp8",
        batch_invariance="yes on an H100, bf16",
    ),
    Row(
        "torch_fp8",
        TORCH,
        "fp8",
        "plain PyTorch with FP8 operands is used for",
        "FP8 is asked for; on a CPU it is emulated, not faster",
        fp8.why_not,
        _why_not_emulated,
        fp8.__name__,
        needs_triton=False,
    ),
)


class Storage(NamedTuple):
    """A way to store frozen experts in 4 bits. weight: the format's class. quantize: takes a weight (E, p, q) of any
    float dtype but fp64. parts: the names of the stored tensors, which are the class's first fields."""

    weight: type[PackedWeight]
    quantize: Callable[[torch.Tensor], PackedWeight]
    parts: tuple[str, ...]


# The values of ``storage=`` besides "dense". `Backend.packed` says which formats a backend reads.
STORAGES: MappingProxyType[str, Storage] = MappingProxyType(
    {
        "nf4": Storage(Nf4Weight, quantize_nf4, ("codes", "absmax")),
        "nf4_double": Storage(Nf4Weight, quantize_nf4_double, ("codes", "absmax", "nested")),
        "mxfp4": Storage(Mxfp4Weight, quantize_mxfp4, ("codes", "exponents")),
    }
)
PACKED: MappingProxyType[str, type[PackedWeight]] = MappingProxyType(
    {storage.weight.name: storage.weight for storage in STORAGES.values()}
)
