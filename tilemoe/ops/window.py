"""Operators that send tokens to their experts and results back, through a window of memory that all ranks read.

T tokens · W ranks · P pairs · M_max, Q_max the most tokens and pairs that this rank receives in a layer · e experts of
a rank · d model width

Each operator is one exchange (`tilemoe.kernels.expert_parallel.triton_window`); all ranks run the same ones in the same
order, on one stream or on several. The host reads no value, so they may be part of a CUDA graph or of a graph of
torch.compile.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor

from tilemoe.kernels.choose import choose_expert_parallel, choose_packing
from tilemoe.kernels.expert_parallel import triton_window as kernels
from tilemoe.kernels.expert_parallel.torch import Routed
from tilemoe.runtime.operator import Arguments, Operator
from tilemoe.runtime.precompile import active
from tilemoe.runtime.tensors import PLAIN


class OpenWindow:
    """An open window. Operators pass its name, since a schema of torch.library takes no objects.

    The experts may write their results straight into its memory. The window lends that memory once after each exchange
    of tokens, unless it still holds results that have not been put. This is safe: by then all ranks have entered a
    later exchange, so none still reads the last results.
    """

    def __init__(self, name: str, view: kernels.Window, memory: Any) -> None:
        """memory: (this rank's memory, an object that keeps the other ranks' memory alive)."""
        self.name, self.view, self._memory = name, view, memory
        self._stream: torch.cuda.Stream | None = None  # the last exchange's
        self._can_lend = False
        self._lent: ReferenceType[Tensor] | None = None
        self.has_results = False  # whether the current exchange's results were computed here
        self.is_captured = False  # whether a CUDA graph uses it
        _OPEN[name] = self

    def lend(self, like: Tensor) -> Tensor | None:
        """The window's memory for results of ``like``'s shape and dtype; None if it is not free."""
        if not self._can_lend:
            return None
        begin, stride = self.view.layout.results // like.element_size(), (like.shape[1], 1)
        lent = like.new_empty(0).set_(self._memory[0].untyped_storage(), begin, like.shape, stride)
        self._can_lend, self._lent = False, ref(lent)
        return lent

    def begin(self, rows: Tensor, puts_results: bool) -> bool:
        """Begin an exchange of ``rows``. Returns whether they are results that were computed in the window's memory."""
        self.follow()
        if self.has_results and not puts_results:
            self._lent = None  # they have been put
        self._can_lend = not puts_results and (self._lent is None or self._lent() is None)
        self.has_results = puts_results and self._lent is not None and rows is self._lent()
        if puts_results and not self.has_results:
            own = self._memory[0].data_ptr() + self.view.layout.results
            assert rows.data_ptr() != own, "other results have been put there since"
            self._lent = None
        return self.has_results

    def follow(self) -> None:
        """Make the current stream wait for the last exchange's: exchanges must not overtake each other.

        A graph being captured must not wait for a stream outside it: there, and at a replay, the caller must wait.
        """
        if not self.view.state.is_cuda:
            return
        if torch.cuda.is_current_stream_capturing():
            self.is_captured = True
            return
        stream = torch.cuda.current_stream(self.view.state.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


_OPEN: WeakValueDictionary[str, OpenWindow] = WeakValueDictionary()


class Places(NamedTuple):
    """Where one layer's first exchange placed its tokens and pairs, for the exchanges after it."""

    agreed: Tensor
    counts: Tensor
    token_of_received: Tensor
    copy_of_token: Tensor
    position_of_pair: Tensor


class _WindowArguments(Arguments):
    """Converts (..., precision, window) to a schema's arguments and back: the window becomes its name."""

    def __init__(self, puts_results: bool) -> None:
        self._puts_results = puts_results

    def operands(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        *given, window = args
        view, is_traced = window.view, torch.compiler.is_compiling() or type(args[0]) not in PLAIN
        is_there = not is_traced and active() is None and window.begin(args[0], self._puts_results)
        return (*given, is_there, view.addresses, view.state, view.alarm, view.here, view.limits)

    def flatten(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:-1], args[-1].name)

    def unflatten(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*flat[:-1], _OPEN[flat[-1]])


def _to_experts(
    x: Tensor,
    scores: Tensor,
    row_of_pair: Tensor,
    pair_of_row: Tensor,
    pair_start_of_token: Tensor | None,
    row_start_of_expert: Tensor,
    layer: Tensor,
    room: int,
    precision: str,
    window: OpenWindow,
) -> tuple[Tensor, ...]:
    """received (M_max, d), scores (Q_max), the plan's five arrays, rows_per_expert, and the `Places`.

    layer (1,): the layer's number, which is stored if its rows do not fit. room: Q_max.
    """
    view, tokens = window.view, x.shape[0]
    routed = Routed(row_of_pair, pair_of_row, pair_start_of_token, row_start_of_expert, tokens, view.ranks)
    rows = _as_sent(x, precision)
    index, sizes, token_of_copy, words = _index_of(view, scores, tokens, row_of_pair.shape[0])
    pairs, experts = row_of_pair.shape[0], row_start_of_expert.shape[0] - 1
    steps = choose_expert_parallel(x.device, tokens, pairs, experts, view.ranks).impl
    before = steps.count_sent(routed, sizes)
    copy_of_token, position_of_pair = steps.place_sent(scores, sizes, before, token_of_copy, words, routed)
    kernels.put(view, rows, kernels.TOKENS, index, room=room)
    agreed, counts, came = kernels.agree(view, layer)
    *plan, rows_per_expert, s, token_of_received = kernels.plan_pulled(
        view, scores, agreed, counts, came, routed.experts_per_rank, room
    )
    received = _as_given(kernels.pull_rows(view, rows, agreed, counts, token_of_received), x.dtype, precision)
    return (received, s, *plan, rows_per_expert, agreed, counts, token_of_received, copy_of_token, position_of_pair)


def _index_of(view: kernels.Window, scores: Tensor, tokens: int, pairs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(the whole index, int32; then views of its parts: sizes (W, 2), token_of_copy (T W), words (P, .))."""
    layout, ranks, width = view.layout, view.ranks, 1 + scores.element_size() // 4
    index = scores.new_zeros((layout.tokens - layout.sizes) // 4, dtype=torch.int32)
    copies, words = (layout.copies - layout.sizes) // 4, (layout.words - layout.sizes) // 4
    return (
        index,
        index[: 2 * ranks].view(ranks, 2),
        index[copies : copies + tokens * ranks],
        index[words : words + pairs * width].view(pairs, width),
    )


def _to_experts_fake(
    x: Tensor, scores: Tensor, row_of_pair: Tensor, pair_of_row: Tensor, start: Any, row_start_of_expert: Tensor,
    layer: Tensor, room: int, precision: str, window: OpenWindow,
) -> tuple[Tensor, ...]:  # fmt: skip
    ranks, most = window.view.ranks, kernels.most_received(window.view.limits, window.view.ranks, room)
    experts = (row_start_of_expert.shape[0] - 1) // ranks
    plan = (room, room, room, most + 1, experts + 1, experts)
    places = (kernels.AGREED * ranks, 4, most, x.shape[0] * ranks, row_of_pair.shape[0])
    lengths = (*plan, *places)
    indices = (row_of_pair.new_empty(length) for length in lengths)
    return (x.new_empty(most, x.shape[1]), scores.new_empty(room), *indices)


def _save_to_experts(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, ctx.precision, ctx.window = args
    ctx.save_for_backward(args[0], *output[-len(Places._fields) :])
    ctx.mark_non_differentiable(*output[2:])


def saved_by(node: Any) -> tuple[Tensor, ...]:
    """x (T, d) and `Places` that a call of `to_experts` saved, kept since checkpointing returns saved tensors once."""
    if not hasattr(node, "read"):
        node.read = node.saved_tensors
    return tuple(node.read)


class Senders(NamedTuple):
    """The `Peers` that sent what a call of `to_experts` received. node: the call's autograd node; None: x is saved."""

    node: Any
    precision: str
    window: OpenWindow

    def keep(self, x: Tensor) -> bool:
        """False if hooks, such as checkpointing's, decide when saved tensors are freed."""
        is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return self.node is not None and x.grad_fn is self.node and not is_hooked

    def again(self) -> Tensor:
        x, *places = saved_by(self.node)
        received: Tensor = to_experts_again(x, *places, self.precision, self.window)
        return received

    def lend(self, like: Tensor) -> Tensor | None:
        return self.window.lend(like)


def _to_experts_backward(ctx: Any, dx: Tensor, ds: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needs_x, needs_scores = ctx.needs_input_grad[:2]
    dx_home, ds_home = from_experts(dx.contiguous(), ds.contiguous(), *saved_by(ctx)[1:], ctx.precision, ctx.window)
    del ctx.read
    return dx_home if needs_x else None, ds_home if needs_scores else None


def _from_experts(rows: Tensor, ds: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
    """(T, d): each token's sum of o or dx (M_max, d) over the ranks that it was sent to; and the scores' gradients (P,)
    from those of the received scores, ds (Q_max); None without ds.
    """
    places, window = Places(*rest[:-2]), rest[-1].view
    kernels.put(window, None if rest[-1].has_results else rows, kernels.RESULTS, ds, places.counts)
    sums = kernels.pull_sums(window, rows, places.agreed, places.counts, places.copy_of_token)
    return sums, None if ds is None else kernels.pull_scores(window, ds, places.agreed, places.position_of_pair)


def _from_experts_fake(rows: Tensor, ds: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
    places, ranks = Places(*rest[:-2]), rest[-1].view.ranks
    sums = rows.new_empty(places.copy_of_token.shape[0] // ranks, rows.shape[1])
    return sums, None if ds is None else ds.new_empty(places.position_of_pair.shape[0])


def _save_from_experts(ctx: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
    _, ds, *places, ctx.precision, ctx.window = args
    ctx.is_backward = ds is not None
    ctx.save_for_backward(*places)


def _from_experts_backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if ctx.is_backward:
        raise RuntimeError(_ONCE)
    return (to_experts_again(do.contiguous(), *ctx.saved_tensors, ctx.precision, ctx.window),)


def _to_experts_again(x: Tensor, *rest: Any) -> Tensor:
    """x or do (T, d) -> (M_max, d): the rows of the tokens at this rank's experts."""
    *places, precision, window = rest
    at, rows = Places(*places), _as_sent(x, precision)
    kernels.put(window.view, rows, kernels.TOKENS)
    pulled = kernels.pull_rows(window.view, rows, at.agreed, at.counts, at.token_of_received)
    return _as_given(pulled, x.dtype, precision)


def _to_experts_again_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(Places(*rest[:-2]).token_of_received.shape[0], x.shape[1])


def _as_sent(rows: Tensor, precision: str) -> Tensor:
    """x or do (T, d) as sent: quantised and packed for fp8, else unchanged."""
    if precision == "fp8":
        return choose_packing(rows.device, rows.dtype).impl.pack_rows(rows)
    return rows.contiguous()


def _as_given(arrived: Tensor, dtype: torch.dtype, precision: str) -> Tensor:
    """The received rows (M_max, d) in ``dtype``: unpacked for fp8, else unchanged."""
    return choose_packing(arrived.device, dtype).impl.unpack_rows(arrived, dtype) if precision == "fp8" else arrived


_PLACES = "Tensor agreed, Tensor counts, Tensor token_of_received, Tensor copy_of_token, Tensor position_of_pair"
_INDICES = ", ".join(["Tensor"] * 11)
_ONCE = "expert parallelism is differentiable once: take the first gradient without create_graph=True"
_puts_tokens = partial(Operator, arguments=_WindowArguments(puts_results=False), compiles_first=False)
to_experts = _puts_tokens(
    "to_experts",
    _to_experts,
    "(Tensor x, Tensor scores, Tensor row_of_pair, Tensor pair_of_row, Tensor? pair_start_of_token, "
    "Tensor row_start_of_expert, Tensor layer, SymInt room, str precision, str window) -> "
    f"(Tensor, Tensor, {_INDICES})",
    _to_experts_fake,
)
from_experts = Operator(
    "from_experts",
    _from_experts,
    f"(Tensor rows, Tensor? ds, {_PLACES}, str precision, str window) -> (Tensor, Tensor)",
    _from_experts_fake,
    _WindowArguments(puts_results=True),
    compiles_first=False,
)
to_experts_again = _puts_tokens(
    "to_experts_again",
    _to_experts_again,
    f"(Tensor x, {_PLACES}, str precision, str window) -> Tensor",
    _to_experts_again_fake,
)
to_experts.register_autograd(_to_experts_backward, _save_to_experts)
from_experts.register_autograd(_from_experts_backward, _save_from_experts)
to_experts_again.refuse_autograd(_ONCE)
