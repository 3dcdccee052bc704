"""RoutingPlan: the index arrays that assign (token, expert) pairs to the rows that each expert computes.

T tokens · E experts · P (token, expert) pairs, token-major · R routed rows, expert-major · R_max their static capacity
C capacity of a list of row tiles
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tilemoe.checks import shown
from tilemoe.runtime.tensors import require_tensors

_INT32_MAX = 2**31 - 1

# Bits of RoutingPlan.error_bits, which kernels set on the device: reading the ids back would be a host sync.
NEGATIVE_EXPERT = 1
TOKEN_OUT_OF_RANGE = 2

_MESSAGES = {
    NEGATIVE_EXPERT: "expert ids must be >= 0 (an id >= num_experts is skipped as a sentinel); found a negative id",
    TOKEN_OUT_OF_RANGE: "token ids must lie in [0, num_tokens); found one out of range",
}

# The names of `RoutingPlan.arrays`.
PLAN_ARRAYS = ("token_of_row", "pair_of_row", "row_of_pair", "pair_start_of_token", "row_start_of_expert")
PlanArrays = tuple[Tensor, Tensor, Tensor, "Tensor | None", Tensor]


class TileList(NamedTuple):
    """Row tiles of one height, in row order. All int32; entries past the number of tiles are undefined.

    expert_of_tile (C) · row_of_tile (C): first row · end_of_tile (C): end of the expert's rows, not of the tile ·
    num_tiles (1)
    """

    expert_of_tile: Tensor
    row_of_tile: Tensor
    end_of_tile: Tensor
    num_tiles: Tensor

    @property
    def capacity(self) -> int:
        """C: the largest possible number of tiles."""
        return self.expert_of_tile.shape[0]


class Peers(Protocol):
    """The processes that sent a plan's tokens x (T, d), and read the sums of their results."""

    def keep(self, x: Tensor) -> bool:
        """Whether `again` can return this x in the backward, so that it need not be saved."""
        ...

    def again(self) -> Tensor:
        """Returns x, received again."""
        ...

    def lend(self, like: Tensor) -> Tensor | None:
        """Memory of ``like``'s shape and dtype where the peers read sums; None if it is not free."""
        ...


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The index arrays of one routing, int32, on one device. ``<value>_of_<index>`` maps an index to a value.

    Attributes:
        token_of_row: (R_max) token whose activations the row reads
        pair_of_row: (R_max) position of the row's pair in the caller's ids: ``scores.flatten()[pair_of_row]``
        row_of_pair: (P) row of each pair, token-major; -1 for a pair skipped because its id is a sentinel (>= E)
        pair_start_of_token: (T+1) slices row_of_pair by token; None when every token has exactly P/T pairs
        row_start_of_expert: (E+1) slices the rows by expert; its last element is R, which stays on the device
        num_experts: E
        num_tokens: T
        error_bits: () bits that `check` reports; 0 if every id was in range, None if nothing was recorded
        counted_rows: (E) `rows_per_expert`, if the plan's builder counted them anyway
        tiles: lists of row tiles by height; kernels make them at first use
        peers: the processes that sent the tokens; None: no tokens were sent
        sums: (T, d) memory where a call of an operator writes its sums over each token's rows; None: new memory
        tile_counter: (1) the dynamic persistent tile scheduler's counter, made with the first list. It is 0 between
            launches. Concurrent kernels must not share it, so every call of an operator has its own plan
        unchecked: True for arrays made by this package, whose dtypes and lengths are not checked again

    Rows are sorted by expert; within an expert they keep the order of the tokens. Entries of the row arrays past R are
    0 and are never used. `plan_topk`, `plan_pairs` and `route` make plans.

    ValueError: the type, dtype, device or length of an attribute is wrong, or (by `check`) an id was out of range.

    Examples:
        >>> plan = tilemoe.plan_topk(torch.tensor([[0, 2], [2, 1], [0, 1]]), num_experts=3)
        >>> plan.token_of_row.tolist(), plan.row_start_of_expert.tolist()
        ([0, 2, 1, 2, 0, 1], [0, 2, 4, 6])
    """

    token_of_row: Tensor
    pair_of_row: Tensor
    row_of_pair: Tensor
    pair_start_of_token: Tensor | None
    row_start_of_expert: Tensor
    num_experts: int
    num_tokens: int
    error_bits: Tensor | None = None
    counted_rows: Tensor | None = field(default=None, repr=False, kw_only=True)
    peers: Peers | None = field(default=None, repr=False, kw_only=True)
    sums: Tensor | None = field(default=None, repr=False, kw_only=True)
    tiles: dict[int, TileList] = field(init=False, repr=False)
    tile_counter: Tensor | None = field(default=None, init=False, repr=False)
    unchecked: InitVar[bool] = field(default=False, kw_only=True)

    def __post_init__(self, unchecked: bool) -> None:
        object.__setattr__(self, "tiles", {})  # not as a default, which torch.compile cannot trace
        if unchecked:
            return
        check_count("num_experts", self.num_experts, minimum=1)
        check_count("num_tokens", self.num_tokens, minimum=0)
        given = dict(zip(PLAN_ARRAYS, self.arrays, strict=True))
        optional = {"pair_start_of_token": given.pop("pair_start_of_token"), "error_bits": self.error_bits}
        require_tensors(given, optional)
        arrays = {name: array for name, array in (given | optional).items() if array is not None}
        for name, array in arrays.items():
            self._check_array(name, array, ndim=0 if name == "error_bits" else 1)
        for name, length, what in (
            ("pair_of_row", self.capacity, "as token_of_row"),
            ("row_start_of_expert", self.num_experts + 1, "num_experts + 1"),
            ("pair_start_of_token", self.num_tokens + 1, "num_tokens + 1"),
        ):
            if name in arrays and arrays[name].shape[0] != length:
                raise ValueError(f"{name} must have {length} elements, {what}, got {arrays[name].shape[0]}")

    def _check_array(self, name: str, array: Tensor, ndim: int) -> None:
        if array.ndim != ndim or array.dtype != torch.int32:
            raise ValueError(
                f"{name} must be a {ndim}-D int32 tensor, got {tuple(array.shape)} {array.dtype}; let plan_topk, "
                "plan_pairs or route make the plan"
            )
        if array.device != self.device:
            raise ValueError(f"{name} is on {array.device} but token_of_row is on {self.device}; move one of them")

    @property
    def capacity(self) -> int:
        """R_max: the static number of rows that buffers are sized for."""
        return self.token_of_row.shape[0]

    @property
    def num_pairs(self) -> int:
        """P: the number of (token, expert) pairs, including those that no row computes; T K for a top-K plan."""
        return self.row_of_pair.shape[0]

    @property
    def arrays(self) -> PlanArrays:
        """The index arrays, in the order of `PLAN_ARRAYS`."""
        return (
            self.token_of_row,
            self.pair_of_row,
            self.row_of_pair,
            self.pair_start_of_token,
            self.row_start_of_expert,
        )

    @property
    def rows_per_expert(self) -> Tensor:
        """(E) int32: the number of rows that each expert computes."""
        return torch.diff(self.row_start_of_expert) if self.counted_rows is None else self.counted_rows

    def sums_like(self, x: Tensor, width: int) -> Tensor:
        """Memory (T, width) in x's dtype for the sums over each token's rows: `sums`, or new memory."""
        return x.new_empty(self.num_tokens, width) if self.sums is None else self.sums

    @property
    def device(self) -> torch.device:
        """The device of all index arrays."""
        return self.token_of_row.device

    def check(self) -> None:
        """Read ``error_bits`` back, a host sync on a GPU, and raise ValueError if an id was out of range."""
        if self.error_bits is not None:
            raise_for_bits(int(self.error_bits))


def check_count(name: str, value: Any, minimum: int) -> None:
    """ValueError unless ``value`` is an integer (or torch.compile's symbolic one) in [``minimum``, 2^31 - 1]."""
    integer = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not integer or value < minimum or value > _INT32_MAX:
        raise ValueError(f"{name} must be an integer in [{minimum}, {_INT32_MAX}], got {shown(value)}")


def plan_of(arrays: PlanArrays, num_tokens: int, **more: Any) -> RoutingPlan:
    """A plan, with no tiles yet, from the arrays in the order of `RoutingPlan.arrays`."""
    return RoutingPlan(*arrays, arrays[-1].shape[0] - 1, num_tokens, unchecked=True, **more)


def without_derived(plan: RoutingPlan) -> RoutingPlan:
    """A copy of ``plan`` without tile lists, counter and peers."""
    return RoutingPlan(*plan.arrays, plan.num_experts, plan.num_tokens, sums=plan.sums, unchecked=True)


def with_sums(plan: RoutingPlan, like: Tensor) -> RoutingPlan:
    """``plan`` for one operator call whose sums (T, d) are like ``like``: in the peers' memory, if it is free."""
    if plan.peers is None or torch.compiler.is_compiling():
        return plan
    return replace(plan, sums=plan.peers.lend(like), unchecked=True)


def experts_of_rows(row_start_of_expert: Tensor, rows: Tensor) -> Tensor:
    """The expert of each row number in ``rows``, int64: E for rows past the last expert's, -1 for negative numbers.

    It searches the whole table (E+1,), not a view without its first entry: compiled for CUDA, torch.searchsorted
    ignores such a view's storage offset (seen with PyTorch 2.11).
    """
    return torch.searchsorted(row_start_of_expert, rows, right=True) - 1


def raise_for_bits(bits: int) -> None:
    """Raise the ValueError of the lowest set bit of ``bits``; return if it is 0."""
    for bit, message in _MESSAGES.items():
        if bits & bit:
            raise ValueError(message)
