"""Gradient clipping over parameters that live on several meshes, or on none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_Sharing = tuple[DeviceMesh | None, tuple[int, ...]]


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients down to ``max_norm`` (0: leave them); returns their L2 norm before, a scalar, the same in
    all processes, which all call it.

    PyTorch's own takes one mesh at a time; here each mesh's parameters give their norm, and all get the same scale.
    """
    groups: dict[_Sharing, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_sharing(parameter), []).append(parameter)
    norms = [_norm([p.grad for p in group if p.grad is not None], sharing) for sharing, group in groups.items()]
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        for group in groups.values():
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _sharing(parameter: Tensor) -> _Sharing:
    """The mesh a tensor lives on, None for a plain one, and the dimensions of it over which it is divided."""
    if not isinstance(parameter, DTensor):
        return None, ()
    divided = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return parameter.device_mesh, tuple(divided)


def _norm(gradients: list[Tensor], sharing: _Sharing) -> Tensor:
    """Of the pieces here and of those of the other processes: one reduction for each dimension of the mesh."""
    mesh, divided = sharing
    norm = torch.nn.utils.get_total_norm([g.to_local() if isinstance(g, DTensor) else g for g in gradients])
    if mesh is None:
        return norm
    square = norm.square()
    for dim in divided:
        dist.all_reduce(square, group=mesh.get_group(dim))
    return square.sqrt()
