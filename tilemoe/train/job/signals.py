"""SIGTERM and Ctrl-C as a polite request: finish the step, save, leave."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class StopRequest:
    """Whether a signal has come, once it is called. ``number``: the signal's; SIGTERM where another process had it."""

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
    """Within the block the first SIGTERM or SIGINT only makes what is given answer True; a second SIGINT aborts."""
    request = StopRequest()
    with _handled((signal.SIGTERM, signal.SIGINT), request.note):
        yield request


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM raises ``KeyboardInterrupt(SIGTERM)``, as Ctrl-C does: for work that can be cut."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    with _handled((signal.SIGTERM,), interrupt):
        yield


def ignore_sigterm() -> None:
    """Until `heed_sigterm`, also after the blocks above: for a process of a job that has failed and is about to say
    so, since torchrun sends this signal to all as soon as one process has ended.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def heed_sigterm() -> None:
    """As a process does by itself, which ends by it; for one that has said all."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _handled(numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Nothing is handled outside of the main thread, where Python cannot."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, former in previous.items():
            if signal.getsignal(number) == handler:
                signal.signal(number, former)
