"""A process' place in its torchrun job, and how it reports that it failed. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilemoe.train.job.signals import heed_sigterm

# torchrun stops all processes within 0.1 s after the first one fails; on a busy machine rank 0 may reach the same
# failure seconds later.
_HELD_BACK_SECONDS = 20.0


class JobError(ValueError):
    """The error that ended a process of a job; one line that begins with its rank."""


@dataclass(frozen=True)
class Job:
    """This process' place among the processes that train together; without torchrun there is only one.

    rank          of ``world_size``, over all machines; rank 0 prints and writes the run's records
    local_rank    on this machine; also the index of its GPU
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Job:
        """From torchrun's RANK, WORLD_SIZE and LOCAL_RANK. ValueError: they are no numbers, or do not fit together."""
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
        """In a job of several processes, turn ValueError and OSError into a JobError with this process' rank.

        Ranks other than 0 wait before they raise it: if rank 0 fails too, torchrun stops them meanwhile. So an error
        that all processes find is reported once.
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
