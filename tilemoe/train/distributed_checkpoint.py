"""Checkpoints that all processes of a job write together, and any number of processes reads.

The folder is that of `tilemoe.train.checkpoint`, found, verified, kept and dropped as the others are, but for the
tensors, which are in torch.distributed.checkpoint's files: ``.metadata`` and one ``__<rank>_*.distcp`` of each process.
All processes see the run's folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tilemoe.data.tokenizer import BYTES, Tokenizer
from tilemoe.train.checkpoint import (
    STATE_FILE,
    TOKENIZER_FILE,
    CheckpointError,
    TrainState,
    clean_stale,
    drop_old,
    file_entries,
    publish,
    state_json,
    step_dir,
    write_error,
)
from tilemoe.train.sharded_state import METADATA_FILE, files_of_rank, write_training


def save_distributed_checkpoint(
    run_dir: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tokenizer: Tokenizer,
    keep_last: int,
) -> Path:
    """As `save_checkpoint`; all processes call it, and each hashes what it wrote.

    Raises:
        CheckpointError: in every process, wherever the write failed; older checkpoints are untouched.
    """
    target = step_dir(run_dir, state.step)
    temporary = run_dir / f".tmp-{target.name}"

    def begin() -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        clean_stale(run_dir)
        temporary.mkdir()

    def finish() -> None:
        (temporary / STATE_FILE).write_bytes(state_json(state))
        if tokenizer.name != BYTES:
            tokenizer.save(temporary / TOKENIZER_FILE)
        own = [path for path in temporary.iterdir() if path.name in (STATE_FILE, TOKENIZER_FILE, METADATA_FILE)]
        entries = file_entries(own)
        for others in entries_of_ranks:
            entries |= others or {}
        publish(temporary, target, entries)
        drop_old(run_dir, keep_last)

    try:
        _by_first_rank(begin)
        write_training(temporary, model, optimizer)
        entries_of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(entries_of_ranks, file_entries(files_of_rank(temporary, dist.get_rank())))
        _by_first_rank(finish)
    except (OSError, CheckpointException) as error:
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise _one_line(target, error) from error
    return target


def _by_first_rank(action: Callable[[], None]) -> None:
    """Do it in rank 0 while the others wait; an OSError there is one everywhere."""
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem[0] = str(error)
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise OSError(problem[0])


def _one_line(target: Path, error: OSError | CheckpointException) -> CheckpointError:
    """A failed collective write carries the traceback of every process: the first one's last line says what it was."""
    if isinstance(error, CheckpointException):
        rank, (failure, _) = next(iter(error.failures.items()))
        return write_error(target, f"rank {rank}: {failure}")
    return write_error(target, error)
