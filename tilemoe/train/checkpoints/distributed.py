"""Checkpoints that all processes of a job write together, and any number of processes reads.

The folder is that of `tilemoe.train.checkpoints.folder`, which all processes see, but for the tensors: they are in
torch.distributed.checkpoint's files, ``.metadata`` and one ``__<rank>_*.distcp`` of each process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tilemoe.data.tokenizer import Tokenizer
from tilemoe.train.checkpoints.folder import (
    TrainState,
    drop_old,
    file_entries,
    publish,
    state_json,
    write_error,
)
from tilemoe.train.checkpoints.leftovers import discard, make_temporary, temporary_of
from tilemoe.train.checkpoints.names import step_dir
from tilemoe.train.checkpoints.sharded_state import begin_write_training, files_of_rank


class PendingCheckpoint:
    """A checkpoint that is being written while training goes on, from tensors that were copied when it was made.

    All processes make it, one at a time, and finish it; until then it has no name, and whoever saves next drops it.

    Args:
        group: of gloo and of all processes, made for this alone, as ``torch.distributed.new_group(backend="gloo")``.

    Raises:
        CheckpointError: the folder cannot be made.
    """

    def __init__(
        self,
        run_dir: Path,
        state: TrainState,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        tokenizer: Tokenizer,
        keep_last: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._target, self._state = step_dir(run_dir, state.step), state_json(state)
        self._tokenizer, self._keep_last = tokenizer, keep_last
        self._temporary = temporary_of(self._target)
        with self._errors_in_one_line():
            _by_first_rank(lambda: make_temporary(self._target))
            self._written = begin_write_training(self._temporary, model, optimizer, group)

    @property
    def is_written(self) -> bool:
        """Whether this process would not have to wait for its own part."""
        return self._written.done()

    def finish(self) -> Path:
        """Wait for the tensors, of which each process hashes what it wrote, and publish; returns the folder.

        Raises:
            CheckpointError: in every process, wherever the write failed; older checkpoints are untouched.
        """
        with self._errors_in_one_line():
            self._written.result()
            entries_of_ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(entries_of_ranks, file_entries(files_of_rank(self._temporary, dist.get_rank())))
            hashed = {name: entry for entries in entries_of_ranks for name, entry in entries.items()}

            def publish_all() -> None:
                publish(self._target, self._state, self._tokenizer, hashed)
                drop_old(self._target.parent, self._keep_last)

            _by_first_rank(publish_all)
            return self._target

    @contextlib.contextmanager
    def _errors_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointException) as error:
            if dist.get_rank() == 0:
                discard(self._temporary)
            told: BaseException | str = error
            if isinstance(error, CheckpointException):  # the traceback of every process: the first's last line will do
                rank, (failure, _) = next(iter(error.failures.items()))
                told = f"rank {rank}: {failure}"
            raise write_error(self._target, told) from error


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
