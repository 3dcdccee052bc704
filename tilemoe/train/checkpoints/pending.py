"""Checkpoints that are written while training goes on, by a single process or by all processes of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tilemoe.data.tokenizer import Tokenizer
from tilemoe.models.sums import Entries
from tilemoe.train.checkpoints.folder import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    TrainState,
    drop_old,
    publish,
    state_json,
    write_error,
)
from tilemoe.train.checkpoints.names import discard, make_temporary, step_dir, temporary_of
from tilemoe.train.checkpoints.sharded_state import (
    HostMemory,
    first_failure,
    frozen_names,
    training_tensors,
    write_whole,
)


class Saver:
    """How a single process writes checkpoints, one at a time, from host memory that is reused for the next one."""

    def __init__(self) -> None:
        self.memory = HostMemory()

    def write(self, folder: Path, tensors: dict[str, Any]) -> tuple[Entries, Any]:
        """Write ``tensors``; returns manifest entries of files that are already hashed, and a job's tensor places."""
        return write_whole(folder / MODEL_FILE, folder / OPTIMIZER_FILE, tensors), None

    @property
    def is_first(self) -> bool:
        return True

    def in_first(self, action: Callable[[], object]) -> None:
        """Run ``action`` in rank 0, while the others wait. OSError: in all processes, if it fails there."""
        action()


class PendingCheckpoint:
    """A checkpoint that a thread writes and publishes while training goes on. Making it copies what is trained to the
    host, and training waits for that copy only; if the host has no room, for the whole write (a core hashes 1.2 GB/s).

    All processes of a job must make it, one at a time, and finish it. The next save removes an interrupted one.

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
        saver: Saver,
    ) -> None:
        self._target, self._state = step_dir(run_dir, state.step), state_json(state)
        self._tokenizer, self._keep_last, self._saver = tokenizer, keep_last, saver
        self._temporary = temporary_of(self._target)
        with self._errors_in_one_line():
            saver.in_first(lambda: make_temporary(self._target))
        tensors = training_tensors(model, optimizer)
        copied = saver.memory.copy(tensors, frozen_names(model))
        self._on_own_stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if torch.cuda.is_initialized():  # the thread reads frozen weights from the GPU while that computes
            self._on_own_stream = torch.cuda.stream(torch.cuda.Stream())
        self._thread = ThreadPoolExecutor(1, "tilemoe-save")
        self._done: list[Future[Any]] = [self._thread.submit(self._publish, tensors if copied is None else copied)]
        if copied is None:
            wait(self._done)

    @property
    def is_written(self) -> bool:
        """Whether the checkpoint is published or has failed, as far as this process knows: `finish` will not wait."""
        return self._done[0].done()

    def then(self, action: Callable[[], object]) -> None:
        """Run ``action`` in the thread, once the checkpoint is published."""
        published = self._done[0]

        def act() -> None:
            published.result()  # raises if there is no checkpoint
            action()

        self._done.append(self._thread.submit(act))

    def finish(self) -> Path:
        """Wait until the checkpoint is published; a failing process may call this alone. Returns its path.

        CheckpointError: in every process, wherever the write failed; older checkpoints are untouched.
        """
        self._thread.shutdown()
        for done in self._done:
            done.result()
        return self._target

    def _publish(self, tensors: dict[str, Any]) -> None:
        with self._errors_in_one_line(), self._on_own_stream:
            hashed, places = self._saver.write(self._temporary, tensors)
            self._saver.in_first(lambda: publish(self._target, self._state, self._tokenizer, hashed, places))
        self._saver.in_first(lambda: drop_old(self._target, self._keep_last))

    @contextlib.contextmanager
    def _errors_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointException) as error:
            if self._saver.is_first:
                discard(self._temporary)
            told: BaseException | str = error
            if isinstance(error, CheckpointException):  # it holds every process' traceback
                told = first_failure(error)
            raise write_error(self._target, told) from error
