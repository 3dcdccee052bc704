"""The dispatcher interface (dispatch to the experts' processes, combine), and the dispatcher for one process.

T tokens of this process · M tokens at its experts · d model width · E experts · e experts of this process · P pairs
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tilemoe.dispatch.transport import Transport, Way
from tilemoe.plan import RoutingPlan


@dataclass(frozen=True, eq=False)
class Sent:
    """Where this process' tokens were sent: their order in memory, and the sizes, which are on the host.

    Copies of tokens are ordered by destination: the other ranks in rank order, then this rank's own, which are in no
    message. Pairs likewise. Tensors are int32.

    token_of_copy (C)      each copy's token · copy_of_token (T * W)  token-major, -1 for ranks it is not sent to
    first_copy (W + 1)     where the copies for each rank begin, in the order above
    position_of_pair (P)   for each pair sent, the index of its score in the scores
    tokens                 how many copies of tokens go from each rank to each
    pairs                  how many (token, expert) pairs go from each rank to each
    transport              sends them there and back
    precision              in what x and do are sent: "bf16", their own dtype, or "fp8", e4m3 with a scale per token
    """

    token_of_copy: Tensor
    copy_of_token: Tensor
    first_copy: Tensor
    position_of_pair: Tensor
    tokens: Way
    pairs: Way
    transport: Transport
    precision: str

    def saving(self, x: Tensor) -> AbstractContextManager[object]:
        """x itself is saved."""
        return nullcontext()


class Dispatched(NamedTuple):
    """The inputs of this process' experts; ``tilemoe.moe(x, w1, w2, plan, scores)`` is the output to combine.

    x (M, d) · plan over the e local experts and M tokens · scores, shaped for that plan · sent: what `combine` needs,
    None if nothing was sent
    """

    x: Tensor
    plan: RoutingPlan
    scores: Tensor
    sent: Any

    def saving(self) -> AbstractContextManager[object]:
        """What autograd saves of x by operators in this block, it saves at the least memory."""
        return nullcontext() if self.sent is None else self.sent.saving(self.x)


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


class LocalDispatcher:
    """All experts are in this process, and nothing is sent."""

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor) -> Dispatched:
        return Dispatched(x, plan, scores, None)

    def combine(self, o: Tensor, dispatched: Dispatched) -> Tensor:
        return o

    def local_weight(self, weight: Tensor) -> Tensor:
        return weight
