"""SIGTERM and Ctrl-C as a polite request: finish the step, save, leave."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_request() -> Iterator[Callable[[], bool]]:
    """Within the block the first SIGTERM or SIGINT only makes what is given answer True; a second SIGINT aborts."""
    requested = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    with _handled((signal.SIGTERM, signal.SIGINT), note):
        yield lambda: requested


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does: for work that can be cut short anywhere.

    Native code, such as the training of a tokenizer, is not interrupted: the signal waits until it returns.
    """
    with _handled((signal.SIGTERM,), signal.default_int_handler):
        yield


@contextlib.contextmanager
def _handled(numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Nothing is handled outside of the main thread, where Python cannot."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.signal(number, handler) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
