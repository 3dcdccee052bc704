"""The Blackwell backend: its own GEMMs for 16-bit operands that TMA can describe, the portable kernels elsewhere.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

The kernels were compiled and emulated, but never run. So nothing is chosen by speed: a call goes to the portable
kernel, which computes the same, only if its operands require it.
"""

from __future__ import annotations

from types import MappingProxyType, ModuleType
from typing import ClassVar

import torch

from tilemoe.kernels.experts.blackwell import host
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.table import why_not_blackwell_gpu
from tilemoe.kernels.experts.triton.configs import Kernel
from tilemoe.runtime.device import Device


class BlackwellBackend(HopperBackend):
    name = "blackwell"
    batch_invariance = "not tested"
    packed = MappingProxyType({"nf4": "not tested", "mxfp4": "not tested"})
    _host: ClassVar[ModuleType] = host

    def _why_not_device(self, device: torch.device, found: Device) -> str | None:
        return why_not_blackwell_gpu(device, found)

    def _is_slower(self, kernel: Kernel, width_in: int, width_out: int) -> bool:
        return False  # nothing was measured
