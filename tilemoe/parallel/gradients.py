"""Gradient clipping over parameters that live on several meshes, or on none."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6  # as PyTorch's
# The mesh, the mesh dimensions that shard a tensor, and the device of this process' shard.
_Sharing = tuple[DeviceMesh | None, tuple[int, ...], torch.device]


def clip_gradients(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients to the global norm ``max_norm`` (0: no clipping); returns the norm before, a scalar.

    It takes the arguments of `torch.nn.utils.clip_grad_norm_`, which supports one mesh at a time. Here parameters may
    be plain tensors, the same in every process, and DTensors of any meshes: the norms of all meshes are combined into
    one scale. All processes must call it, and all get the same norm. PyTorch also scales DTensors one by one, which is
    slow on the host; this function scales the local shards by one call per mesh. Gradients may have any shape, such as
    (E, ...), and keep it and their dtype.

    Raises:
        ValueError: ``norm_type`` is not positive.
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.

    Examples:
        >>> from tilemoe.parallel import clip_gradients
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> weight.square().sum().div(2).backward()
        >>> clip_gradients([weight], max_norm=1.0).item(), [round(g, 3) for g in weight.grad.tolist()]
        (5.0, [0.6, 0.8])
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, 2 or 'inf' for example, got {norm_type:g}")
    groups: dict[_Sharing, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        # Also without a gradient, since another process may have one: all must reduce the same groups.
        if parameter.requires_grad or parameter.grad is not None:
            gradients = groups.setdefault(_sharing(parameter), [])
            if parameter.grad is not None:
                gradients.append(_local(parameter))
    norms = [_norm(gradients, sharing, norm_type, foreach) for sharing, gradients in groups.items()]
    if not norms:
        return torch.zeros(())
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the gradients' norm of order {norm_type:g} is {total.item()}; error_if_nonfinite=True")
    if max_norm > 0:
        scale = (max_norm / (total + _EPSILON)).clamp(max=1.0)  # no branch on its value: nothing waits for the device
        for (_, _, device), gradients in groups.items():
            if gradients:
                torch._foreach_mul_(gradients, scale.to(device))
    return total


def _sharing(parameter: Tensor) -> _Sharing:
    if not isinstance(parameter, DTensor):
        return None, (), parameter.device
    divided = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return parameter.device_mesh, tuple(divided), parameter.device


def _local(parameter: Tensor) -> Tensor:
    """This process' shard of the gradient, redistributed to the parameter's placements first (a partial sum, say)."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        assert gradient is not None
        return gradient
    if isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def _norm(gradients: list[Tensor], sharing: _Sharing, norm_type: float, foreach: bool | None) -> Tensor:
    """The norm over the shards of all processes: one all-reduce per mesh dimension that shards them."""
    mesh, divided, device = sharing
    filled = [gradient for gradient in gradients if gradient.numel()]  # the inf norm of an empty tensor is an error
    norm = torch.nn.utils.get_total_norm(filled, norm_type, foreach=foreach).to(device)
    norm = norm.to(torch.promote_types(norm.dtype, torch.float32))  # squares overflow fp16 from 256 on
    if mesh is None:
        return norm
    is_largest = norm_type == float("inf")
    power = norm.masked_fill(norm.isnan(), norm_type) if is_largest else norm.pow(norm_type)  # MAX may drop NaN
    for dim in divided:
        dist.all_reduce(power, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    return power if is_largest else power.pow(1 / norm_type)
