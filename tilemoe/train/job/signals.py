"""SIGTERM and Ctrl-C as a request to finish the step, save and exit."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


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
