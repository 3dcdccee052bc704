"""The Blackwell backend: its own GEMMs for 16-bit operands that TMA can describe, the portable kernels elsewhere.

T tokens · d hidden_size · n intermediate_size · E experts · R_max static row capacity · w = 2n gated, n ungated

Compiled and emulated; never run. So nothing is chosen by speed: a call goes to the portable kernel, which computes the
same, only where its operands demand it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType, ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from tilemoe.kernels.experts.blackwell import host
from tilemoe.kernels.experts.hopper.backend import DTYPES, HopperBackend
from tilemoe.kernels.experts.table import why_not_blackwell_gpu
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.configs import WIDTH_MULTIPLE, Kernel
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.device import Device, device_of, gpu_of


class BlackwellBackend(HopperBackend):
    name = "blackwell"
    batch_invariance = "not tested"
    packed = MappingProxyType({"nf4": "not tested", "mxfp4": "not tested"})
    _host: ClassVar[ModuleType] = host

    def why_unsupported(self, device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
        why = TritonBackend.why_unsupported(self, device, dtype, widths)
        return why or why_not_blackwell_gpu(device, gpu_of(device))

    def _device(self, kernel: Kernel, rows: Tensor, plan: RoutingPlan, width_in: int, width_out: int) -> Device | None:
        """The device of ``rows`` if these kernels support their dtype and widths, and there are rows; else None.

        ValueError on a GPU, or with a Triton, that they do not run on, or where their self-test failed.
        """
        device = device_of(rows)
        if (why := why_not_blackwell_gpu(rows.device, device)) is not None:
            raise ValueError(f"kernels='blackwell': {why}; pass kernels=None or 'triton'")
        if rows.dtype not in DTYPES or plan.capacity == 0 or width_in % WIDTH_MULTIPLE or width_out % WIDTH_MULTIPLE:
            return None
        return device
