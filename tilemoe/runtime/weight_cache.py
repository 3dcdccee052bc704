"""How long what is made of a weight may be kept, quantised operands say, where its version counter does not tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.weak import WeakTensorKeyDictionary

_SPANS: list[WeakTensorKeyDictionary] = []  # of the process: the threads of its backward are in them, too


@contextmanager
def weights_unchanged() -> Iterator[None]:
    """Within the block no weight's values change, in whichever process; what is kept of them ends with it.

    FSDP's gathers write to weights and leave their version counters; until the optimiser's step they write the same.
    """
    _SPANS.append(WeakTensorKeyDictionary())
    try:
        yield
    finally:
        _SPANS.pop()


def cache_of_unchanged_weights() -> WeakTensorKeyDictionary | None:
    """By weight; None outside of `weights_unchanged`."""
    return _SPANS[-1] if _SPANS else None
