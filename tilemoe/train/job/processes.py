"""A process' place in its torchrun job, and how signals and failures end it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType

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


class StopRequest:
    """Calling it returns whether a signal has come. ``number``: the signal; SIGTERM if only another process got one."""

    number: int = signal.SIGTERM
    _came = False

    def __call__(self) -> bool:
        return self._came

    def note(self, number: int, frame: FrameType | None) -> None:
        if self._came and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number, self._came = number, True


@contextlib.contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Within the block the first SIGTERM or SIGINT only sets the StopRequest; a SIGINT after it aborts."""
    request = StopRequest()
    with _handled((signal.SIGTERM, signal.SIGINT), request.note):
        yield request


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM raises ``KeyboardInterrupt(SIGTERM)``, like Ctrl-C: for work that may be cut short."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    with _handled((signal.SIGTERM,), interrupt):
        yield


def ignore_sigterm() -> None:
    """Ignore SIGTERM until `heed_sigterm`, also after the blocks above. A failed process of a job needs it to report
    its error, since torchrun sends SIGTERM to all processes as soon as one has ended.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def heed_sigterm() -> None:
    """Restore SIGTERM's default, which ends the process; for a process that need not report anything first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _handled(numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within the block ``handler`` handles the signals. No effect outside of the main thread: Python allows none."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, former in previous.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, former)
