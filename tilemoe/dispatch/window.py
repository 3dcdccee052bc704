"""Windows in symmetric memory: opened by all ranks together, with room for what a step needs, and replaced by larger
ones.

W ranks · T tokens, P pairs of this rank · Q pairs that it receives

What a window has room for is fixed while it is open (`Limits`), and what a layer receives within a step (`LayerRoom`);
what arrives is known on the device alone. What does not fit makes the layer's output NaN on every rank, and is kept in
the window's state until `Windows.check` reads it.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from tilemoe.dispatch.base import Dispatched, LayerRoom
from tilemoe.kernels.expert_parallel.triton_window import (
    HEADER_BYTES,
    MAX_RANKS,
    NEEDED_LAYER,
    NEEDED_ROWS,
    RESULTS,
    STATE,
    TOKENS,
    Limits,
    Window,
    agree,
    layout_of,
    put,
)
from tilemoe.kernels.experts.formats.dense import compute_dtype
from tilemoe.ops.window import OpenWindow, Places, Senders, from_experts, to_experts
from tilemoe.plan import RoutingPlan, plan_of
from tilemoe.runtime.device import why_no_triton

T = TypeVar("T")
SLACK_ROWS = 1024  # of a window's capacity: few tokens are routed less evenly than many
_ROUNDED = 128  # limits are multiples
_SPARE = 1 / 40  # of the rows that a layer received: room for as many more
_STEPS = 128  # of room, as shares of the pairs: few layouts, so that launches recorded for one serve many layers
_EAGER_FIRST = "all ranks open a window together: call the model once outside of torch.compile before fullgraph=True"
_names = itertools.count()


def why_unsupported(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the group's ranks cannot exchange rows through a window, in a few words; None if they can.

    All ranks must call it. Each tells the others what it sees, so all get the same answer.
    """
    found = all_gather_object(group, (socket.gethostname(), _why_unsupported_here(group, device)))
    if len({host for host, _ in found}) > 1:
        return "symmetric memory needs all ranks on one host"
    return next((reason for _, reason in found if reason is not None), None)


def _why_unsupported_here(group: dist.ProcessGroup, device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return "symmetric memory needs NVIDIA GPUs"
    if (why := why_no_triton(device)) is not None:
        return why
    if dist.get_world_size(group) > MAX_RANKS:
        return f"more than {MAX_RANKS} ranks"
    gpus = range(torch.cuda.device_count())
    if len(gpus) < dist.get_world_size(group):
        return "symmetric memory needs every process to see the GPUs of all ranks"
    if not all(torch.cuda.can_device_access_peer(a, b) for a in gpus for b in gpus if a != b):
        return "symmetric memory needs GPUs that read each other's memory"
    return None


def all_gather_object(group: dist.ProcessGroup, mine: T) -> list[T]:
    """All-gather of an object: each rank's, in rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


# Memory that all ranks of a group can read: ((this rank's, what keeps the others'), the addresses (W) in this process).
Memory = tuple[tuple[Tensor, Any], list[int]]


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, size: int) -> Memory:
    """``size`` bytes of PyTorch's symmetric memory, with a header of zeros. RuntimeError on all ranks if one has no
    room.
    """
    torch.cuda.empty_cache()  # it is not from the caching allocator, which may hold all free memory
    memory, problem = None, None
    try:
        memory = symm_mem.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        problem = (str(error).splitlines() or ["no reason given"])[0]
    problems = all_gather_object(group, problem)
    if memory is None or any(problems):
        rank, found = next((rank, found) for rank, found in enumerate(problems) if found)
        raise RuntimeError(
            f"rank {rank} of those that share experts has no {size} bytes of symmetric memory for what it sends: "
            f"{found}; take smaller batches, or exchange='collective' (--parallel.exchange collective)"
        )
    memory[:HEADER_BYTES].zero_()
    handle = symm_mem.rendezvous(memory, group)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # all flags are 0 before anybody sets one
    return (memory, handle), list(handle.buffer_ptrs)


class SentByWindow(NamedTuple):
    """What `combine` needs of a `dispatch`."""

    places: Places
    precision: str
    window: OpenWindow

    def combine(self, o: Tensor) -> Tensor:
        """o (M_max, d) -> (T, d): each token's sum over the ranks that it was sent to, in fp32 or better, in rank
        order.
        """
        total: Tensor = from_experts(o, None, *self.places, self.precision, self.window)[0]
        return total


class Windows:
    """The window of a group of ranks that all ``layers`` of a model share, and the larger ones that replace it.

    capacity: the rows that a rank can receive in a layer of which nothing is known, as a share of the most pairs that
    one sends, plus `SLACK_ROWS`. max_tokens: for which there is room from the start, where some rank will have more
    than any at first.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        layers: Sequence[LayerRoom],
        allocate: Callable[[dist.ProcessGroup, torch.device, int], Memory] = symmetric_memory,
        capacity: float = 1.5,
        keep_received: bool = False,
        max_tokens: int = 0,
    ) -> None:
        self._keep_received, self._max_tokens, self.is_watched = keep_received, max_tokens, False
        self._group, self._device, self._allocate, self._capacity = group, device, allocate, capacity
        self._layers, self._usual = layers, 0  # the room of a layer of which nothing is known
        self.here, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._window: OpenWindow | None = None
        self._captured: list[OpenWindow] = []  # replaced since, but graphs have their addresses
        self._limits = Limits(0, 0, 0, 1, 0)
        self._alarm = torch.zeros(2, dtype=torch.int32).numpy()

    def with_room(self, tokens: int, pairs: int, score_words: int, row_bytes: int) -> OpenWindow:
        """A window for these: T, P, and the sizes of a score and of a row, which are the same on all ranks.

        ValueError: this rank has more tokens or pairs than ever, and another has not. It has no room for them then.
        """
        limits = self._limits
        grows = score_words > limits.score_words or row_bytes > limits.row_bytes  # on all ranks, as they have one model
        if self._window is not None and not grows and (tokens > limits.tokens or pairs > limits.pairs):
            grows = self._do_all_grow(tokens, pairs)
            if not grows:
                raise ValueError(
                    f"this process has {tokens} tokens, of {pairs} pairs, where those that share its experts have room "
                    f"for {limits.tokens} and {limits.pairs}, and not all others have more than that; pass "
                    "max_tokens=, the most of any process, or exchange='collective', to expert_parallel"
                )
        if self._window is None or grows:
            rows, _, layer = self.overflow().tolist()
            self._open(Limits(tokens, pairs, 0, score_words, row_bytes))
            self.overflow()[0], self.overflow()[2] = rows, layer  # of a window that had no room for them
            self._alarm[0] = rows
        assert self._window is not None, "just opened"
        return self._window

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor, precision: str, room: LayerRoom) -> Dispatched:
        """See `Dispatcher`. precision: see `Sent`. room: of this layer."""
        if not self.is_watched and not torch.compiler.is_compiling() and self._alarm.any():
            self.check()
        s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype))).contiguous()
        row_bytes = x.element_size() * x.shape[1]
        window = self.with_room(plan.num_tokens, plan.num_pairs, s.element_size() // 4, row_bytes)
        if room.rows == 0:
            self._begin()
        rows = room.rows if torch.is_grad_enabled() else self.rows  # what is not saved may be larger
        arrays = (plan.row_of_pair, plan.pair_of_row, plan.pair_start_of_token, plan.row_start_of_expert)
        received, s, *rest = to_experts(x, s, *arrays, room.index, rows, precision, window)
        node = None if torch.compiler.is_compiling() or self._keep_received else received.grad_fn
        peers = Senders(node, precision, window)
        here = plan_of(tuple(rest[:5]), received.shape[0], counted_rows=rest[5], peers=peers)
        return Dispatched(received, here, s, SentByWindow(Places(*rest[6:]), precision, window))

    @property
    def rows(self) -> int:
        return self._limits.capacity

    def overflow(self) -> Tensor:
        """See `Capacity`."""
        if self._window is None:
            return torch.zeros(3, dtype=torch.int32, device=self._device)
        return self._window.view.state[NEEDED_ROWS.value : NEEDED_LAYER.value + 1]

    def check(self) -> None:
        """ValueError if the output of some layer is NaN since the last check, because rows did not fit; a host sync."""
        rows, tokens, layer = self.overflow().tolist()
        if rows or tokens:
            self._clear()
            room = self._limits.tokens
            raise ValueError(
                f"a process had {tokens} tokens, and those that share its experts have room for {room}"
                if tokens
                else f"a process would have received {rows} rows in layer {layer}, more than it has room for: outputs "
                "of that step are NaN; take fewer tokens, or exchange='collective' (--parallel.exchange collective)"
            )

    def grow(self, rows: int, layer: int | None = None) -> None:
        """Room for ``rows`` pairs and an eighth more, or for all that there are: a larger window, if this one is too
        small. layer: that has it; None: all have. All ranks must call it. RuntimeError: they have no memory for it.
        """
        if self._window is None:
            return  # there is room for the first batch, whatever it is
        self._clear()
        wanted = self._at_most_all(_rounded(rows + rows // 8))
        self._widen(wanted)
        if layer is None:
            self._usual = max(self._usual, wanted)
        for each in self._layers if layer is None else [self._layers[layer]]:
            each.rows = max(each.rows, wanted)

    def forget(self) -> None:
        """See `Capacity`."""
        for layer in self._layers:
            layer.rows = max(layer.rows, self._usual)

    def learn(self, rows: Sequence[int], most: int) -> None:
        """See `Capacity`."""
        self._widen(self._room_for(most))
        for layer, own in zip(self._layers, rows, strict=True):
            layer.rows = min(self._room_for(own), self.rows)

    def _room_for(self, rows: int) -> int:
        step = _rounded(max(1, self._limits.pairs // _STEPS))
        return self._at_most_all(-(-int(rows * (1 + _SPARE)) // step) * step)

    def _at_most_all(self, rows: int) -> int:
        """A room that is not empty, and not for more than all pairs of all ranks."""
        return max(1, min(rows, _rounded(self._limits.pairs * self.ranks)))

    def _widen(self, rows: int) -> None:
        """Open a window for so many, if they are too many for this one."""
        if rows > self.rows:
            self._open(self._limits._replace(capacity=rows))

    @torch.compiler.disable(reason=_EAGER_FIRST)
    @torch.inference_mode(False)  # what is made here outlives the call that needs it first
    def _begin(self) -> None:
        """For layers of which nothing is known."""
        for index, layer in enumerate(self._layers):
            if layer.rows == 0:
                layer.rows = self._usual
                layer.index = torch.tensor([index], dtype=torch.int32, device=self._device)

    @torch.compiler.disable(reason=_EAGER_FIRST)
    @torch.inference_mode(False)
    def _open(self, more: Limits) -> None:
        """A window for the largest of these limits, of those so far, and of the other ranks'."""
        asked = all_gather_object(self._group, tuple(map(max, more, self._limits)))
        limits = Limits(*(max(each) for each in zip(*asked, strict=True)))
        if limits.tokens > self._limits.tokens:  # and the next batches may have still more
            pairs_per_token = -(-limits.pairs // limits.tokens)
            limits = limits._replace(tokens=max(limits.tokens + limits.tokens // 4, self._max_tokens))
            limits = limits._replace(pairs=max(limits.pairs, limits.tokens * pairs_per_token))
        tokens, pairs = _rounded(limits.tokens), _rounded(limits.pairs)
        usual = _rounded(min(int(limits.pairs * self._capacity) + SLACK_ROWS, limits.pairs * self.ranks))
        if pairs > self._limits.pairs:  # what layers received of fewer says nothing
            self._usual = max(self._usual, usual)
            for layer in self._layers:
                layer.rows = 0
        capacity = max(min(limits.capacity, _rounded(pairs * self.ranks)), self._usual)
        limits = limits._replace(tokens=tokens, pairs=pairs, capacity=capacity)
        layout = layout_of(limits, self.ranks)
        memory, addresses = self._allocate(self._group, self._device, layout.bytes)
        state = torch.zeros(STATE, dtype=torch.int32)
        state[TOKENS.value : RESULTS.value + 1] = -1  # no exchange has used a region
        alarm = torch.zeros(2, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._alarm = alarm.numpy()
        tensors = (torch.tensor(addresses, dtype=torch.int64).to(self._device), state.to(self._device), alarm)
        view = Window(*tensors, self.here, limits, layout)
        self._limits = limits
        if self._window is not None and self._window.is_captured:
            self._captured.append(self._window)
        self._window = OpenWindow(f"{self._group.group_name}/{next(_names)}", view, memory)
        self._begin()

    @torch.compiler.disable(reason=_EAGER_FIRST)
    def _do_all_grow(self, tokens: int, pairs: int) -> bool:
        """Whether all ranks have more tokens or pairs than there is room for: an exchange in place of the layer's
        own.
        """
        assert self._window is not None, "it has no room for them"
        view = self._window.view
        index = torch.zeros((view.layout.tokens - view.layout.sizes) // 4, dtype=torch.int32)
        index[2 * self.ranks : 2 * self.ranks + 2] = torch.tensor([tokens, pairs])
        put(view, view.state.new_empty(0, 1), TOKENS, index.to(self._device), room=self.rows)
        _, counts, _ = agree(view, view.state)
        return int(counts[3]) == self.ranks

    def _clear(self) -> None:
        """Forget what did not fit."""
        self.overflow().zero_()
        self._alarm[:] = 0


def _rounded(count: int) -> int:
    return -(-count // _ROUNDED) * _ROUNDED
