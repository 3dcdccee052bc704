"""The dispatcher interface (dispatch tokens to the experts' processes, combine), and the dispatcher for one process.

T tokens of this process · M tokens at its experts · d model width · E experts · e experts of this process · P pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilemoe.plan import RoutingPlan


class Sent(Protocol):
    """What a `Dispatcher`'s `combine` needs from its `dispatch`."""

    def combine(self, o: Tensor) -> Tensor:
        """See `Dispatcher`."""
        ...


class Dispatched(NamedTuple):
    """The inputs of this process' experts; ``tilemoe.moe(x, w1, w2, plan, scores)`` is the output to combine.

    x (M, d) · plan over the e local experts and M tokens · scores, shaped for that plan · sent: what `combine` needs;
    None if nothing was sent
    """

    x: Tensor
    plan: RoutingPlan
    scores: Tensor
    sent: Sent | None


class LayerRoom:
    """One layer's room in this process. rows: the most rows that it can receive; 0 before any were sent · index (1,)
    int32, on the device: the layer's number.
    """

    rows = 0
    index: Tensor


class Capacity(Protocol):
    """Room for the rows that ranks receive, fixed before their number is known. Each layer has its own on each rank
    (`LayerRoom`), at most ``rows``, which is the same on all ranks of a group.

    Rows that do not fit make outputs NaN on every rank until `check` or `grow`, which all ranks call together. A later
    dispatch raises once the host sees the overflow, unless ``is_watched``: then the caller checks after each step.
    """

    is_watched: bool

    @property
    def rows(self) -> int:
        """The most rows that any layer can have room for; 0 before anything was sent."""
        ...

    def overflow(self) -> Tensor:
        """(3,) integers on the device about the first overflow: the rows that a rank was to receive, the tokens that a
        rank had (each 0 if all fitted), and the layer of those rows.
        """
        ...

    def check(self) -> None:
        """ValueError if something did not fit. A host sync."""
        ...

    def grow(self, rows: int, layer: int | None = None) -> None:
        """Make room for ``rows`` and some more, in ``layer`` (None: in all). RuntimeError: there is no memory."""
        ...

    def forget(self) -> None:
        """Forget what `learn` was told: every layer has at least the room that a new layer gets."""
        ...

    def learn(self, rows: Sequence[int], most: int) -> None:
        """Give each layer room for slightly more rows than this rank received there (``rows``). ``most``: the most rows
        that any of the group's ranks received in any layer. All ranks must call it. RuntimeError: there is no memory
        for ``most``; then nothing has changed.
        """
        ...


class Dispatcher(Protocol):
    """Dispatches tokens to the experts and combines their outputs; differentiable in x, the scores and o."""

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        """x (T, d), a plan over all E experts, and scores, shaped for that plan."""
        ...

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        """o (M, d), each token's score-weighted sum over this process' experts -> (T, d), the sum over all experts."""
        ...

    def local_weight(self, weight: Tensor) -> Tensor:
        """This process' shard (e, ...) of a parameter (E, ...)."""
        ...

    def capacity(self, device: torch.device) -> Capacity | None:
        """The `Capacity` for rows sent from ``device``; None: any number of rows fits."""
        ...


class LocalDispatcher:
    """The dispatcher if all experts are in this process: it sends nothing."""

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        return Dispatched(x, plan, scores, None)

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        return o

    def local_weight(self, weight: Tensor) -> Tensor:
        return weight

    def capacity(self, device: torch.device) -> Capacity | None:
        return None
