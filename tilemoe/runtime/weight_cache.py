"""A cache of what is made of weights, such as quantised operands, where version counters do not show their changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.weak import WeakTensorKeyDictionary

_SPANS: list[WeakTensorKeyDictionary] = []  # of the process: the threads of its backward are in them, too


@contextmanager
def promise_unchanged_weights() -> Iterator[None]:
    """The caller promises that no weight's values change inside the block; what is made of them is kept until its end.

    FSDP's gathers write to weights without advancing their version counters. Between two steps of the optimiser they
    write the same values.
    """
    _SPANS.append(WeakTensorKeyDictionary())
    try:
        yield
    finally:
        _SPANS.pop()


def cache_of_unchanged_weights() -> WeakTensorKeyDictionary | None:
    """By weight; None outside of `promise_unchanged_weights`."""
    return _SPANS[-1] if _SPANS else None
