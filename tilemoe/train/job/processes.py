"""The processes of a job as torchrun describes them, and how one of them says that it failed. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilemoe.train.job.signals import heed_sigterm

# torchrun stops a job's processes within a tenth of a second of the first that fails; on a busy machine rank 0 may come
# to the same point seconds later.
_HELD_BACK_SECONDS = 20.0


class JobError(ValueError):
    """What ended a process of a job; one line that begins with its rank."""


@dataclass(frozen=True)
class Job:
    """This process among those that train together; without torchrun there is one.

    rank          of ``world_size``, over all machines; 0 prints and writes the run's records
    local_rank    on this machine, hence the index of its GPU
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Job:
        """From RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them. ValueError: no numbers, or they do not fit."""
        if not {"RANK", "WORLD_SIZE"} <= environment.keys():
            return cls()
        given = {name: environment.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        shown = " ".join(f"{name}={value}" for name, value in given.items())
        try:
            rank, world_size, local_rank = (int(value) for value in given.values())
        except ValueError:
            raise ValueError(f"{shown}: whole numbers are needed; start the job with torchrun") from None
        if not (0 <= rank < world_size and local_rank >= 0):
            raise ValueError(f"{shown}: no such rank; start the job with torchrun")
        return cls(rank, world_size, local_rank)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.world_size}"

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @contextlib.contextmanager
    def errors_with_rank(self) -> Iterator[None]:
        """Errors of users and systems get this process' rank; what all processes find alike before they meet, rank 0
        alone tells.

        The others wait before they speak: if rank 0 has failed too, torchrun stops them meanwhile.
        """
        try:
            yield
        except (BrokenPipeError, JobError):
            raise
        except (ValueError, OSError) as error:
            if self.is_alone:
                raise
            if not self.is_first:
                heed_sigterm()
                time.sleep(_HELD_BACK_SECONDS)
            raise JobError(f"{self.name}: {error}") from error


ALONE = Job()
