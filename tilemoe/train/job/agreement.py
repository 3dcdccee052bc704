"""What the processes of a job must have alike before the first step: their settings and the run's folder."""

from __future__ import annotations

import json
import platform
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tilemoe.train.checkpoints.leftovers import discard, make_marked, temporary_of
from tilemoe.train.checkpoints.names import step_dir
from tilemoe.train.config import differences
from tilemoe.train.job.processes import Job

# A network's file system may show another host's file that much later: NFS keeps what it knows for up to a minute.
SEEN_WITHIN_SECONDS = 60.0
_POLL_SECONDS = 0.1


class DisagreementError(ValueError):
    """The processes of a job do not have the same settings; all find it, in one line that names what differs."""


def require_same(store: Store, job: Job, settings: Mapping[str, Any]) -> None:
    """All call it, with settings that JSON can hold.

    Raises:
        DisagreementError: in all of them, where one has other settings than rank 0; it names the first that differs.
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


def require_shared(run_dir: Path, job: Job, timeout: float) -> None:
    """Find out whether all processes, which all call it, see a file that rank 0 writes, and can write beside it.

    timeout: of the processes' collectives, in seconds.

    Raises:
        ValueError: in all of them, where one does not; the message names it.
        OSError: in rank 0, which cannot write there.
    """
    if job.is_alone:
        return
    folder, word = temporary_of(step_dir(run_dir, 0)), [secrets.token_hex(8)]  # a new name: no host remembers it
    if job.is_first:
        make_marked(folder)
        (folder / word[0]).touch()
    dist.broadcast_object_list(word, src=0)
    problem = None if job.is_first else _problem(folder, word[0], job, min(timeout, SEEN_WITHIN_SECONDS))
    problems = of_all_ranks(problem)
    if job.is_first:
        discard(folder)
    for rank, found in enumerate(problems):
        if found:
            raise ValueError(
                f"train.out_dir {run_dir}: rank {rank} {found}; put it on a file system that all hosts share and write"
            )


def _problem(folder: Path, word: str, job: Job, seconds: float) -> str | None:
    if not seen(lambda: (folder / word).is_file(), seconds):
        return f"on {platform.node()} does not see what rank 0 has written there"
    try:
        (folder / f"{word}.{job.rank}").touch()
    except OSError as error:
        return f"on {platform.node()} cannot write there ({error.strerror or error})"
    return None


def of_all_ranks(value: Any) -> list[Any]:
    """All-gather of a small picklable ``value``: a list by rank. All processes must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def seen(look: Callable[[], bool], seconds: float) -> bool:
    """Whether ``look`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
