"""Gradient clipping over parameters that live on several meshes, or on none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6  # as PyTorch's
_Sharing = tuple[DeviceMesh | None, tuple[int, ...]]  # the mesh, and the dimensions of it that divide a tensor


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the gradients to the global L2 norm ``max_norm`` (0: no clipping); returns the norm before, a scalar.

    All processes must call it, and all get the same norm. PyTorch's own clipping supports one mesh at a time; here the
    norms of the meshes are combined into one scale for all. PyTorch also scales DTensors one by one, which is slow on
    the host; here the local shards are scaled by one call for each mesh. Gradients keep their dtype and shape
    (E, ...) or any other. Nothing is checked, so there is no ValueError.

    Examples:
        >>> from tilemoe.parallel import clip_gradients
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> weight.square().sum().div(2).backward()
        >>> clip_gradients([weight], max_norm=1.0).item(), [round(g, 3) for g in weight.grad.tolist()]
        (5.0, [0.6, 0.8])
    """
    groups: dict[_Sharing, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        sharing: _Sharing = None, ()
        if isinstance(parameter, DTensor):
            divided = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
            sharing = parameter.device_mesh, tuple(divided)
        groups.setdefault(sharing, []).append(grad.to_local() if isinstance(grad, DTensor) else grad)
    norms = [_norm(gradients, sharing) for sharing, gradients in groups.items()]
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm > 0:
        scale = (max_norm / (total + _EPSILON)).clamp(max=1.0)  # no branch on its value: nothing waits for the device
        for gradients in groups.values():
            torch._foreach_mul_(gradients, scale)
    return total


def _norm(gradients: list[Tensor], sharing: _Sharing) -> Tensor:
    """The norm over this process' shards and the others': one all-reduce per mesh dimension that shards them."""
    mesh, divided = sharing
    norm = torch.nn.utils.get_total_norm(gradients)
    if mesh is None:
        return norm
    square = norm.square()
    for dim in divided:
        dist.all_reduce(square, group=mesh.get_group(dim))
    return square.sqrt()
