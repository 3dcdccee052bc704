"""Where the processes of one attempt of a job meet.

torchrun starts a job again (--max-restarts) beside the store that the attempt before has used: what that left there,
addresses of processes that are gone, would be taken for the new one's. Hence a part of the store for each attempt.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tilemoe.train.job.processes import Job

_POLL_SECONDS = 0.05


def store_of_attempt(job: Job, timeout: int) -> Store:
    """An empty part of torchrun's store, the same in all processes, which all call it.

    The first names it, together with the words by which it has heard of the others; those wait until it has heard the
    word that they have just made up, which no attempt before can have known.

    Raises:
        TimeoutError: not all came within ``timeout`` seconds.
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
        _wait(deadline, f"{len(missing)} of {job.world_size} processes, rank {missing[0]} among them, did not come")
    return name


def _accept(store: Store, job: Job, word: str, deadline: float) -> str:
    store.set(f"word of {job.rank}", word)
    while word not in (offer := _read(store, "offer").split()):
        _wait(deadline, "rank 0 did not come")
    store.set(f"{offer[0]}/{job.rank}", word)
    return offer[0]


def _read(store: Store, key: str) -> str:
    value: bytes = store.get(key) if store.check([key]) else b""
    return value.decode()


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(problem)
    time.sleep(_POLL_SECONDS)
