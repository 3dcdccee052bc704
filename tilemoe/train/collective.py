"""What the processes of a job tell each other while they train; alone, a process tells itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilemoe.train.job import Job
from tilemoe.train.rendezvous import store_of_attempt

# Gloo's failures are plain RuntimeErrors; each begins with the place in its source.
_GLOO = ("gloo/", "[Rank ", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


class LostProcessError(ValueError):
    """Another process of the job is gone, or did not answer in time."""


@contextlib.contextmanager
def joined(job: Job, device: torch.device, timeout: int) -> Iterator[None]:
    """Within the block ``torch.distributed`` is initialised if the job has several processes.

    Tensors of a GPU go through NCCL, those of the host through gloo. Left through an error, the groups are not torn
    down: that would wait for processes which may wait for us; the end of this process tells them.

    Raises:
        LostProcessError: not all processes came within ``timeout`` seconds, or one is lost within the block.
    """
    if job.is_alone:
        yield
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = store_of_attempt(job, timeout)
        limit = timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit)
        yield
    except (RuntimeError, TimeoutError) as error:
        if not is_lost_process(error):
            raise
        raise LostProcessError(
            f"another process is gone or did not answer within train.timeout ({timeout} s); its own line or torchrun's "
            f"report says why; go on from the last checkpoint with --resume auto ({_first_line(error)})"
        ) from error
    dist.destroy_process_group()


def is_lost_process(error: BaseException) -> bool:
    """Whether it is that a collective operation has failed."""
    return isinstance(error, (dist.DistError, TimeoutError)) or any(mark in str(error) for mark in _GLOO)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def any_process(flag: bool, job: Job) -> bool:
    """Whether ``flag`` is set in any process; all call it."""
    if job.is_alone:
        return flag
    found = torch.tensor([int(flag)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def values_of_processes(values: Tensor, job: Job) -> list[list[float]]:
    """One process' ``values``, 1-D, of each, by rank; all call it, and it waits for the device once."""
    if job.is_alone:
        return [values.tolist()]
    gathered = [torch.empty_like(values) for _ in range(job.world_size)]
    dist.all_gather(gathered, values)
    rows: list[list[float]] = torch.stack(gathered).tolist()
    return rows


def sum_of_processes(tensor: Tensor, job: Job) -> Tensor:
    """``tensor`` summed over all processes, which all call it; the argument stays as it is."""
    if job.is_alone:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def objects_of_processes(value: Any, job: Job) -> list[Any]:
    """A small picklable ``value`` of each process, by rank; all call it."""
    if job.is_alone:
        return [value]
    gathered: list[Any] = [None] * job.world_size
    dist.all_gather_object(gathered, value)
    return gathered
