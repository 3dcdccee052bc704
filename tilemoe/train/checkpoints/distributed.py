"""Checkpoints that all processes of a job write together, and any number of processes reads.

The folder is that of `tilemoe.train.checkpoints.folder`, which all processes see, but for the tensors: they are in
torch.distributed.checkpoint's files, ``.metadata`` and up to 8 ``__<rank>_*.distcp`` of each process.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from tilemoe.data.tokenizer import Tokenizer
from tilemoe.models.sums import file_entries
from tilemoe.train.checkpoints.folder import (
    Checkpoint,
    CheckpointError,
    TrainState,
    drop_old,
    publish,
    state_json,
    write_error,
)
from tilemoe.train.checkpoints.leftovers import clean_stale, discard, make_temporary, temporary_of
from tilemoe.train.checkpoints.metadata import METADATA_FILE, describe
from tilemoe.train.checkpoints.names import step_dir
from tilemoe.train.checkpoints.pickled import read_pickled
from tilemoe.train.checkpoints.sharded_state import Writer, begin_write_training, files_of_rank, first_failure
from tilemoe.train.job.agreement import SEEN_WITHIN_SECONDS, of_all_ranks, seen
from tilemoe.train.job.processes import Job

_VERIFIED_WITHIN = timedelta(days=1)  # a checkpoint of terabytes takes hours


class PendingCheckpoint:
    """A checkpoint that threads write and publish while training goes on, from tensors that were copied when it was
    made. Training waits for the copy alone: a core hashes 1.2 GB/s.

    All processes make it, one at a time, and finish it. An interrupted one has no name; the next save drops it.

    Args:
        group: of gloo and of all processes, made for this alone, as ``torch.distributed.new_group(backend="gloo")``.
        writer: used for one at a time.

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
        writer: Writer,
    ) -> None:
        self._target, self._state = step_dir(run_dir, state.step), state_json(state)
        self._tokenizer, self._keep_last, self._group = tokenizer, keep_last, group
        self._temporary = temporary_of(self._target)
        with self._errors_in_one_line():
            _of_first_rank(lambda: make_temporary(self._target))
            written = begin_write_training(self._temporary, model, optimizer, group, writer)
        threads = ThreadPoolExecutor(1, "tilemoe-save")
        self._published = threads.submit(self._publish, written)
        threads.shutdown(wait=False)

    @property
    def is_written(self) -> bool:
        """Whether it is published, or has failed, as far as this process knows, so that `finish` need not wait."""
        return self._published.done()

    def finish(self) -> Path:
        """Wait until it is published; a process that fails may call it alone.

        CheckpointError: in every process, wherever the write failed; older checkpoints are untouched.
        """
        return self._published.result()

    def _publish(self, tensors_written: Future[Any]) -> Path:
        """Wait for the tensors, of which each process hashes what it wrote, and publish what all see."""
        with self._errors_in_one_line():
            written = tensors_written.result()
            own = files_of_rank(self._temporary, dist.get_rank())
            entries_of_ranks: list[dict[str, Any]] = _of_each(lambda: file_entries(own), self._group)
            hashed = {name: entry for entries in entries_of_ranks for name, entry in entries.items()}
            # Rank 0 looks for the files of all, the others for its own: they are in one folder then.
            looked_for = hashed if dist.get_rank() == 0 else entries_of_ranks[0]
            _require_seen(self._temporary, looked_for, self._group)

            def publish_all() -> None:
                is_told = written.storage_data is not None  # PyTorch 2.11 tells places in its file alone
                tensors = describe(written) if is_told else read_pickled(self._temporary / METADATA_FILE)
                publish(self._target, self._state, self._tokenizer, hashed, tensors)

            _of_first_rank(publish_all, self._group)
        _of_first_rank(lambda: drop_old(self._target, self._keep_last), self._group)
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
                told = first_failure(error)
            raise write_error(self._target, told) from error


@contextlib.contextmanager
def verified(checkpoint: Checkpoint, job: Job) -> Iterator[None]:
    """The block reads the tensors of ``checkpoint``, whose files the processes of ``job`` share out to compare them
    meanwhile; for the last one all wait longer than for anything else.

    CheckpointError: in every process, where one finds a damaged file, or cannot use what it reads.
    """
    if job.is_alone:
        with checkpoint.compared():
            yield
        return
    patient, problem = dist.new_group(backend="gloo", timeout=_VERIFIED_WITHIN), ""
    try:
        with checkpoint.compared(slice(job.rank, None, job.world_size)):
            yield
    except CheckpointError as error:
        problem = str(error)
    problems = [told for told in of_all_ranks(problem, patient) if told]
    dist.destroy_process_group(patient)
    if problems:  # damage, where a process has found any, is why others cannot use what they read
        raise CheckpointError(min(problems, key=lambda told: " is damaged: " not in told))


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
        clean_stale(run_dir)
        folder.mkdir(parents=True)
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


def _require_seen(folder: Path, entries: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """OSError in every process, where one does not see its ``entries`` of the manifest with their sizes in time."""

    def unseen() -> str | None:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}
        return next((name for name, entry in entries.items() if sizes.get(name) != entry["bytes"]), None)

    missing = None if seen(lambda: unseen() is None, SEEN_WITHIN_SECONDS) else unseen()
    for rank, name in enumerate(of_all_ranks(missing, group)):
        if name is not None:
            raise OSError(f"rank {rank} does not see all of {name}; all hosts must share the folder")


def _of_first_rank(action: Callable[[], object], group: dist.ProcessGroup | None = None) -> None:
    """Run ``action`` in rank 0 while the others wait, as `_of_each`."""
    _of_each(action if dist.get_rank() == 0 else lambda: None, group)


def _of_each(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """What ``action`` gave in each process, by rank; OSError in all of them, whatever went wrong in one."""
    given, problem, cause = None, "", None
    try:
        given = action()
    except Exception as error:
        problem, cause = str(error) if isinstance(error, OSError) else repr(error), error
    found = of_all_ranks((given, problem), group)
    for rank, (_, told) in enumerate(found):
        if told:
            raise OSError(f"rank {rank}: {told}") from cause
    return [each for each, _ in found]
