"""Whether a GPU can run the Hopper kernels. Imports neither them nor Gluon, whose API changes between releases."""

from __future__ import annotations

import torch
import triton

from tilemoe.kernels.experts.hopper import configs
from tilemoe.runtime.device import gpu


def why_unsupported(device: torch.device) -> str | None:
    """Why these kernels cannot run on a GPU, in a few words; None if they can."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return configs.why_unsupported(gpu(index), triton.__version__)
