"""Gradient clipping over parameters that live on several meshes, or on none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down to ``max_norm`` (0: leave them); returns their L2 norm before, a scalar, the same in
    all processes, which all call it.

    PyTorch's own takes one mesh at a time; here each mesh's parameters give their norm, and all get the same scale.
    """
    by_mesh: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        for group in by_mesh.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(gradients: list[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(gradients)
    if not isinstance(norm, DTensor):
        return norm
    square = norm.to_local().square()
    for dimension, placement in enumerate(norm.placements):
        if placement.is_partial():
            dist.all_reduce(square, group=norm.device_mesh.get_group(dimension))
    return square.sqrt()
