"""Checkpoints that all processes of a job write together, and that any number of processes can read.

The folder is on a file system that all processes share, and is that of `tilemoe.train.checkpoints.folder` except for
tensors: these are in torch.distributed.checkpoint's ``.metadata`` and up to 8 ``__<rank>_*.distcp`` per process.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tilemoe.models.sums import Entries, file_entries
from tilemoe.train.checkpoints.folder import Checkpoint, CheckpointError
from tilemoe.train.checkpoints.metadata import METADATA_FILE, describe
from tilemoe.train.checkpoints.names import clean_stale, discard, step_dir, temporary_of
from tilemoe.train.checkpoints.pending import Saver
from tilemoe.train.checkpoints.pickled import read_pickled
from tilemoe.train.checkpoints.sharded_state import files_of_rank, write_shared
from tilemoe.train.job.collective import of_all_ranks
from tilemoe.train.job.processes import Job

# A network file system may show another host's file so much later: NFS caches attributes for up to a minute.
SEEN_WITHIN_SECONDS = 60.0
_POLL_SECONDS = 0.1
_VERIFIED_WITHIN = timedelta(days=1)  # a checkpoint of terabytes takes hours


class JobSaver(Saver):
    """`Saver` of a job: all processes must make one and write together. ``timeout``: seconds that a collective may
    take.
    """

    def __init__(self, timeout: float) -> None:
        super().__init__()  # own group: the thread's collectives must not mix with those of training
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def write(self, folder: Path, tensors: dict[str, Any]) -> tuple[Entries, Any]:
        """Each process hashes its own files, then waits until it sees them; rank 0 waits until it sees all files."""
        written = write_shared(folder, tensors, self._group)
        own = files_of_rank(folder, dist.get_rank())
        entries_of_ranks: list[Entries] = _of_each(lambda: file_entries(own), self._group)
        hashed = {name: entry for entries in entries_of_ranks for name, entry in entries.items()}
        _require_seen(folder, hashed if self.is_first else entries_of_ranks[0], self._group)
        if written.storage_data is None:  # PyTorch 2.11 tells the places only in its file
            return hashed, read_pickled(folder / METADATA_FILE)
        return hashed, describe(written)

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    def in_first(self, action: Callable[[], object]) -> None:
        _of_each(action if self.is_first else lambda: None, self._group)


@contextlib.contextmanager
def verified(checkpoint: Checkpoint, job: Job) -> Iterator[None]:
    """Verify ``checkpoint`` while the block reads its tensors: each process of ``job`` compares some of the files to
    the manifest. Processes wait up to a day for the last one, longer than ``train.timeout``.

    CheckpointError: in every process, if any process finds a damaged file or cannot use what it reads.
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
    if problems:  # name damage first: it is why other processes cannot use what they read
        raise CheckpointError(min(problems, key=lambda told: " is damaged: " not in told))


def require_shared(run_dir: Path, job: Job, timeout: float) -> None:
    """Check that every process sees a file that rank 0 writes, and can write beside it. All processes must call it.

    timeout: of the processes' collectives, in seconds.

    Raises:
        ValueError: in all processes, if one does not see it or cannot write; the message names that rank.
        OSError: in rank 0, if it cannot write there.
    """
    if job.is_alone:
        return
    folder, word = temporary_of(step_dir(run_dir, 0)), [secrets.token_hex(8)]  # a new name, which no host has cached
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
                f"train.out_dir {run_dir}: rank {rank} {found}; put it on a file system to which all hosts can write"
            )


def _problem(folder: Path, word: str, job: Job, seconds: float) -> str | None:
    if not _seen(lambda: (folder / word).is_file(), seconds):
        return f"on {platform.node()} does not see what rank 0 has written there"
    try:
        (folder / f"{word}.{job.rank}").touch()
    except OSError as error:
        return f"on {platform.node()} cannot write there ({error.strerror or error})"
    return None


def _require_seen(folder: Path, entries: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """OSError in every process, if one does not see the files of its manifest ``entries``, in full size, in time."""

    def unseen() -> str | None:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()} if folder.is_dir() else {}
        return next((name for name, entry in entries.items() if sizes.get(name) != entry["bytes"]), None)

    missing = None if _seen(lambda: unseen() is None, SEEN_WITHIN_SECONDS) else unseen()
    for rank, name in enumerate(of_all_ranks(missing, group)):
        if name is not None:
            raise OSError(f"rank {rank} does not see all of {name}; all hosts must share the folder")


def _of_each(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather of ``action``'s result: a list by rank. OSError in all processes, whatever error one of them had."""
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


def _seen(look: Callable[[], bool], seconds: float) -> bool:
    """Whether ``look`` becomes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
