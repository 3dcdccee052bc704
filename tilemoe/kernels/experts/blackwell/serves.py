"""Whether a GPU can run the Blackwell kernels, and whether they are right there. Imports neither them nor Gluon."""

from __future__ import annotations

import torch
import triton

from tilemoe.kernels.experts import selftest
from tilemoe.kernels.experts.blackwell import configs
from tilemoe.runtime.device import Device, gpu


def why_unsupported(device: torch.device) -> str | None:
    """Why these kernels cannot run on a GPU, or did not pass their self-test there, in a line; None if they did."""
    return why_not(gpu(torch.cuda.current_device() if device.index is None else device.index), device)


def why_not(found: Device, device: torch.device) -> str | None:
    """As `why_unsupported`, of a GPU whose properties are found already."""
    return configs.why_unsupported(found, triton.__version__) or selftest.why_not("blackwell", device)
