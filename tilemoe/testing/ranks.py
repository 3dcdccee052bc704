"""Checks that run in several processes of one job, which are started once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

_TIMEOUT_S = 60  # a rank that waits for one that does not call fails the check

Check = Callable[[], None]


def run_on_ranks(checks: Sequence[Check], ranks: int, folder: Path, device_type: str = "cpu") -> dict[str, str]:
    """Run ``checks``, functions of modules, one after the other on each of ``ranks`` processes of one thread.

    On "cuda" each has a GPU of its own, whose tensors go through NCCL; `device_of_rank` says which. Returns what went
    wrong by the check's name, empty where nothing did. A failure ends the job, so that what follows the check is not
    run, and says so. ``folder`` is an empty one.

    ValueError: there are fewer GPUs than ranks.
    """
    if device_type == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"these checks need {ranks} GPUs of one host, which has {torch.cuda.device_count()}")
    problem = ""
    try:
        spawn(_worker, args=(list(checks), ranks, folder, device_type), nprocs=ranks)
    except (ProcessRaisedException, ProcessExitedException) as error:
        problem = str(error)
    results: dict[str, str] = {}
    for check in checks:
        passed = all(_passed(folder, check, rank).exists() for rank in range(ranks))
        results[check.__name__] = "" if passed else problem or "a rank ended before the check did"
        if not passed:
            problem = f"not run, because {check.__name__} failed"
    return results


def device_of_rank() -> torch.device:
    """Where this process of a job computes."""
    if "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _passed(folder: Path, check: Check, rank: int) -> Path:
    return folder / f"{check.__name__}.{rank}"


def _worker(rank: int, checks: list[Check], ranks: int, folder: Path, device_type: str) -> None:
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    for check in checks:
        check()
        _passed(folder, check, rank).touch()
    dist.destroy_process_group()
