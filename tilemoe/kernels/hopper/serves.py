"""Whether a GPU can run the Hopper kernels. Imports neither them nor Gluon, which moves between Triton's releases."""

from __future__ import annotations

import torch
import triton

from tilemoe.kernels.hopper.choose import problem_of_gpu
from tilemoe.kernels.triton.launch import gpu


def unsupported(device: torch.device) -> str | None:
    """Why these kernels cannot run on a GPU, in a few words; None if they can."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return problem_of_gpu(gpu(index), triton.__version__)
