"""Before the first step, checks that all processes of a job have the same settings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from tilemoe.train.config import differences
from tilemoe.train.job.processes import Job

# A network file system may show another host's file so much later: NFS caches attributes for up to a minute.
SEEN_WITHIN_SECONDS = 60.0
_POLL_SECONDS = 0.1


class DisagreementError(ValueError):
    """The processes of a job do not have the same settings; all of them raise it, and its line names what differs."""


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


def seen(look: Callable[[], bool], seconds: float) -> bool:
    """Whether ``look`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
