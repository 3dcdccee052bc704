"""The tensors of a training run that processes share: each process writes its shards, and reads those that it needs.

Their names in torch.distributed.checkpoint's files are ``model.<name>``, ``optimizer.<parameter>.<key>``,
``rng_cpu.<rank>`` and ``rng_cuda.<rank>``. The safetensors files of a single process are written and read here too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from tilemoe.models.sums import Entries
from tilemoe.runtime.random import local_of, local_part
from tilemoe.train.optim import (
    BLOCK,
    blocks_like,
    in_blocks,
    load_optimizer_tensors,
    optimizer_tensors,
    split_name,
)

_MOST_RANDOM_BYTES = 1 << 16  # torch's CPU state has 5,056
_FILE_BYTES, _MOST_FILES = 1 << 28, 8  # per process; it writes one more file for each 256 MiB
_MODEL, _OPTIMIZER, _RNG_CPU, _RNG_CUDA = "model.", "optimizer.", "rng_cpu.", "rng_cuda."
_KINDS = MappingProxyType(  # safetensors' names
    {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8",
        torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
    }
)  # fmt: skip


def is_shared(model: nn.Module) -> bool:
    """Whether the parameters are sharded over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def files_of_rank(folder: Path, rank: int) -> list[Path]:
    """The files that ``rank`` wrote with `write_shared`."""
    return sorted(folder.glob(f"__{rank}_*"))


class HostMemory:
    """Copies tensors to host memory, pinned if there is a GPU. The next copy reuses it while the tensors live.

    For 604 MB on a CPU the first copy takes .39 s, a later one .10 s, and one into new memory .29 s. PyTorch 2.11's own
    stager for checkpoints empties itself after one copy and fails at the next.
    """

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_initialized()
        self._copies, self._is_taken = StateDictStager(pin_memory=self._on_gpu, share_memory=False), False

    def copy(self, tensors: dict[str, Any], frozen: Container[str]) -> dict[str, Any] | None:
        """A copy of ``tensors``; those that share memory share it in the copy. None: the host has no room for it.

        ``frozen``: names of tensors that training does not change. The result holds these tensors themselves.
        """
        kept = {name: tensor for name, tensor in tensors.items() if name in frozen}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in kept}
        copied: dict[str, Any] | None = None
        if self._is_taken or sum(local_of(tensor).nbytes for tensor in tensors.values()) <= _free_bytes():
            copied, self._is_taken = self._copies.stage(tensors, non_blocking=self._on_gpu) | kept, True
        if self._on_gpu:
            torch.cuda.synchronize()  # what is not copied is read on another stream
        return copied


def _free_bytes() -> float:
    """Free bytes of host memory for each process of this host; infinity where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        [free] = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError):
        return math.inf
    return 1024 * int(free) / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class _Writer(FileSystemWriter):
    """Writes several files in parallel, so that they can be hashed in parallel too: one thread serialises 1.4 GB/s, and
    a file reaches the disk when it is complete. torch's ``thread_count`` loses a failing thread's error and tensors.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # else it waits for the GPU after each tensor

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


def frozen_names(model: nn.Module) -> set[str]:
    """The names, as in `training_tensors`, of the parameters that are not trained."""
    named = model.named_parameters(remove_duplicate=False)
    return {_MODEL + name for name, parameter in named if not parameter.requires_grad}


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors that this process has to write, by their names in the files."""
    state = model.state_dict()  # first: this reshards parameters that FSDP has gathered
    tensors = {_MODEL + name: value for name, value in state.items()}
    tensors |= {_OPTIMIZER + name: value for name, value in optimizer_tensors(model, optimizer).items()}
    tensors[f"{_RNG_CPU}{_rank()}"] = torch.get_rng_state()
    if torch.cuda.is_initialized():
        tensors[f"{_RNG_CUDA}{_rank()}"] = torch.cuda.get_rng_state()
    return tensors


def write_shared(folder: Path, tensors: dict[str, Any], group: dist.ProcessGroup) -> Any:
    """Write all processes' ``tensors`` to the empty shared ``folder``; all must call it. Returns torch's Metadata."""
    return save(tensors, storage_writer=_Writer(folder), process_group=group)


def write_whole(model_file: Path, optimizer_file: Path, tensors: dict[str, Any]) -> Entries:
    """Write a single process' tensors; of tied weights only the first by name, to which metadata maps the others.

    Returns the files' manifest entries.
    """
    weights = _under(_MODEL, tensors)
    first: dict[Any, str] = {}
    kept = {name: first.setdefault(weights[name].data_ptr() or name, name) for name in sorted(weights)}
    tied = {name: other for name, other in kept.items() if name != other}
    stored = {name: weight for name, weight in weights.items() if name not in tied}
    with ThreadPoolExecutor(1) as thread:  # side by side: one thread hashes 1 GB/s
        of_optimizer = thread.submit(_write_safetensors, optimizer_file, _under(_OPTIMIZER, tensors), {})
        of_model = _write_safetensors(model_file, stored, tied)
        return {model_file.name: of_model, optimizer_file.name: of_optimizer.result()}


def _write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """Write one tensor after the other, and hash it meanwhile; returns the file's manifest entry.

    safetensors' own `save_file` first copies all tensors of a GPU into new host memory.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # each begins at a multiple of its items
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        kind, shape = _KINDS[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content: Iterator[Any] = (tensors[name].cpu().flatten().view(torch.uint8).numpy().data for name in names)
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as thread:
        for part in chain([len(text).to_bytes(8, "little") + text], content):
            hashed = thread.submit(digest.update, part)
            file.write(part)
            hashed.result()
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


@contextmanager
def whole_tensors(model_file: Path, optimizer_file: Path) -> Iterator[dict[str, Any]]:
    """The tensors that a single process wrote, by the same names, as slices of safetensors."""
    with safe_open(str(model_file), "pt") as model, safe_open(str(optimizer_file), "pt") as optimizer:
        files = {_MODEL: model, _OPTIMIZER: optimizer}
        held = {kind + name: file.get_slice(name) for kind, file in files.items() for name in file.keys()}  # noqa: SIM118
        for name, part in held.items():
            if part.get_dtype() == "F4":  # two values in a byte: torch's tensor has another shape than the slice says
                raise ValueError(f"{name} is in F4, which no run saves")
        yield held


def read_model(held: Mapping[str, Any], model: nn.Module, absent: Container[str] = ()) -> None:
    """Read the model's weights and buffers except ``absent`` ones, on any mesh.

    held: slices by name, from a job (`tilemoe.train.checkpoints.metadata.StoredTensor`) or from `whole_tensors`.

    ValueError: a tensor is missing, has another shape, or is not of the model.
    """
    parts = {name: part for name, part in _under(_MODEL, held).items() if name not in absent}
    _fill({name: t for name, t in model.state_dict().items() if name not in absent}, parts)


def read_whole(held: Mapping[str, Any], name: str) -> Tensor:
    """The whole weight ``name``. ValueError: it is missing."""
    if _MODEL + name not in held:
        raise ValueError(f"the checkpoint and the model differ in {name}; use the settings it was trained with")
    return _part(held, _MODEL + name, torch.float32)


def read_training(held: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`read_model`, and the optimiser's state and torch's random-number states, if ``held`` has this rank's."""
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
            raise ValueError(f"checkpoint: {name} is too large for a random-number state")
        set_random(name, held[name][()], setters[name])


def _under(prefix: str, held: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): part for name, part in held.items() if name.startswith(prefix)}


def set_random(name: str, state: Any, setter: Callable[[Any], None]) -> None:
    """Set the random-number ``state`` by ``setter``. ValueError, with ``name``: PyTorch refuses it."""
    try:
        setter(state)
    except RuntimeError as error:
        raise ValueError(f"{name} is no random-number state of PyTorch ({error})") from error


def _room(name: str, parameters: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor:
    """Empty memory for one tensor of a parameter's optimiser state: a moment, sharded like the parameter, its codes or
    scales, or the number of steps.

    ValueError: there is no such parameter, or its state cannot have that shape; no memory is taken then.
    """
    of, key, part = split_name(name)
    parameter = parameters.get(of)
    if parameter is None:
        raise ValueError(f"checkpoint: {name} is for no parameter of the model; use the settings it was trained with")
    if part and not in_blocks(parameter):
        raise ValueError(
            f"checkpoint: {name} is stored in blocks of {BLOCK}, which these processes do not share evenly; resume "
            "with another number of processes, or with other --parallel settings"
        )
    is_moment = key != "step"
    if is_moment and part == ".scale" and tuple(shape) == (parameter.numel() // BLOCK,):
        return blocks_like(parameter)
    if is_moment and part != ".scale" and tuple(shape) == tuple(parameter.shape):
        dtype = torch.uint8 if part else torch.float32
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if part or is_moment or shape:  # to a smaller moment fused AdamW would write beyond its end
        raise ValueError(
            f"checkpoint: {name} is {tuple(shape)} but its parameter {tuple(parameter.shape)}; use the settings "
            "it was trained with"
        )
    return torch.empty(())


def first_failure(error: CheckpointException) -> str:
    """The first failing rank and its error, in one line; ``error`` may hold the tracebacks of all processes."""
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {' '.join(str(failure).split())[:200]}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@torch.no_grad()
def _fill(targets: Mapping[str, Tensor], held: Mapping[str, Any]) -> None:
    """Copy ``held`` into ``targets``; of tied targets one is enough. ValueError: names or shapes do not match."""
    place_of = {name: local_of(target).data_ptr() for name, target in targets.items()}
    tied = {place for name, place in place_of.items() if name in held}
    wanted = {name: t for name, t in targets.items() if name in held or place_of[name] not in tied}
    if differing := sorted(held.keys() ^ wanted.keys()):
        raise ValueError(f"the checkpoint and the model differ in {differing[0]}; use the settings it was trained with")
    for name, target in wanted.items():
        shape = tuple(held[name].get_shape())
        if shape != tuple(target.shape):
            raise ValueError(f"the checkpoint has {name} of shape {shape}, the model has {tuple(target.shape)}")
        if isinstance(target, DTensor):
            copy_part(target, partial(_part, held, name, target.dtype))
        else:
            target.copy_(_part(held, name, target.dtype))


def _part(held: Mapping[str, Any], name: str, dtype: torch.dtype, box: tuple[slice, ...] = ()) -> Tensor:
    """A box of a tensor, or all of it. ValueError: its dtype is not ``dtype``, and not both are floating point."""
    part: Tensor = held[name][box]
    if part.dtype != dtype and not (part.is_floating_point() and dtype.is_floating_point):
        raise ValueError(f"the checkpoint has {name} in {part.dtype}, instead of {dtype}")
    return part


def copy_part(target: DTensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Fill this process' shard of ``target`` with the box that ``read`` returns of the whole tensor."""
    local, starts = local_part(target)
    if local.numel():
        local.copy_(read(tuple(slice(start, start + size) for start, size in zip(starts, local.shape, strict=True))))
