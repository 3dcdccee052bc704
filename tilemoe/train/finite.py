"""Finds values that are not finite before a checkpoint is written, and the place in a model where they begin."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tilemoe.runtime.random import local_of
from tilemoe.runtime.tensors import largest_magnitude
from tilemoe.train.optim import optimizer_tensors


@torch.no_grad()
def find_non_finite(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str | None:
    """The name of the first weight, buffer or optimiser state with a NaN or an infinity in this process' shard.

    It synchronises with the device once and copies no tensor.
    """
    tensors = {**model.state_dict(), **({} if optimizer is None else optimizer_tensors(model, optimizer))}
    names, largest = [], []
    for name, tensor in tensors.items():
        local = local_of(tensor)
        if local.is_floating_point() and local.numel():
            names.append(name)
            largest.append(largest_magnitude(local))
    if not largest:
        return None
    device = largest[0].device
    is_finite = torch.stack([value.to(device, torch.float64) for value in largest]).isfinite().tolist()
    return next((name for name, is_good in zip(names, is_finite, strict=True) if not is_good), None)


@contextlib.contextmanager
def first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    """A list that gets the name of the first module whose output in the block is not finite, or whose forward fails."""
    found: list[str] = []

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:  # output: None where the forward failed
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            if not found and (output is None or not all(bool(tensor.isfinite().all()) for tensor in tensors)):
                found.append(name)

        return hook

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                stack.enter_context(module.register_forward_hook(hook_of(name), always_call=True))
        yield found


def worst_gradient(model: nn.Module) -> str:
    """The name of the last parameter whose gradient is not finite: the backward reaches it first. If all are finite, of
    the parameter with the largest gradient.
    """
    largest = {name: float(largest_magnitude(p.grad)) for name, p in model.named_parameters() if p.grad is not None}
    bad = [name for name, value in largest.items() if not math.isfinite(value)]
    return bad[-1] if bad else max(largest, key=lambda name: largest[name])
