"""The dispatcher interface (dispatch to the experts' processes, combine), and the dispatcher for one process.

T tokens of this process · M tokens at its experts · d model width · E experts · e experts of this process · P pairs
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilemoe.plan import RoutingPlan


class Sent(Protocol):
    """What `combine` needs of a `dispatch`."""

    def saving(self, received: Tensor) -> AbstractContextManager[object]:
        """What autograd saves of ``received`` by operators in this block, it saves at the least memory."""
        ...

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

    def saving(self) -> AbstractContextManager[object]:
        """See `Sent`, of x."""
        return nullcontext() if self.sent is None else self.sent.saving(self.x)


class Capacity(Protocol):
    """Room for the rows that ranks receive, where it is fixed before those are known; the same on all ranks of a group.

    What does not fit makes outputs NaN on every rank until `check` or `grow`, which all ranks call together. A later
    dispatch raises, as soon as the host has heard of it, unless ``is_watched`` says that somebody asks after each step.
    """

    is_watched: bool

    @property
    def rows(self) -> int:
        """That a rank has room for; 0 before anything was sent."""
        ...

    def overflow(self) -> Tensor:
        """(2,) integers on the device: what did not fit first of the rows that a rank was to receive, and of the tokens
        that it had; 0 where all did.
        """
        ...

    def check(self) -> None:
        """ValueError if something did not fit; it waits for the device."""
        ...

    def grow(self, rows: int) -> None:
        """Make room for these and some more. RuntimeError: there is no memory for them."""
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
