"""The dispatcher interface (dispatch to the experts' processes, combine), and the dispatcher for one process.

T tokens of this process · M tokens at its experts · d model width · E experts · e experts of this process · P pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilemoe.plan import RoutingPlan


class Sent(Protocol):
    """What `combine` needs of a `dispatch`."""

    def combine(self, o: Tensor) -> Tensor:
        """See `Dispatcher`."""
        ...


class Dispatched(NamedTuple):
    """The inputs of this process' experts; ``tilemoe.moe(x, w1, w2, plan, scores)`` is the output to combine.

    x (M, d) · plan over the e local experts and M tokens · scores, shaped for that plan · sent: what `combine` needs,
    None if nothing was sent
    """

    x: Tensor
    plan: RoutingPlan
    scores: Tensor
    sent: Sent | None


class LayerRoom:
    """One layer's room in this process. rows: how many it can receive, 0 before any were sent · index (1,) int32: the
    layer's number, on the device.
    """

    rows = 0
    index: Tensor


class Capacity(Protocol):
    """Room for the rows that ranks receive, fixed before their number is known. Each layer has its own on each rank
    (`LayerRoom`), up to ``rows``, which is the same on all ranks of a group.

    What does not fit makes outputs NaN on every rank until `check` or `grow`, which all ranks call together. A later
    dispatch raises, as soon as the host has heard of it, unless ``is_watched`` says that somebody asks after each step.
    """

    is_watched: bool

    @property
    def rows(self) -> int:
        """The most that any layer can have room for; 0 before anything was sent."""
        ...

    def overflow(self) -> Tensor:
        """(3,) integers on the device: what did not fit first of the rows that a rank was to receive, and of the tokens
        that it had, 0 where all did; the layer of those rows.
        """
        ...

    def check(self) -> None:
        """ValueError if something did not fit; it waits for the device."""
        ...

    def grow(self, rows: int, layer: int | None = None) -> None:
        """Make room for these and some more, in one layer or in all. RuntimeError: there is no memory for them."""
        ...

    def forget(self) -> None:
        """Forget what was learnt: no layer has less room than a layer of which nothing is known."""
        ...

    def learn(self, rows: Sequence[int], most: int) -> None:
        """Give each layer room for as many rows as this rank received there, and few more. ``most``: rows that any of
        the group's ranks received in any layer. All ranks call it. RuntimeError: there is no memory for those; then
        nothing has changed.
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
        """Of what is sent from this device; None: there is room for any number of rows."""
        ...


class LocalDispatcher:
    """All experts are in this process, and nothing is sent."""

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        return Dispatched(x, plan, scores, None)

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        return o

    def local_weight(self, weight: Tensor) -> Tensor:
        return weight

    def capacity(self, device: torch.device) -> Capacity | None:
        return None
