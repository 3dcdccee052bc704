"""Which KernelSet serves a device, a dtype and a layer, and why."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import MappingProxyType

import torch
from torch import Tensor

from tilemoe.config import MoEConfig
from tilemoe.kernels.base import KernelSet
from tilemoe.kernels.tiling import problem_of_widths
from tilemoe.kernels.torch.mlp import TORCH_KERNELS
from tilemoe.tracing import constant_when_traced

KERNEL_SETS = MappingProxyType({TORCH_KERNELS.name: TORCH_KERNELS})
# Imported when they are first asked for: Triton is not on every machine.
TRITON, HOPPER = "triton", "hopper"
BY_TRITON = (TRITON, HOPPER)

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def select_kernels(device: torch.device | str, dtype: torch.dtype, cfg: MoEConfig | None = None) -> KernelSet:
    """The KernelSet for this device, dtype and layer; its ``reason`` says in one line why it was chosen.

    ``cfg`` is None when only the device and the dtype are known. ValueError for a dtype that no set computes in.
    """
    widths = () if cfg is None else (cfg.hidden_size, cfg.intermediate_size)
    return select_for_widths(device, dtype, *widths)


def select_for_widths(device: torch.device | str, dtype: torch.dtype, *widths: int) -> KernelSet:
    """As `select_kernels`, for the widths d and n of a layer, or none of them."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(str(d) for d in FLOAT_DTYPES)}; got {dtype}")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be a torch device such as 'cpu' or 'cuda:0', got {device!r}") from error
    layer = "".join(f", {letter}={width}" for letter, width in zip("dn", widths, strict=False))
    problem = problem_of_triton(found, dtype, *widths)
    if problem is not None:
        return TORCH_KERNELS.because(f"plain PyTorch runs on any device, for {found.type}, {dtype}{layer}: {problem}")
    problem = _problem_of_hopper(found, dtype)
    if problem is not None:
        return kernel_set(TRITON).because(f"Triton kernels serve {found.type}, {dtype}{layer}: {problem}")
    return kernel_set(HOPPER).because(f"warp-specialised kernels serve {found.type}, {dtype}{layer}")


def name_for(device: torch.device, dtype: torch.dtype, *widths: int) -> str:
    """The name of the KernelSet that `select_for_widths` gives. Traceable, widths may be symbolic."""
    name = _name_on(device, dtype)
    return name if problem_of_widths(*widths) is None else TORCH_KERNELS.name


def takes_a_triton_kernel(x: Tensor) -> bool:
    """Whether a Triton kernel that is no KernelSet's may take ``x`` here and now.

    Not where torch.compile makes a kernel of its own, nor for what is no tensor on a GPU but stands for one.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.is_cuda:
        return False
    return name_for(x.device, torch.bfloat16) in BY_TRITON


@constant_when_traced
def _name_on(device: torch.device, dtype: torch.dtype) -> str:
    return _known_name_on(device, dtype)


@cache  # asked for by every forward, and the answer takes a look at the GPU
def _known_name_on(device: torch.device, dtype: torch.dtype) -> str:
    if _problem_of_triton_anywhere(device, dtype) is not None:
        return TORCH_KERNELS.name
    return HOPPER if _problem_of_hopper(device, dtype) is None else TRITON


def problem_of_triton(device: torch.device, dtype: torch.dtype, *widths: int) -> str | None:
    """Why the Triton kernels do not serve this, in a few words; None if they do. Traceable, widths may be symbolic."""
    problem = _problem_of_triton_anywhere(device, dtype)
    return problem_of_widths(*widths) if problem is None else problem


def check_name(name: str) -> None:
    """ValueError that lists the KernelSets' names unless ``name`` is one of them. Imports nothing."""
    names = sorted((*KERNEL_SETS, *BY_TRITON))
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"kernels must be None or one of {', '.join(names)}; got {name!r}")


def kernel_set(name: str) -> KernelSet:
    """The KernelSet called ``name``; ValueError that lists the names otherwise."""
    check_name(name)
    if name in BY_TRITON:
        if find_spec("triton") is None:
            raise ValueError(f"kernels={name!r} needs the package triton, which PyTorch's builds for GPUs bring along")
        if name == TRITON:
            from tilemoe.kernels.triton.kernel_set import TRITON_KERNELS

            return TRITON_KERNELS
        from tilemoe.kernels.hopper.kernel_set import HOPPER_KERNELS

        return HOPPER_KERNELS
    return KERNEL_SETS[name]


@constant_when_traced
def _problem_of_triton_anywhere(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"Triton does not run on {device.type}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if dtype == torch.float64:
        return f"no Triton kernel computes in {dtype}"
    if dtype == torch.float32:
        return "cuBLAS's fp32 products are faster; pass kernels='triton' where nothing may wait for the GPU"
    if torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return "the Triton kernels need compute capability 8.0"
    return None


@constant_when_traced
def _problem_of_hopper(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the warp-specialised kernels do not serve where the Triton kernels do, in a few words; None if they do."""
    if dtype == torch.float32:
        return "the Hopper kernels compute in 16-bit types"
    if not torch.cuda.is_available():
        return "no GPU is here to ask"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return "the Hopper kernels need compute capability 9.0"
    from tilemoe.kernels.hopper.serves import unsupported

    return unsupported(device)
