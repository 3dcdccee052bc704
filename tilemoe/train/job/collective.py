"""How a job's processes start with the same settings, and their collectives; a single process gets its own values."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tilemoe.checks import told
from tilemoe.models.sums import Entries, file_entries
from tilemoe.train.config import differences
from tilemoe.train.job.processes import Job, JobError
from tilemoe.train.job.signals import ignore_sigterm
from tilemoe.train.job.watch import GO_ON, GRACE, Progress, Watch

# Gloo's failures are plain RuntimeErrors; their text has one of these.
_GLOO = ("gloo/", "[Rank ", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")
# The process groups time out later than `Watch`, which tells more, and can even while NCCL waits.
LATER_SECONDS = 15
_POLL_SECONDS = 0.05
_LONGEST = 1000  # characters of an error that are sent to other processes


class DisagreementError(ValueError):
    """The processes of a job do not have the same settings; all of them raise it, and its line names what differs."""


@contextlib.contextmanager
def joined(job: Job, device: torch.device, timeout: int, settings: Mapping[str, Any]) -> Iterator[Progress]:
    """Within the block ``torch.distributed`` is initialised and processes watch each other, if the job has several.

    ``settings`` must be equal in all processes (`require_same`). GPU tensors go through NCCL, host tensors through
    gloo. If the block raises, the process groups are not destroyed: that would wait for processes that may wait for
    this one. They notice when this process ends.

    Raises:
        DisagreementError: in all processes, before the block.
        JobError: with this process' rank. Not all processes came within ``timeout`` seconds, a process is lost within
            the block (every message names it), or this one fails.
    """
    if job.is_alone:
        yield Progress()
        return
    watch = None
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        store = store_of_attempt(job, timeout)
        require_same(store, job, settings)
        limit = timedelta(seconds=timeout + LATER_SECONDS)
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world_size, timeout=limit)
        watch = Watch(job, store, timeout)
        yield watch.progress
    except BaseException as error:
        ignore_sigterm()
        verdict, is_theirs = "", _is_lost_process(error)
        if watch is not None:
            verdict = watch.verdict(GRACE if is_theirs else 0.0)  # wait a moment to learn which process is lost
            watch.stop("" if verdict or is_theirs else _told(error))
        _raise_with_rank(error, job, verdict, timeout)
    watch.stop(None)
    dist.destroy_process_group()


def _raise_with_rank(error: BaseException, job: Job, verdict: str, timeout: int) -> NoReturn:
    """Raise ``error`` as a JobError for the user; an error that is a bug of ours is raised unchanged."""
    as_it_is = (BrokenPipeError, DisagreementError, JobError)
    if not isinstance(error, (ValueError, OSError, RuntimeError)) or isinstance(error, as_it_is):
        raise error
    if verdict and _told(error) not in verdict:  # else all processes found the same error
        raise JobError(f"{job.name}: {verdict}; {GO_ON}") from error
    if _is_lost_process(error):
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise JobError(
            f"{job.name}: another process is gone or did not answer within train.timeout ({timeout} s); its own error "
            f"or torchrun's report says why; {GO_ON} ({first_line})"
        ) from error
    if isinstance(error, torch.OutOfMemoryError):
        raise JobError(f"{job.name}: out of memory; lower data.batch_size or data.seq_len ({error})") from error
    if isinstance(error, RuntimeError):
        raise error
    raise JobError(f"{job.name}: {error}") from error


def _told(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"{signal.Signals((*error.args, signal.SIGINT)[0]).name} was received"
    return told(error)[:_LONGEST]


def _is_lost_process(error: BaseException) -> bool:
    """Whether ``error`` comes from a failed collective, as after the loss of a process."""
    return isinstance(error, (dist.DistError, TimeoutError)) or any(mark in str(error) for mark in _GLOO)


def require_same(store: Store, job: Job, settings: Mapping[str, Any]) -> None:
    """Check that all processes have the same ``settings``, which must be JSON values. All must call it.

    DisagreementError: in all processes, if one differs from rank 0; it names the first setting that differs.
    """
    store.set(f"settings of {job.rank}", json.dumps(settings))
    if job.is_first:
        store.set("difference", _first_difference(store, job))
    difference = store.get("difference").decode()
    if difference:
        raise DisagreementError(f"{difference}; start all processes with the same settings, text and packages")


def _first_difference(store: Store, job: Job) -> str:
    first = json.loads(store.get("settings of 0"))
    for rank in range(1, job.world_size):
        other = json.loads(store.get(f"settings of {rank}"))
        for difference in differences(first, other, "", "in rank 0", f"in rank {rank}"):
            return difference
    return ""


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather of a small picklable ``value``: a list by rank. All processes must call it and be in ``group``."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def any_process(flag: bool, job: Job) -> bool:
    """Whether ``flag`` is set in any process; all must call it."""
    if job.is_alone:
        return flag
    found = torch.tensor([int(flag)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def values_of_processes(values: Tensor, job: Job) -> list[list[float]]:
    """All-gather of 1-D ``values``: a list per rank. All processes must call it; it waits for the device once."""
    if job.is_alone:
        return [values.tolist()]
    gathered = [torch.empty_like(values) for _ in range(job.world_size)]
    dist.all_gather(gathered, values)
    return torch.stack(gathered).tolist()


def objects_of_processes(value: Any, job: Job) -> list[Any]:
    """`of_all_ranks`, or for a single process ``[value]``."""
    return [value] if job.is_alone else of_all_ranks(value)


def entries_of_hosts(paths: list[Path], job: Job) -> Entries:
    """`file_entries` of files that every host has; a host's processes share the hashing. All processes must call it.

    DisagreementError: in all processes, if the files of two hosts differ.
    """
    paths = sorted(paths)
    seen = paths[0].stat()  # device and inode tell two hosts of the same name apart
    hosts = objects_of_processes((socket.gethostname(), seen.st_dev, seen.st_ino), job)
    beside = [rank for rank, host in enumerate(hosts) if host == hosts[job.rank]]
    hashed = file_entries(paths[beside.index(job.rank) :: len(beside)])
    of_ranks = objects_of_processes({path.name: hashed.get(path.name) for path in paths}, job)
    found: dict[str, Any] = {}
    for name in sorted({name for entries in of_ranks for name in entries}):
        for rank, entries in enumerate(of_ranks):
            entry = entries.get(name, "missing")
            if entry is not None and found.setdefault(name, entry) != entry:
                where = f"{paths[0].parent}: {name}"
                raise DisagreementError(f"{where} differs on the host of rank {rank}; copy it again")
    return found


def store_of_attempt(job: Job, timeout: int) -> Store:
    """An empty part of torchrun's store, the same in all processes; all must call it.

    When torchrun restarts a job, the store still has the last attempt's addresses, of processes that are gone. So every
    other rank writes a new random word, and rank 0 offers a name together with the words that it has read. A rank
    accepts the offer only if it has the rank's own word, so an offer of an earlier attempt is never accepted.

    TimeoutError: not all processes came within ``timeout`` seconds.
    """
    found, _, _ = next(rendezvous("env://", job.rank, job.world_size, timeout=timedelta(seconds=timeout)))
    store, deadline, word = PrefixStore("attempts", found), time.monotonic() + timeout, secrets.token_hex(8)
    name = _offer(store, job, word, deadline) if job.is_first else _accept(store, job, word, deadline)
    return PrefixStore(name, store)


def _offer(store: Store, job: Job, name: str, deadline: float) -> str:
    missing = list(range(1, job.world_size))
    while missing := [rank for rank in missing if not store.check([f"{name}/{rank}"])]:
        words = [_read(store, f"word of {rank}") for rank in range(1, job.world_size)]
        store.set("offer", " ".join([name, *words]))
        _wait(deadline, f"{len(missing)} of {job.world_size} processes, rank {missing[0]} among them, did not join")
    return name


def _accept(store: Store, job: Job, word: str, deadline: float) -> str:
    store.set(f"word of {job.rank}", word)
    while word not in (offer := _read(store, "offer").split()):
        _wait(deadline, "rank 0 did not join")
    store.set(f"{offer[0]}/{job.rank}", word)
    return offer[0]


def _read(store: Store, key: str) -> str:
    value: bytes = store.get(key) if store.check([key]) else b""
    return value.decode()


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(problem)
    time.sleep(_POLL_SECONDS)
