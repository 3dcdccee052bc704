"""Operators whose kernels begin to be compiled together, when operands of a new kind come: see
`tilemoe.kernels.triton.ahead`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from tilemoe.ops.replayed import remember

MAX_KINDS = 256  # of one operator; beyond, it forgets the oldest, of which nothing is left to compile


class Ahead:
    """Called with an operator's arguments, the first of them a tensor on a GPU, before the operator runs.

    ``kind``: what of the arguments decides what is compiled, which the number of tokens is no part of; None where
    nothing is. ``rehearsed``: for the same arguments, a function that launches what they will, once it is called with
    tensors in their place that have no data.
    """

    def __init__(self, kind: Callable[..., Hashable], rehearsed: Callable[..., Callable[..., Any]]) -> None:
        self._kind, self._rehearsed = kind, rehearsed
        self._seen: dict[Hashable, None] = {}

    def __call__(self, *args: Any) -> None:
        kind = self._kind(*args)
        key = (args[0].device, kind)
        if kind is None or key in self._seen:
            return
        remember(self._seen, key, None, MAX_KINDS)
        from tilemoe.kernels.triton.launch import rehearse  # not on every machine

        rehearse(self._rehearsed(*args), args)
