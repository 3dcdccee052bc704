"""Windows in symmetric memory. All ranks open one together, with room for what a step needs, and replace it by a larger
one if a step needs more.

W ranks · T tokens, P pairs of this rank · Q pairs that it receives

A window's room is fixed while it is open (`Limits`), a layer's room within a step (`LayerRoom`); only the device knows
how many rows arrive. If they do not fit, the layer's output is NaN on every rank, and the window's state keeps the
number of rows until `Windows.check` reads it.
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
SLACK_ROWS = 1024  # added to a window's capacity: few tokens are routed less evenly than many
_ROUNDED = 128  # limits are rounded up to multiples of this
_SPARE = 1 / 40  # a layer's spare room, as a share of the rows that it received
_STEPS = 128  # a layer's room is in steps of pairs / 128: few layouts, so that recorded launches serve many layers
_EAGER_FIRST = "torch.compile cannot open the exchange's window; call the model once uncompiled before fullgraph=True"
_names = itertools.count()


def why_unsupported(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the group's ranks cannot exchange rows through a window, in a few words; None if they can.

    All ranks must call it. They all-gather their own answers, so all get the same one.
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
    """The objects ``mine`` of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


# Memory that all ranks of a group can read: ((this rank's, what keeps the others' alive), W addresses in this process).
Memory = tuple[tuple[Tensor, Any], list[int]]


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, size: int) -> Memory:
    """``size`` bytes of PyTorch's symmetric memory, with a header of zeros. RuntimeError on all ranks if any rank lacks
    memory.
    """
    torch.cuda.empty_cache()  # the caching allocator may hold all free memory, and does not serve this
    memory, problem = None, None
    try:
        memory = symm_mem.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        problem = (str(error).splitlines() or ["no reason given"])[0]
    problems = all_gather_object(group, problem)
    if memory is None or any(problems):
        rank, found = next((rank, found) for rank, found in enumerate(problems) if found)
        raise RuntimeError(
            f"expert-parallel rank {rank} cannot allocate {size} bytes of symmetric memory: "
            f"{found}; take smaller batches, or exchange='collective' (--parallel.exchange collective)"
        )
    memory[:HEADER_BYTES].zero_()
    handle = symm_mem.rendezvous(memory, group)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # all flags must be 0 before any rank sets one
    return (memory, handle), list(handle.buffer_ptrs)


class SentByWindow(NamedTuple):
    """What `combine` needs from a `Windows.dispatch`."""

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
    """The window that a group of ranks shares for all ``layers`` of a model, and the larger ones that replace it.

    capacity: a new layer's room for received rows is this times the most pairs that a rank sends, plus `SLACK_ROWS`.
    max_tokens: room for this many tokens per rank from the start, in case some rank will later have more than any rank
    has at first.
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
        self._layers, self._usual = layers, 0  # a new layer's room
        self.here, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._window: OpenWindow | None = None
        self._captured: list[OpenWindow] = []  # replaced windows whose addresses CUDA graphs use
        self._limits = Limits(0, 0, 0, 1, 0)
        self._alarm = torch.zeros(2, dtype=torch.int32).numpy()

    def with_room(self, tokens: int, pairs: int, score_words: int, row_bytes: int) -> OpenWindow:
        """A window with room for T tokens, P pairs, and scores and rows of these sizes, which are equal on all ranks.

        ValueError: this rank has more tokens or pairs than fit, but another rank does not: then no window grows.
        """
        limits = self._limits
        grows = score_words > limits.score_words or row_bytes > limits.row_bytes  # on all ranks alike
        if self._window is not None and not grows and (tokens > limits.tokens or pairs > limits.pairs):
            grows = self._do_all_grow(tokens, pairs)
            if not grows:
                raise ValueError(
                    f"this process has {tokens} tokens and {pairs} pairs, but its expert-parallel group's window holds "
                    f"{limits.tokens} and {limits.pairs}, and only grows if all processes have more; pass max_tokens=, "
                    "the most of any process, or exchange='collective' to expert_parallel"
                )
        if self._window is None or grows:
            rows, _, layer = self.overflow().tolist()
            self._open(Limits(tokens, pairs, 0, score_words, row_bytes))
            self.overflow()[0], self.overflow()[2] = rows, layer  # from the window that had no room for them
            self._alarm[0] = rows
        assert self._window is not None, "just opened"
        return self._window

    def dispatch(self, x: Tensor, plan: RoutingPlan, scores: Tensor, precision: str, room: LayerRoom) -> Dispatched:
        """See `Dispatcher`. precision: "bf16" sends x and do in their dtype, "fp8" in e4m3. room: this layer's."""
        if not self.is_watched and not torch.compiler.is_compiling() and self._alarm.any():
            self.check()
        s = scores.reshape(-1).to(torch.promote_types(scores.dtype, compute_dtype(x.dtype))).contiguous()
        row_bytes = x.element_size() * x.shape[1]
        window = self.with_room(plan.num_tokens, plan.num_pairs, s.element_size() // 4, row_bytes)
        if room.rows == 0:
            self._begin()
        rows = room.rows if torch.is_grad_enabled() else self.rows  # what is not saved may take all room
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
        """ValueError if, since the last check, a layer's output is NaN because rows did not fit. A host sync."""
        rows, tokens, layer = self.overflow().tolist()
        if rows or tokens:
            self._clear()
            room = self._limits.tokens
            raise ValueError(
                f"a process had {tokens} tokens, but its expert-parallel group's window holds {room}"
                if tokens
                else f"a process would have received {rows} rows in layer {layer}, more than it has room for: outputs "
                "of that step are NaN; take fewer tokens, or exchange='collective' (--parallel.exchange collective)"
            )

    def grow(self, rows: int, layer: int | None = None) -> None:
        """Make room for ``rows`` pairs and an eighth more, at most for all pairs of all ranks; opens a larger window if
        needed. layer: the layer that gets the room; None: all. All ranks must call it. RuntimeError: no memory.
        """
        if self._window is None:
            return  # the first window fits the first batch
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
        """``rows``, but at least 1 and at most all pairs of all ranks."""
        return max(1, min(rows, _rounded(self._limits.pairs * self.ranks)))

    def _widen(self, rows: int) -> None:
        """Open a window with room for ``rows``, if this one is too small."""
        if rows > self.rows:
            self._open(self._limits._replace(capacity=rows))

    @torch.compiler.disable(reason=_EAGER_FIRST)
    @torch.inference_mode(False)  # tensors made here outlive the call
    def _begin(self) -> None:
        """Give new layers their room and their number."""
        for index, layer in enumerate(self._layers):
            if layer.rows == 0:
                layer.rows = self._usual
                layer.index = torch.tensor([index], dtype=torch.int32, device=self._device)

    @torch.compiler.disable(reason=_EAGER_FIRST)
    @torch.inference_mode(False)
    def _open(self, more: Limits) -> None:
        """Open a window for the largest of ``more``, the limits so far, and the other ranks' limits."""
        asked = all_gather_object(self._group, tuple(map(max, more, self._limits)))
        limits = Limits(*(max(each) for each in zip(*asked, strict=True)))
        if limits.tokens > self._limits.tokens:  # leave room: later batches may have still more
            pairs_per_token = -(-limits.pairs // limits.tokens)
            limits = limits._replace(tokens=max(limits.tokens + limits.tokens // 4, self._max_tokens))
            limits = limits._replace(pairs=max(limits.pairs, limits.tokens * pairs_per_token))
        tokens, pairs = _rounded(limits.tokens), _rounded(limits.pairs)
        usual = _rounded(min(int(limits.pairs * self._capacity) + SLACK_ROWS, limits.pairs * self.ranks))
        if pairs > self._limits.pairs:  # rows received from fewer pairs predict nothing
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
        """Whether all ranks have more tokens or pairs than there is room for. It makes one exchange in place of the
        layer's own.
        """
        assert self._window is not None, "it has no room for them"
        view = self._window.view
        index = torch.zeros((view.layout.tokens - view.layout.sizes) // 4, dtype=torch.int32)
        index[2 * self.ranks : 2 * self.ranks + 2] = torch.tensor([tokens, pairs])
        put(view, view.state.new_empty(0, 1), TOKENS, index.to(self._device), room=self.rows)
        _, counts, _ = agree(view, view.state)
        return int(counts[3]) == self.ranks

    def _clear(self) -> None:
        """Reset the record of what did not fit."""
        self.overflow().zero_()
        self._alarm[:] = 0


def _rounded(count: int) -> int:
    return -(-count // _ROUNDED) * _ROUNDED
