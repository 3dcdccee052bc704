"""A cache for tensors derived from weights, such as quantised operands, when version counters miss weight updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.weak import WeakTensorKeyDictionary

_SPANS: list[WeakTensorKeyDictionary] = []  # per process, since its backward runs in other threads


@contextmanager
def promise_unchanged_weights() -> Iterator[None]:
    """The caller promises that no weight's values change inside the block; derived tensors are cached until its end.

    FSDP's all-gather writes to weights without advancing their version counters. Between two optimiser steps it writes
    the same values.
    """
    _SPANS.append(WeakTensorKeyDictionary())
    try:
        yield
    finally:
        _SPANS.pop()


def cache_of_unchanged_weights() -> WeakTensorKeyDictionary | None:
    """The cache of the innermost `promise_unchanged_weights`, by weight; None outside of one."""
    return _SPANS[-1] if _SPANS else None
