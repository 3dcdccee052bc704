"""The tensors of a training run that processes share: each writes its pieces, and reads those that it wants.

In torch.distributed.checkpoint's files their names are ``model.<name>``, ``optimizer.<parameter>.<key>`` and
``rng_cpu.<rank>``, ``rng_cuda.<rank>``. What one process wrote in safetensors is read here by the processes of a job.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tilemoe.train.checkpoints.metadata import MetadataReader
from tilemoe.train.optim import load_optimizer_tensors, optimizer_tensors

_MOST_RANDOM_BYTES = 1 << 16  # torch's has 5,056 on a CPU
_MODEL, _OPTIMIZER, _RNG_CPU, _RNG_CUDA = "model.", "optimizer.", "rng_cpu.", "rng_cuda."


def is_shared(model: nn.Module) -> bool:
    """Whether the parameters are sharded over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """The files that ``rank`` wrote with `begin_write_training`."""
    return sorted(folder.glob(f"__{rank}_*"))


def begin_write_training(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> Future[Any]:
    """Write from a copy in host memory, in a thread, over a gloo ``group`` that nobody else uses.

    All processes of the job call it; ``folder``, which all see, exists and is empty.
    """
    tensors = _model_tensors(model)  # first: it brings parameters that FSDP has gathered back to their shards
    tensors |= {_OPTIMIZER + name: value for name, value in optimizer_tensors(model, optimizer).items()}
    tensors[f"{_RNG_CPU}{_rank()}"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        tensors[f"{_RNG_CUDA}{_rank()}"] = torch.cuda.get_rng_state()
    started = async_save(tensors, checkpoint_id=str(folder), process_group=group)
    return started if isinstance(started, Future) else started.upload_completion


def read_model(folder: Path, model: nn.Module, absent: Container[str] = ()) -> None:
    """Weights and buffers but those ``absent`` there, whatever the mesh; in a job all processes call it.

    ValueError: a tensor is missing or of another shape, or the metadata is refused.
    """
    _read(MetadataReader(folder), _model_tensors(model, absent))


def read_training(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Also the optimiser's state and, of a rank that was there when it was written, torch's random numbers."""
    rank = _rank()
    reader = MetadataReader(folder)
    model_tensors = _model_tensors(model)
    parameters = {_OPTIMIZER + name: parameter for name, parameter in model.named_parameters()}
    state = {
        name: _room(name, parameters, entry.size, entry.properties.dtype)
        for name, entry in reader.tensors.items()
        if name.startswith(_OPTIMIZER)
    }
    setters = {f"{_RNG_CPU}{rank}": torch.set_rng_state}
    if torch.cuda.is_available():
        setters[f"{_RNG_CUDA}{rank}"] = torch.cuda.set_rng_state
    random = {name: _random_room(name, reader.tensors[name].size) for name in setters if name in reader.tensors}
    _read(reader, {**model_tensors, **state, **random})
    load_optimizer_tensors(model, optimizer, {name.removeprefix(_OPTIMIZER): t for name, t in state.items()})
    for name, tensor in random.items():
        set_random(name, tensor, setters[name])


def set_random(name: str, state: Any, setter: Callable[[Any], None]) -> None:
    """Go on with random numbers from ``state``. ValueError that names it where PyTorch does not take it for one."""
    try:
        setter(state)
    except RuntimeError as error:
        raise ValueError(f"{name} is no state of PyTorch's random numbers ({error})") from error


def _room(name: str, parameters: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """For a tensor of a parameter's state: a moment, sharded as its parameter is, or the number of steps.

    ValueError: there is no such parameter, or its state cannot have that shape; no memory is taken for it.
    """
    parameter = parameters.get(name.rpartition(".")[0])
    if parameter is None:
        raise ValueError(f"checkpoint: {name} is of no parameter of the model; use the settings it was trained with")
    if tuple(shape) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if math.prod(shape) != 1:
        raise ValueError(
            f"checkpoint: {name} is {tuple(shape)} and its parameter {tuple(parameter.shape)}; use the settings it was "
            "trained with"
        )
    return torch.empty(tuple(shape), dtype=dtype)


def _random_room(name: str, size: Sequence[int]) -> Tensor:
    if math.prod(size) > _MOST_RANDOM_BYTES:
        raise ValueError(f"checkpoint: {name} claims {math.prod(size)} bytes; no state of random numbers has as many")
    return torch.empty(tuple(size), dtype=torch.uint8)


def _model_tensors(model: nn.Module, absent: Container[str] = ()) -> dict[str, Tensor]:
    return {_MODEL + name: tensor for name, tensor in model.state_dict().items() if name not in absent}


def _read(reader: MetadataReader, tensors: Mapping[str, Tensor]) -> None:
    with warnings.catch_warnings():
        # PyTorch wonders whether a process alone is meant to be.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # which is no Exception; it has the traceback of every process
            raise ValueError(f"it cannot be read ({first_failure(error)})") from error


def first_failure(error: CheckpointException) -> str:
    """One line of what may be the tracebacks of all processes."""
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {' '.join(str(failure).split())[:200]}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def read_whole_model(file: Path, model: nn.Module, absent: Container[str] = ()) -> None:
    """Weights and buffers of a ``model``, shared or not, but those ``absent`` there, from what one process wrote."""
    _fill({name: tensor for name, tensor in model.state_dict().items() if name not in absent}, file)


def read_whole(model_file: Path, optimizer_file: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights, buffers and the optimiser's state of a shared ``model``, from what one process wrote."""
    read_whole_model(model_file, model)
    parameters = dict(model.named_parameters())
    state: dict[str, Tensor] = {}
    with safe_open(str(optimizer_file), "pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            state[name] = _room(name, parameters, file.get_slice(name).get_shape(), torch.float32)
    _fill(state, optimizer_file)
    load_optimizer_tensors(model, optimizer, state)


@torch.no_grad()
def _fill(targets: Mapping[str, Tensor], path: Path) -> None:
    """ValueError: a tensor is missing, of another shape, or of no target. Of tied ones the file has one."""
    with safe_open(str(path), "pt") as file:
        held = set(file.keys())
        place_of = {
            name: (target.to_local() if isinstance(target, DTensor) else target).data_ptr()
            for name, target in targets.items()
        }
        tied = {place for name, place in place_of.items() if name in held}
        wanted = {name: t for name, t in targets.items() if name in held or place_of[name] not in tied}
        if differing := sorted(held ^ wanted.keys()):
            raise ValueError(
                f"{path.name} and the model differ in {differing[0]}; use the settings it was trained with"
            )
        for name, target in wanted.items():
            shape = tuple(file.get_slice(name).get_shape())
            if shape != tuple(target.shape):
                raise ValueError(f"{path.name} has {name} of shape {shape}, the model of {tuple(target.shape)}")
            if isinstance(target, DTensor):
                copy_part(target, file.get_slice(name).__getitem__)
            else:
                target.copy_(file.get_tensor(name))


def copy_part(target: DTensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Fill this process' part of ``target`` with what ``read`` gives of the whole tensor."""
    sizes, starts = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if 0 not in sizes:
        part = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        target.to_local().copy_(read(part))
