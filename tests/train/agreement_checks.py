"""What two processes check of the folder that they share; `test_train_distributed_checkpoint` runs it."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed_checkpoint_checks import run_dir
from helpers import raises_one_line
from torch.distributed.distributed_c10d import _set_pg_timeout

from tilemoe.train.checkpoints import distributed
from tilemoe.train.checkpoints.distributed import require_shared, verify_by_first_rank
from tilemoe.train.checkpoints.folder import CheckpointError
from tilemoe.train.checkpoints.names import step_dir
from tilemoe.train.job.processes import Job


def check_one_folder_is_shared() -> None:
    rank, run = dist.get_rank(), run_dir() / "shared"
    require_shared(run, Job(rank, 2), 10)
    if rank == 0:  # the rank that clears up, and the next to write there
        assert not any(run.iterdir())
        step_dir(run, 0).mkdir()  # of a job that was stopped before its first step
    dist.barrier()
    require_shared(run, Job(rank, 2), 10)
    if rank == 0:
        assert list(run.iterdir()) == [step_dir(run, 0)]


def check_a_rank_that_cannot_write_is_named() -> None:
    rank, run = dist.get_rank(), run_dir() / "shared"
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Path, "touch", lambda path: os.mkdir("/"))
        with raises_one_line(r"shared: rank 1 on .* cannot write there \(File exists\); put it on"):
            require_shared(run, Job(rank, 2), 10)


def check_a_file_that_a_rank_does_not_see() -> None:
    folder, rank = run_dir(), dist.get_rank()
    file = folder / "__1_0.distcp"
    file.write_bytes(b"abc")
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "SEEN_WITHIN_SECONDS", 0.2)
        distributed._require_seen(folder, {file.name: {"bytes": 3}})
        with raises_one_line("rank 1 does not see all of __1_0.distcp; all hosts", OSError):
            distributed._require_seen(folder if rank == 0 else folder / "none", {file.name: {"bytes": 3}})
        with raises_one_line("rank 0 does not see all of __1_0.distcp; all hosts", OSError):
            distributed._require_seen(folder, {file.name: {"bytes": 4}})


def check_the_first_verifies_for_all() -> None:
    path = run_dir() / "one" / "adamw" / "step_00000007"
    real, calls = distributed.open_checkpoint, []

    def slow(path: Path) -> None:
        time.sleep(2.5)
        calls.append(real(path))

    _set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "open_checkpoint", slow)
        verify_by_first_rank(path)
        assert len(calls) == (dist.get_rank() == 0)
    _set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
    dist.barrier()
    if dist.get_rank() == 0:
        with (path / "model.safetensors").open("ab") as file:
            file.write(b"x")
    with raises_one_line(r"is damaged: model\.safetensors has \d+ bytes instead of", CheckpointError):
        verify_by_first_rank(path)


ON_TWO = (
    check_one_folder_is_shared, check_a_rank_that_cannot_write_is_named, check_a_file_that_a_rank_does_not_see,
    check_the_first_verifies_for_all,
)  # fmt: skip
