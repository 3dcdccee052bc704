"""Auxiliary-loss-free load balancing: a selection bias per expert, adjusted to its load (arXiv 2408.15664).

E experts · L layers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilemoe.checks import require_finite
from tilemoe.runtime.tensors import require_tensors


@torch.no_grad()
def update_selection_bias(
    biases: Sequence[Tensor], pairs_per_expert: Tensor, rate: float, group: dist.ProcessGroup | None = None
) -> None:
    """``bias += rate * sign(mean load - load)``, in place, for each layer, as in DeepSeek-V3.

    biases: L buffers (E,) · pairs_per_expert (L, E) int32 or int64: this rank's pairs per expert before rounding,
    summed over the micro-batches of one optimiser step. Call it once per step, from the training loop: an update inside
    the forward would run again whenever activation checkpointing repeats it. When torch.distributed is initialised, one
    all_reduce sums the loads over ``group`` (None: all ranks), whose ranks must all call this and get the same biases.
    ValueError: an argument's type, shape or dtype is wrong.
    """
    _check(biases, pairs_per_expert, rate)
    check_group(group)
    load = sum_over_ranks(pairs_per_expert.long(), group)
    # In integers, so that an expert with exactly the mean load gets sign 0 and not the sign of a rounding error.
    direction = torch.sign(load.sum(dim=-1, keepdim=True) - load * load.shape[-1])
    for bias, layer_direction in zip(biases, direction, strict=True):
        bias.add_(layer_direction.to(device=bias.device, dtype=bias.dtype), alpha=rate)


def sum_over_ranks(counts: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """``counts`` summed over ``group`` (None: all ranks); ``counts`` itself if `num_ranks` is 1."""
    if num_ranks(group) == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


def num_ranks(group: Any) -> int:
    """Number of ranks in ``group`` (None: all); 1 in a rank outside it, and without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    if group is not None and not isinstance(group, dist.ProcessGroup):
        return 1
    return dist.get_world_size(group)


def check_group(group: Any) -> None:
    """ValueError unless ``group`` is a process group, None, or ``GroupMember.NON_GROUP_MEMBER``."""
    if group is None or not dist.is_available():
        return
    outside = dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(group, dist.ProcessGroup) and not (type(group) is type(outside) and group == outside):
        raise ValueError(
            f"group must be None or a torch.distributed process group, got {type(group).__name__}; pass "
            "mesh.get_group() for a DeviceMesh, torch.distributed.GroupMember.NON_GROUP_MEMBER for this rank alone"
        )


def _check(biases: Sequence[Tensor], pairs_per_expert: Tensor, rate: float) -> None:
    require_finite("rate", rate)
    if not isinstance(biases, (list, tuple)):
        raise ValueError(f"biases must be a list of tensors (E,), one for each layer, got {type(biases).__name__}")
    require_tensors({"pairs_per_expert": pairs_per_expert, **{f"biases[{i}]": bias for i, bias in enumerate(biases)}})
    if pairs_per_expert.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"pairs_per_expert must be int32 or int64 counts, got {pairs_per_expert.dtype}")
    if pairs_per_expert.ndim != 2 or pairs_per_expert.shape[0] != len(biases):
        raise ValueError(
            f"pairs_per_expert must be (L, E) with one row for each of the {len(biases)} biases, "
            f"got shape {tuple(pairs_per_expert.shape)}"
        )
    for layer, bias in enumerate(biases):
        if tuple(bias.shape) != (pairs_per_expert.shape[1],):
            raise ValueError(
                f"biases[{layer}] must be ({pairs_per_expert.shape[1]},) as pairs_per_expert has "
                f"{pairs_per_expert.shape[1]} experts, got shape {tuple(bias.shape)}"
            )
        if not bias.dtype.is_floating_point:
            raise ValueError(f"biases[{layer}] must be floating point, got {bias.dtype}")
        if pairs_per_expert.is_meta and not bias.is_meta:
            raise ValueError("pairs_per_expert must have values, got a meta tensor")
