"""Which KernelSet serves a device, a dtype and a layer, and why."""

from __future__ import annotations

from types import MappingProxyType

import torch

from tilemoe.config import MoEConfig
from tilemoe.kernels.base import KernelSet
from tilemoe.kernels.torch.mlp import TORCH_KERNELS

KERNEL_SETS = MappingProxyType({TORCH_KERNELS.name: TORCH_KERNELS})

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def select_kernels(device: torch.device | str, dtype: torch.dtype, cfg: MoEConfig | None = None) -> KernelSet:
    """The KernelSet for this device, dtype and layer; its ``reason`` says in one line why it was chosen.

    ``cfg`` is None when only the device and the dtype are known. ValueError for a dtype that no set computes in.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(str(d) for d in FLOAT_DTYPES)}; got {dtype}")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device must be a torch device such as 'cpu' or 'cuda:0', got {device!r}") from error
    layer = "" if cfg is None else f", d={cfg.hidden_size}, n={cfg.intermediate_size}"
    return TORCH_KERNELS.because(
        f"plain PyTorch runs on any device; nothing faster is installed for {kind}, {dtype}{layer}"
    )


def kernel_set(name: str) -> KernelSet:
    """The KernelSet called ``name``; ValueError that lists the names otherwise."""
    if not isinstance(name, str) or name not in KERNEL_SETS:
        raise ValueError(f"kernels must be None or one of {', '.join(sorted(KERNEL_SETS))}; got {name!r}")
    return KERNEL_SETS[name]
