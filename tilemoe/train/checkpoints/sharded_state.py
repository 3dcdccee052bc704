"""The tensors of a training run that processes share: each writes its pieces, and reads those that it wants.

In torch.distributed.checkpoint's files their names are ``model.<name>``, ``optimizer.<parameter>.<key>`` and
``rng_cpu.<rank>``, ``rng_cuda.<rank>``. What one process wrote in safetensors is read here, too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from tilemoe.runtime.random import local_of, local_part
from tilemoe.train.optim import (
    BLOCK,
    blocks_like,
    in_blocks,
    load_optimizer_tensors,
    optimizer_tensors,
    split_name,
)

_MOST_RANDOM_BYTES = 1 << 16  # torch's has 5,056 on a CPU
_FILE_BYTES, _MOST_FILES = 1 << 28, 8  # of a process: bytes for which it begins another file
_MODEL, _OPTIMIZER, _RNG_CPU, _RNG_CUDA = "model.", "optimizer.", "rng_cpu.", "rng_cuda."


def is_shared(model: nn.Module) -> bool:
    """Whether the parameters are sharded over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """The files that ``rank`` wrote with `write_shared`."""
    return sorted(folder.glob(f"__{rank}_*"))


class HostMemory:
    """Copies tensors, page-locked beside a GPU. It is kept for the next copy as long as the tensors live.

    Of 604 MB on a CPU the first copy takes .39 s, the others .10, each into new memory .29. PyTorch 2.11's own stager
    of checkpoints empties itself after one copy and fails at the next.
    """

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_initialized()
        self._copies, self._is_taken = StateDictStager(pin_memory=self._on_gpu, share_memory=False), False

    def copy(self, tensors: dict[str, Any]) -> dict[str, Any] | None:
        """Those that share memory share it in the copy. None: the host has no room for it."""
        if not self._is_taken and sum(local_of(tensor).nbytes for tensor in tensors.values()) > _free_bytes():
            return None
        copied: dict[str, Any] = self._copies.stage(tensors, non_blocking=self._on_gpu)
        if self._on_gpu:
            torch.cuda.synchronize()
        self._is_taken = True
        return copied


def _free_bytes() -> float:
    """Of host memory for each process of this host; infinity where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [free] = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return math.inf
    return 1024 * int(free) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class _Writer(FileSystemWriter):
    """Writes several files at once, which are then hashed at once, too: a thread serialises 1.4 GB/s, and a file
    reaches the disk when it is whole. With torch's ``thread_count`` a thread's error is lost, and so are its tensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # else it waits for the GPU at each tensor

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        items = sorted(plan.items, key=_bytes_of)
        files = min(_MOST_FILES, 1 + sum(map(_bytes_of, items)) // _FILE_BYTES)
        write, prefix = super().write_data, plan.storage_data.prefix

        def write_file(number: int) -> list[WriteResult]:
            place = replace(plan.storage_data, prefix=f"{prefix}{number}_" if number else prefix)
            return write(replace(plan, items=items[number::files], storage_data=place), planner).wait()

        with ThreadPoolExecutor(files) as threads:
            results = [result for of_file in threads.map(write_file, range(files)) for result in of_file]
        written: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        written.set_result(results)
        return written


def _bytes_of(item: WriteItem) -> int:
    assert item.tensor_data is not None, "there are tensors alone"
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that this process has to write, by the names in the files."""
    state = model.state_dict()  # first: it brings parameters that FSDP has gathered back to their shards
    tensors = {_MODEL + name: value for name, value in state.items()}
    tensors |= {_OPTIMIZER + name: value for name, value in optimizer_tensors(model, optimizer).items()}
    tensors[f"{_RNG_CPU}{_rank()}"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        tensors[f"{_RNG_CUDA}{_rank()}"] = torch.cuda.get_rng_state()
    return tensors


def write_shared(folder: Path, tensors: dict[str, Any], group: dist.ProcessGroup) -> Any:
    """Write those of all processes, which all call it; ``folder``, which all see, is empty. Gives torch's Metadata."""
    return save(tensors, storage_writer=_Writer(folder), process_group=group)


def write_whole(model_file: Path, optimizer_file: Path, tensors: dict[str, Any]) -> None:
    """Write a process' alone; of weights that are tied the first by name, which the metadata says of the others."""
    weights = _under(_MODEL, tensors)
    first: dict[Any, str] = {}
    kept = {name: first.setdefault(weights[name].data_ptr() or name, name) for name in sorted(weights)}
    tied = {name: other for name, other in kept.items() if name != other}
    save_file({name: weights[name].contiguous() for name in weights.keys() - tied}, str(model_file), tied or None)
    save_file(_under(_OPTIMIZER, tensors), str(optimizer_file))


@contextmanager
def whole_tensors(model_file: Path, optimizer_file: Path) -> Iterator[dict[str, Any]]:
    """What one process wrote, by the same names, as safetensors' slices."""
    with safe_open(str(model_file), "pt") as model, safe_open(str(optimizer_file), "pt") as optimizer:
        files = {_MODEL: model, _OPTIMIZER: optimizer}
        yield {kind + name: file.get_slice(name) for kind, file in files.items() for name in file.keys()}  # noqa: SIM118


def read_model(held: Mapping[str, Any], model: nn.Module, absent: Container[str] = ()) -> None:
    """Weights and buffers but those that are ``absent``, whatever the mesh.

    held: slices by name, of a job (`tilemoe.train.checkpoints.metadata.StoredTensor`) or of `whole_tensors`.

    ValueError: a tensor is missing, of another shape, or of none of the model.
    """
    parts = {name: part for name, part in _under(_MODEL, held).items() if name not in absent}
    _fill({name: t for name, t in model.state_dict().items() if name not in absent}, parts)


def read_whole(held: Mapping[str, Any], name: str) -> Tensor:
    """The weight ``name``. ValueError: it is missing."""
    if _MODEL + name not in held:
        raise ValueError(f"the checkpoint and the model differ in {name}; use the settings it was trained with")
    return _part(held, _MODEL + name, torch.float32)


def read_training(held: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Also the optimiser's state and, of a rank that was there when it was written, torch's random numbers."""
    read_model(held, model)
    of_optimizer, parameters = _under(_OPTIMIZER, held), dict(model.named_parameters())
    state = {name: _room(name, parameters, part.get_shape()) for name, part in of_optimizer.items()}
    _fill(state, of_optimizer)
    load_optimizer_tensors(model, optimizer, state)
    setters = {f"{_RNG_CPU}{_rank()}": torch.set_rng_state}
    if torch.cuda.is_available():
        setters[f"{_RNG_CUDA}{_rank()}"] = torch.cuda.set_rng_state
    for name in setters.keys() & held.keys():
        if math.prod(held[name].get_shape()) > _MOST_RANDOM_BYTES:
            raise ValueError(f"checkpoint: {name} claims more bytes than any state of random numbers has")
        set_random(name, held[name][()], setters[name])


def _under(prefix: str, held: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): part for name, part in held.items() if name.startswith(prefix)}


def set_random(name: str, state: Any, setter: Callable[[Any], None]) -> None:
    """Go on with random numbers from ``state``. ValueError that names it where PyTorch does not take it for one."""
    try:
        setter(state)
    except RuntimeError as error:
        raise ValueError(f"{name} is no state of PyTorch's random numbers ({error})") from error


def _room(name: str, parameters: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """For a tensor of a parameter's state: a moment, sharded as its parameter is, or its codes and scales, or the
    number of steps.

    ValueError: there is no such parameter, or its state cannot have that shape; no memory is taken for it.
    """
    of, _, part = split_name(name)
    parameter = parameters.get(of)
    if parameter is None:
        raise ValueError(f"checkpoint: {name} is of no parameter of the model; use the settings it was trained with")
    if part and isinstance(parameter, DTensor) and not in_blocks(parameter):
        raise ValueError(
            f"checkpoint: {name} is stored in blocks of {BLOCK}, which these processes do not share evenly; resume "
            "with another number of them, or with other --parallel settings"
        )
    if part == ".scale" and tuple(shape) == (parameter.numel() // BLOCK,):
        return blocks_like(parameter)
    if part != ".scale" and tuple(shape) == tuple(parameter.shape):
        dtype = torch.uint8 if part else torch.float32
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if part or math.prod(shape) != 1:
        raise ValueError(
            f"checkpoint: {name} is {tuple(shape)} and its parameter {tuple(parameter.shape)}; use the settings it was "
            "trained with"
        )
    return torch.empty(tuple(shape))


def first_failure(error: CheckpointException) -> str:
    """One line of what may be the tracebacks of all processes."""
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {' '.join(str(failure).split())[:200]}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@torch.no_grad()
def _fill(targets: Mapping[str, Tensor], held: Mapping[str, Any]) -> None:
    """ValueError: a tensor is missing, of another shape, or of no target. Of tied ones there may be one."""
    place_of = {name: local_of(target).data_ptr() for name, target in targets.items()}
    tied = {place for name, place in place_of.items() if name in held}
    wanted = {name: t for name, t in targets.items() if name in held or place_of[name] not in tied}
    if differing := sorted(held.keys() ^ wanted.keys()):
        raise ValueError(f"the checkpoint and the model differ in {differing[0]}; use the settings it was trained with")
    for name, target in wanted.items():
        shape = tuple(held[name].get_shape())
        if shape != tuple(target.shape):
            raise ValueError(f"the checkpoint has {name} of shape {shape}, the model of {tuple(target.shape)}")
        if isinstance(target, DTensor):
            copy_part(target, partial(_part, held, name, target.dtype))
        else:
            target.copy_(_part(held, name, target.dtype))


def _part(held: Mapping[str, Any], name: str, dtype: torch.dtype, box: tuple[slice, ...] = ()) -> Tensor:
    """A box of a tensor, or all, of ``dtype`` or, where that is a float, of any float. ValueError: it is of none."""
    part: Tensor = held[name][box]
    if part.dtype != dtype and not (part.is_floating_point() and dtype.is_floating_point):
        raise ValueError(f"the checkpoint has {name} in {part.dtype}, in place of {dtype}")
    return part


def copy_part(target: DTensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Fill this process' part of ``target`` with what ``read`` gives of the whole tensor."""
    local, starts = local_part(target)
    if local.numel():
        local.copy_(read(tuple(slice(start, start + size) for start, size in zip(starts, local.shape, strict=True))))
