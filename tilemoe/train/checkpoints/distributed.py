"""Checkpoints that all processes of a job write together, and any number of processes reads.

The folder is that of `tilemoe.train.checkpoints.folder`, found, verified, kept and dropped as the others are, but for
the tensors, which are in torch.distributed.checkpoint's files: ``.metadata`` and one ``__<rank>_*.distcp`` of each
process. All processes see the run's folder.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tilemoe.data.tokenizer import BYTES, Tokenizer
from tilemoe.train.checkpoints.folder import (
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
from tilemoe.train.checkpoints.sharded_state import METADATA_FILE, begin_write_training, files_of_rank, write_training


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
    folder = _Folder(run_dir, state, tokenizer, keep_last)
    with folder.errors_in_one_line():
        folder.begin()
        write_training(folder.temporary, model, optimizer)
        return folder.finish()


def begin_distributed_checkpoint(
    run_dir: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    tokenizer: Tokenizer,
    keep_last: int,
    group: dist.ProcessGroup,
) -> PendingCheckpoint:
    """`save_distributed_checkpoint` while training goes on: returns as soon as all tensors are copied to host memory.

    One at a time: finish it before the next one. ``group``: of gloo and of all processes, made for this alone, as
    ``torch.distributed.new_group(backend="gloo")`` does.

    Raises:
        CheckpointError: the folder cannot be made.
    """
    folder = _Folder(run_dir, state, tokenizer, keep_last)
    with folder.errors_in_one_line():
        folder.begin()
        return PendingCheckpoint(folder, begin_write_training(folder.temporary, model, optimizer, group))


class PendingCheckpoint:
    """A checkpoint that is being written; until it is finished it has no name, and whoever saves next drops it."""

    def __init__(self, folder: _Folder, written: Future[Any]) -> None:
        self._folder, self._written = folder, written

    @property
    def is_written(self) -> bool:
        """Whether this process would not have to wait for its own part."""
        return self._written.done()

    def finish(self) -> Path:
        """Wait for the tensors, verify and publish; all processes call it. CheckpointError as when saving."""
        with self._folder.errors_in_one_line():
            self._written.result()
            return self._folder.finish()


class _Folder:
    """A checkpoint's folder from its temporary name to its own; all processes call each method."""

    def __init__(self, run_dir: Path, state: TrainState, tokenizer: Tokenizer, keep_last: int) -> None:
        self.run_dir, self.tokenizer, self.keep_last = run_dir, tokenizer, keep_last
        self.target = step_dir(run_dir, state.step)
        self.temporary = run_dir / f".tmp-{self.target.name}"
        self._state = state_json(state)

    def begin(self) -> None:
        def make() -> None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            clean_stale(self.run_dir)
            self.temporary.mkdir()

        _by_first_rank(make)

    def finish(self) -> Path:
        """Hash, publish, and drop what is too old."""
        entries_of_ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(entries_of_ranks, file_entries(files_of_rank(self.temporary, dist.get_rank())))

        def publish_all() -> None:
            (self.temporary / STATE_FILE).write_bytes(self._state)
            if self.tokenizer.name != BYTES:
                self.tokenizer.save(self.temporary / TOKENIZER_FILE)
            common = (self.temporary / name for name in (STATE_FILE, TOKENIZER_FILE, METADATA_FILE))
            entries = file_entries(path for path in common if path.exists())
            for others in entries_of_ranks:
                entries |= others
            publish(self.temporary, self.target, entries)
            drop_old(self.run_dir, self.keep_last)

        _by_first_rank(publish_all)
        return self.target

    @contextlib.contextmanager
    def errors_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(self.temporary, ignore_errors=True)
            raise _one_line(self.target, error) from error


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
