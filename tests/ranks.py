"""Checks that run in several processes of one job, which are started once for all of them."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

_log = logging.getLogger(__name__)
_TIMEOUT_S = 60  # a rank that waits for one that does not call fails the check
# Imported once, by the process that all ranks are forked from; each would take seconds for it.
_PRELOADED = ["helpers", "torch._dynamo", "torch.distributed.fsdp", "tilemoe.parallel.model"]
_PRELOADED += ["tilemoe.train.checkpoints.distributed"]


Check = Callable[[], None]


def named(checks: Sequence[Check], *quick: Check) -> list[Any]:
    """The checks' names as parameters of a test; all but the ``quick`` ones are thorough."""
    return [pytest.param(c.__name__, marks=() if c in quick else pytest.mark.thorough) for c in checks]


def run_on_ranks(checks: Sequence[Check], ranks: int, folder: Path, device_type: str = "cpu") -> dict[str, str]:
    """Run ``checks``, functions of modules, one after the other on each of ``ranks`` processes of one thread.

    On "cuda" each has a GPU of its own, whose tensors go through NCCL; `device_of_rank` says which. Triton's
    interpreter is on in the ranks where the environment turns it on. Returns what went wrong by the check's name, empty
    where nothing did. A failure ends the processes, some of which may wait for others in vain; new ones run the checks
    after it. ``folder`` is an empty one.

    ValueError: there are fewer GPUs than ranks.
    """
    if device_type == "cuda" and torch.cuda.device_count() < ranks:
        raise ValueError(f"these checks need {ranks} GPUs of one host, which has {torch.cuda.device_count()}")
    results: dict[str, str] = {}
    left = list(checks)
    server = _fork_server(os.environ.get("TRITON_INTERPRET") == "1")
    while left:
        problem = ""
        attempt = folder / f"attempt_{len(results)}"
        attempt.mkdir()
        try:
            names = [(check.__module__, check.__name__) for check in left]
            arguments = (names, ranks, attempt, device_type, dict(os.environ))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
                start_processes(_worker, arguments, ranks, start_method="forkserver")
        except (ProcessRaisedException, ProcessExitedException) as error:
            problem = str(error)
        passed = [
            check for check in left if all(_passed(attempt, check.__name__, rank).exists() for rank in range(ranks))
        ]
        results |= {check.__name__: "" for check in passed}
        left = left[len(passed) :]
        if left:
            failed = left.pop(0).__name__
            results[failed] = problem or "a rank ended before the check did"
            _log.warning("%s failed: %s", failed, results[failed])
    return results


@cache
def _fork_server(interprets: bool) -> forkserver.ForkServer:
    """One where Triton interprets and one where it does not: Triton, which PyTorch imports, asks once."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(_PRELOADED)
    return server


def device_of_rank() -> torch.device:
    """Where this process of a job computes."""
    if "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _passed(folder: Path, check: str, rank: int) -> Path:
    return folder / f"{check}.{rank}"


def _worker(
    rank: int, checks: list[tuple[str, str]], ranks: int, folder: Path, device_type: str, environment: dict[str, str]
) -> None:
    os.environ.clear()  # it is as it was when the first process of all was forked
    os.environ |= environment
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.improve()
        interpreter.wait_at_ease(_TIMEOUT_S)
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
    for module, name in checks:  # by name: modules that import Triton are imported in the environment above
        getattr(importlib.import_module(module), name)()
        _passed(folder, name, rank).touch()
    dist.destroy_process_group()
