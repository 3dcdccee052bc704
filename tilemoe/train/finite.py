"""Whether what a checkpoint is to hold is finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilemoe.train.optim import optimizer_tensors


@torch.no_grad()
def find_non_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """The name of the first weight, buffer or state of the optimiser with a NaN or an infinity, in this process' part.

    The device is waited for once; there is no copy of a tensor.
    """
    tensors = {**model.state_dict(), **optimizer_tensors(model, optimizer)}
    names, largest = [], []
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and local.numel():
            names.append(name)
            largest.append(_largest(local))
    if not largest:
        return None
    device = largest[0].device
    is_finite = torch.stack([value.to(device, torch.float64) for value in largest]).isfinite().tolist()
    return next((name for name, is_good in zip(names, is_finite, strict=True) if not is_good), None)


def _largest(tensor: Tensor) -> Tensor:
    """The largest absolute value, a NaN where there is one."""
    norm: Tensor = torch.linalg.vector_norm(tensor, math.inf)
    return norm
