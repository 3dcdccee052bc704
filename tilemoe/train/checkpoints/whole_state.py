"""What one process wrote in safetensors, read by the processes of a job, each its own part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tilemoe.train.optim import load_optimizer_tensors


def is_shared(model: nn.Module) -> bool:
    """Whether processes share the parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def read_whole(model_file: Path, optimizer_file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights, buffers and the optimiser's state of a shared ``model``."""
    _fill(model.state_dict(), model_file)
    with safe_open(str(optimizer_file), "pt") as file:
        saved = set(file.keys())
    state = {name: tensor for name, tensor in _room_for_state(model).items() if name in saved}
    _fill(state, optimizer_file)
    load_optimizer_tensors(model, optimizer, state)


def _room_for_state(model: nn.Module) -> dict[str, Tensor]:
    """AdamW's, by the names of `optimizer_tensors`."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"{name}.exp_avg"] = torch.empty_like(parameter, requires_grad=False)
        state[f"{name}.exp_avg_sq"] = torch.empty_like(parameter, requires_grad=False)
        state[f"{name}.step"] = torch.empty(())
    return state


@torch.no_grad()
def _fill(targets: Mapping[str, Tensor], path: Path) -> None:
    with safe_open(str(path), "pt") as file:
        for name, target in targets.items():
            if not isinstance(target, DTensor):
                target.copy_(file.get_tensor(name))
                continue
            sizes, starts = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
            if 0 not in sizes:
                part = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                target.to_local().copy_(file.get_slice(name)[part])
