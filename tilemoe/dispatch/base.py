"""The dispatcher interface (dispatch to the experts' processes, combine), and the dispatcher for one process.

T tokens of this process · M tokens at its experts · d model width · E experts · e experts of this process · P pairs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from tilemoe.dispatch.transport import Transport, Way
from tilemoe.plan import RoutingPlan


@dataclass(frozen=True, eq=False)
class Sent:
    """Which of this process' tokens went where: the order in memory, and the sizes, which are on the host.

    Copies of tokens lie by the rank that they are for: the other ranks in their order, then this rank's own, which are
    in no message; pairs likewise. Tensors are int32.

    token_of_copy (C)      the token · copy_of_token (T * W)  token-major, -1 where it does not go
    first_copy (W + 1)     where the copies for a rank begin, in that order
    position_of_pair (P)   of each pair sent, the place of its score among the scores
    tokens                 how many copies of tokens go from each rank to each
    pairs                  how many (token, expert) pairs do
    transport              what brings them there and back
    precision              what x and do cross in: "bf16", their own dtype, or "fp8", e4m3 with scales of 1 x 128
    """

    token_of_copy: Tensor
    copy_of_token: Tensor
    first_copy: Tensor
    position_of_pair: Tensor
    tokens: Way
    pairs: Way
    transport: Transport
    precision: str


class Dispatched(NamedTuple):
    """What the experts of this process compute: ``tilemoe.moe(x, w1, w2, plan, scores)`` is theirs to combine.

    x (M, d) · plan over the e local experts and M tokens · scores, as that plan asks · sent: None where nothing moved
    """

    x: Tensor
    plan: RoutingPlan
    scores: Tensor
    sent: Sent | None


class Dispatcher(Protocol):
    """Dispatches tokens to the experts and combines their outputs; differentiable in x, the scores and o."""

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        """x (T, d), a plan over all E experts, scores as it asks."""
        ...

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        """o (M, d), of each token the score-weighted sum over the experts here -> (T, d), the sum over all experts."""
        ...

    def local_weight(self, weight: Tensor) -> Tensor:
        """This process' shard (e, ...) of a parameter (E, ...)."""
        ...


class LocalDispatcher:
    """All experts are in this process, and nothing is sent."""

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        return Dispatched(x, plan, scores, None)

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        return o

    def local_weight(self, weight: Tensor) -> Tensor:
        return weight
