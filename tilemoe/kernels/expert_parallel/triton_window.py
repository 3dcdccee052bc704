"""Exchanges between GPUs of one host through windows that all of them can read; the host does not know any size.

W ranks · T tokens of this rank · M tokens it receives, of at most M_max · P pairs of this rank · Q pairs it receives,
of at most Q_max, its room in this layer · e experts of a rank · d width of a row

In an exchange each rank puts rows into its own window (`put`), tells the others, and waits until all have put theirs.
Then it pulls from the windows what it needs: tokens to compute (`pull_rows`), or a token's results from all ranks that
computed it, which it sums (`pull_sums`). A layer is two exchanges, one of T input rows and one of M result rows.

A window (`WindowLayout`) has a region for each kind of rows. ``state`` (int32) is private to a rank: the number of the
last exchange, a counter of CTAs, each region's last exchange, how much room was missing (`NEEDED_ROWS`,
`NEEDED_TOKENS`), and in which layer (`NEEDED_LAYER`). Each rank has a room of its own in each layer. It puts its room
with its tokens, so that all ranks know whether the rows of all ranks fit.

Why nothing is overwritten too early: An exchange has a number, the same on all ranks. A rank signals that it has
*entered* exchange i by a kernel that its stream runs after its pulls of all exchanges before i. To put into a region
that exchange j used last, a rank waits until all ranks have entered an exchange after j. Results need no copy if they
are computed in their region after an exchange of tokens later than j, since all ranks have entered that one.
Why every wait ends: A rank enters without waiting. It puts once the others have entered, and then sets *ready*. So each
wait is for a kernel that itself waits, at most, for ranks to enter. Only one CTA waits; the other SMs stay free for
other streams, for example for NCCL's kernels.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.expert_parallel.triton import write_plan
from tilemoe.kernels.plan.triton import experts_of_block, pairs_of_block
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import ceil_div, int32_vectors, launch_of, power_of_two

MAX_RANKS = 16
# Indices of ``state``: the last exchange; CTAs that are done; the last exchange that used each region; missing room.
STATE = 8
LAST, DONE, TOKENS, RESULTS = (tl.constexpr(index) for index in range(4))
NEEDED_ROWS, NEEDED_TOKENS, NEEDED_LAYER = (tl.constexpr(index) for index in range(4, 7))
# Rows of `agreed`, W int32 each. For tokens, then for pairs: how many come from each rank, and the index of the first
# one here. For tokens and pairs: where those for this rank begin on each rank. For tokens and pairs: what to add to
# the index of a copy or a pair sent to a rank to get its index there. The first pair sent to each rank; their number.
AGREED = 10
TOKENS_IN, FIRST_TOKEN_IN, PAIRS_IN, FIRST_PAIR_IN = (tl.constexpr(row) for row in range(4))
TOKENS_THERE, PAIRS_THERE, TOKENS_HOME, PAIRS_HOME = (tl.constexpr(row) for row in range(4, 8))
FIRST_PAIR_OUT, PAIRS_OUT = tl.constexpr(8), tl.constexpr(9)
_FLAG_BYTES = 4
FLAGS = tl.constexpr(MAX_RANKS)  # flags of a kind: the exchange each rank has entered, then the one it is ready for
ROOM = tl.constexpr(2 * MAX_RANKS)  # index after the flags: this rank's room in the last exchange of tokens
HEADER_BYTES = (2 * MAX_RANKS + 1) * _FLAG_BYTES  # bytes of a window before its first region
_CTAS_PER_SM = 4  # for kernels that move rows: remote reads take microseconds, and many must be in flight
_ALIGNMENT = 128
_BLOCK = 4096  # elements that a CTA moves at a time


class Limits(NamedTuple):
    """The limits of a window, the same on all ranks: tokens T_max and pairs P_max of a rank; capacity, the most pairs
    that any rank receives in any layer; score_words, int32 words of the widest score; row_bytes of the widest token.
    """

    tokens: int
    pairs: int
    capacity: int
    score_words: int
    row_bytes: int


class WindowLayout(NamedTuple):
    """Where the regions of a window begin, in bytes; the same on every rank.

    sizes: 2 W + 2 int32, tokens and pairs for each rank, T and P · copies: W T_max int32, `place_sent`'s token_of_copy
    · words: the words of P_max pairs · tokens: rows of T_max tokens · scores: gradients of ``capacity`` scores ·
    results: rows of the most tokens that a rank can receive
    """

    sizes: int
    copies: int
    words: int
    tokens: int
    scores: int
    results: int
    bytes: int


def layout_of(limits: Limits, ranks: int) -> WindowLayout:
    """The smallest layout for these limits."""
    lengths = (
        HEADER_BYTES,
        _FLAG_BYTES * (2 * ranks + 2),
        _FLAG_BYTES * ranks * limits.tokens,
        _FLAG_BYTES * limits.pairs * (limits.score_words + 1),
        limits.tokens * limits.row_bytes,
        _FLAG_BYTES * limits.score_words * limits.capacity,
        most_received(limits, ranks, limits.capacity) * limits.row_bytes,
    )
    return WindowLayout(*accumulate(ceil_div(length, _ALIGNMENT) * _ALIGNMENT for length in lengths))


def most_received(limits: Limits, ranks: int, room: int) -> int:
    """M_max for a ``room`` of Q_max pairs: a rank receives each token at most once, and only with a pair."""
    return min(ranks * limits.tokens, room)


class Window(NamedTuple):
    """A window as kernels see it. addresses (W) int64: of each rank's window, in this process · state (`STATE`) int32 ·
    alarm (2) int32: the missing room as in ``state``, in host memory that the GPU writes.
    """

    addresses: Tensor
    state: Tensor
    alarm: Tensor
    here: int
    limits: Limits
    layout: WindowLayout

    @property
    def ranks(self) -> int:
        return self.addresses.shape[0]


def put(
    window: Window,
    rows: Tensor | None,
    region: tl.constexpr,
    more: Tensor | None = None,
    counts: Tensor | None = None,
    room: int = 0,
) -> None:
    """Launch kernels that put rows, and ``more``, into a region; the stream's later kernels run once all ranks have.

    TOKENS: rows (T, d); in a layer's first exchange also the bytes from ``layout.sizes`` to ``layout.tokens``, as
    int32, and the room. RESULTS: as many of the rows (M_max, d) and scores (Q_max) as `agree`'s counts say. rows None:
    they were computed in the region, after no rank read its old rows.
    """
    device, layout = device_of(window.state), window.layout
    at = (layout.tokens, layout.sizes) if region is TOKENS else (layout.results, layout.scores)
    given = [each for each in (rows, more) if each is not None]
    assert all(each.is_contiguous() for each in given), "moved as they lie"
    moved = max([each.numel() for each in given], default=1)
    grid = max(1, min(ceil_div(moved, _BLOCK), _CTAS_PER_SM * device.multiprocessors))
    lengths = ((0, 0) if rows is None else rows.shape) + (0 if more is None else more.numel(),)
    args = (rows, more, counts, window.addresses, window.state, *lengths, *at, window.here)
    constants = {"REGION": region.value, "RANKS": window.ranks}
    if rows is not None:
        launch_of(enter_kernel, (1,), (window.addresses, window.state, window.here, room), constants, num_warps=1).run()
    launch_of(put_kernel, (grid,), args, {**constants, "BLOCK": _BLOCK}, num_warps=8).run()


def agree(window: Window, layer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """After the put of a layer's first exchange: (agreed (10, W), counts (4,), came (W, 2)), int32.

    counts: M, Q, whether this exchange fails, and how many ranks have more tokens or pairs than the window has room for
    (these send none). The exchange fails if there is such a rank, or if some rank would receive more pairs than its
    room. Then M and Q are 0, and ``state`` keeps the numbers needed and layer (1,). came: tokens and pairs by rank.
    """
    state, ranks, limits = window.state, window.ranks, window.limits
    agreed, counts, came = state.new_empty(AGREED * ranks), state.new_empty(4), state.new_empty(2 * ranks)
    args = (window.addresses, state, layer, window.layout.sizes, limits.tokens, limits.pairs, window.here)
    constants = {"RANKS": ranks, "BLOCK_W": power_of_two(ranks)}
    launch_of(agree_kernel, (1,), (*args, window.alarm, agreed, counts, came), constants, num_warps=1).run()
    return agreed, counts, came


def plan_pulled(
    window: Window, like: Tensor, agreed: Tensor, counts: Tensor, came: Tensor, experts: int, room: int
) -> tuple[Tensor, ...]:
    """The plan of the received pairs, as in `plan_received`, for M_max tokens and a room of Q_max pairs: token_of_row,
    pair_of_row, row_of_pair, pair_start_of_token (M_max + 1), row_start_of_expert, rows_per_expert, the scores (Q_max)
    of ``like``'s dtype; and token_of_received (M_max), each token's index on its own rank.
    """
    state, words = window.state, like.element_size() // 4
    max_tokens, block = most_received(window.limits, window.ranks, room), pairs_of_block(experts)
    blocks = ceil_div(max(room, max_tokens + 1), block)
    lines, block_counts = int32_vectors(state, room * (words + 1), blocks * experts)
    token_of_received, *arrays = (state.new_empty(length) for length in (max_tokens, room, room, room, max_tokens + 1))
    read = (window.addresses, agreed, counts, window.layout.copies, window.layout.words, experts, max_tokens, room)
    constants = {"RANKS": window.ranks, "SCORE_WORDS": words, "BLOCK": block, "BLOCK_E": experts_of_block(experts)}
    args = (*read, lines, token_of_received, *arrays, block_counts)
    launch_of(receive_kernel, (blocks,), args, constants).run()
    lines = lines.view(room, words + 1)
    return (*write_plan(lines, block_counts, came, experts, arrays), token_of_received)


def pull_rows(window: Window, like: Tensor, agreed: Tensor, counts: Tensor, token_of_received: Tensor) -> Tensor:
    """Rows (M_max, d) of ``like``'s width and dtype: the tokens for this rank, and zeros past M."""
    device, width = device_of(like), like.shape[1]
    out = like.new_empty(token_of_received.shape[0], width)
    if out.numel() == 0:
        return out
    columns, sizes = min(power_of_two(width), _BLOCK), (len(out), width, window.layout.tokens, window.here)
    args = (window.addresses, agreed, counts, token_of_received, out, *sizes)
    constants = {"RANKS": window.ranks, "ROWS": max(1, _BLOCK // columns), "BLOCK_D": columns}
    grid = ceil_div(_CTAS_PER_SM * device.multiprocessors, window.ranks) * window.ranks
    launch_of(pull_rows_kernel, (grid,), args, constants, num_warps=4).run()
    return out


def pull_sums(window: Window, like: Tensor, agreed: Tensor, counts: Tensor, copy_of_token: Tensor) -> Tensor:
    """(T, d) of ``like``'s width and dtype: for each token the sum of its results over the ranks, in rank order, in
    fp32 or fp64; NaN if this layer's rows did not fit. copy_of_token (T W): from `place_sent`.
    """
    tokens, width = copy_of_token.shape[0] // window.ranks, like.shape[1]
    out = like.new_empty(tokens, width)
    if out.numel() == 0:
        return out
    device_of(out)
    columns = min(power_of_two(width), _BLOCK // 2)
    args = (window.addresses, agreed, counts, copy_of_token, out, width, window.layout.results)
    constants = {"RANKS": window.ranks, "BLOCK_D": columns}
    launch_of(pull_sums_kernel, (tokens * ceil_div(width, columns),), args, constants, num_warps=4).run()
    return out


def pull_scores(window: Window, like: Tensor, agreed: Tensor, position_of_pair: Tensor) -> Tensor:
    """(P,) of ``like``'s dtype: the gradients of this rank's scores, 0 for pairs that were not sent.

    position_of_pair (P): from `place_sent`.
    """
    pairs = position_of_pair.shape[0]
    out = like.new_zeros(pairs)
    if pairs == 0:
        return out
    device_of(out)
    args = (window.addresses, agreed, position_of_pair, out, pairs, window.layout.scores)
    constants = {"RANKS": window.ranks, "BLOCK": 256}
    launch_of(pull_scores_kernel, (ceil_div(pairs, 256),), args, constants).run()
    return out


@triton.jit
def wait_for(flags, number, here, RANKS: tl.constexpr):
    """Wait until the flags of all other ranks in this window are at least ``number``, by cyclic difference."""
    for rank in tl.static_range(RANKS):
        if rank != here:
            while tl.atomic_add(flags + rank, 0, sem="acquire", scope="sys") - number < 0:
                pass


@triton.jit
def signal_all(addresses, number, here, OFFSET: tl.constexpr, RANKS: tl.constexpr):
    """Set this rank's flag in each other rank's window, at ``OFFSET`` bytes, once all earlier stores are visible."""
    for step in tl.static_range(1, RANKS):
        rank = (here + step) % RANKS
        flags = (tl.load(addresses + rank) + OFFSET).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + here, number, sem="release", scope="sys")


@triton.jit
def region_of(addresses, rank, offset, like):
    """A pointer of ``like``'s type to the region at ``offset`` bytes, a multiple of 16, in a rank's window."""
    address = tl.multiple_of(tl.load(addresses + rank) + offset, 16)
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit
def copy_flat(source, target, length, BLOCK: tl.constexpr):
    """Copy ``length`` elements, divided over all CTAs of the kernel."""
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, length, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < length), mask=at < length)


@triton.jit(do_not_specialize=["here", "room"])
def enter_kernel(addresses, state, here, room, REGION: tl.constexpr, RANKS: tl.constexpr):
    """A single CTA: tell the other ranks that this one enters an exchange, then wait until none still reads the region.
    The room is stored for tokens only; `put_kernel` signals that it is ready.
    """
    signal_all(addresses, tl.load(state + LAST) + 1, here, 0, RANKS)
    flags = tl.load(addresses + here).to(tl.pointer_type(tl.int32))
    wait_for(flags, tl.load(state + REGION) + 1, here, RANKS)
    if REGION == TOKENS:
        tl.store(flags + ROOM, room)


@triton.jit(do_not_specialize=["num_rows", "here"])
def put_kernel(
    rows, more, counts, addresses, state, num_rows, width, num_more, rows_offset, more_offset, here,
    REGION: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows and more into this rank's window. The CTA that ends last signals the other ranks and waits for them."""
    if rows is not None:
        if counts is not None:
            num_rows = tl.minimum(num_rows, tl.load(counts))
        copy_flat(rows, region_of(addresses, here, rows_offset, rows), num_rows.to(tl.int64) * width, BLOCK)
    if more is not None:
        if counts is not None:
            num_more = tl.minimum(num_more, tl.load(counts + 1))
        copy_flat(more, region_of(addresses, here, more_offset, more), num_more.to(tl.int64), BLOCK)
    tl.debug_barrier()
    if tl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        number = tl.load(state + LAST) + 1
        tl.store(state + LAST, number)
        tl.store(state + DONE, 0)
        tl.store(state + REGION, number)
        signal_all(addresses, number, here, 4 * FLAGS, RANKS)
        wait_for(tl.load(addresses + here).to(tl.pointer_type(tl.int32)) + FLAGS, number, here, RANKS)


@triton.jit(do_not_specialize=["max_tokens", "max_pairs", "here"])
def agree_kernel(
    addresses, state, layer, sizes_offset, max_tokens, max_pairs, here, alarm, agreed, counts, came,
    RANKS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """A single CTA. See `agree`."""
    rank = tl.arange(0, BLOCK_W)
    is_rank = rank < RANKS
    address = tl.load(addresses + rank, mask=is_rank, other=0)
    room = tl.load(address.to(tl.pointer_type(tl.int32)) + ROOM, mask=is_rank, other=0)
    base = (address + sizes_offset).to(tl.pointer_type(tl.int32))
    tokens = tl.load(base + 2 * RANKS, mask=is_rank, other=0)
    pairs = tl.load(base + 2 * RANKS + 1, mask=is_rank, other=0)
    exceeds = is_rank & ((tokens > max_tokens) | (pairs > max_pairs))
    over = tl.sum(exceeds.to(tl.int32), axis=0)

    # The W x W numbers of tokens, then of pairs, indexed [source, destination].
    source, to = rank[:, None], rank[None, :]
    inside = (source < RANKS) & (to < RANKS) & (exceeds.to(tl.int32) == 0)[:, None]
    cells = tl.broadcast_to(base[:, None], (BLOCK_W, BLOCK_W)) + 2 * to
    rows = tl.sum(tl.load(cells + 1, mask=inside, other=0), axis=0)
    rows_needed = tl.max(tl.where(rows > room, rows, 0), axis=0)  # over the ranks that lack room
    fails = (rows_needed > 0) | (over > 0)
    # Only the first failure is kept: then outputs are NaN, and all tokens go to the same few experts.
    if (rows_needed > 0) & (tl.load(state + NEEDED_ROWS) == 0):
        tl.store(state + NEEDED_ROWS, rows_needed)
        tl.store(state + NEEDED_LAYER, tl.load(layer))
        tl.store(alarm, rows_needed)
    if over > 0:
        tl.store(alarm + 1, tl.max(tokens, axis=0))
        tl.store(state + NEEDED_TOKENS, tl.maximum(tl.load(state + NEEDED_TOKENS), tl.max(tokens, axis=0)))
    inside = inside & (fails == 0)
    for column in tl.static_range(2):
        between = tl.load(cells + column, mask=inside, other=0)
        of_here_in = tl.sum(tl.where(to == here, between, 0), axis=1)  # [source]: sent here
        of_here_out = tl.sum(tl.where(source == here, between, 0), axis=0)  # [to]: sent from here
        first_in, first_out = tl.cumsum(of_here_in, axis=0) - of_here_in, tl.cumsum(of_here_out, axis=0) - of_here_out
        there = tl.sum(tl.where(to < here, between, 0), axis=1)  # [source]: sent to the ranks before this one
        arrived = tl.sum(tl.where(source < here, between, 0), axis=0)  # [to]: sent by the ranks before this one
        tl.store(came + 2 * rank + column, of_here_in, mask=is_rank)
        tl.store(counts + column, tl.sum(of_here_in, axis=0))
        tl.store(agreed + (TOKENS_IN + 2 * column) * RANKS + rank, of_here_in, mask=is_rank)
        tl.store(agreed + (FIRST_TOKEN_IN + 2 * column) * RANKS + rank, first_in, mask=is_rank)
        tl.store(agreed + (TOKENS_THERE + column) * RANKS + rank, there, mask=is_rank)
        tl.store(agreed + (TOKENS_HOME + column) * RANKS + rank, arrived - first_out, mask=is_rank)
        if column == 1:
            tl.store(agreed + FIRST_PAIR_OUT * RANKS + rank, first_out, mask=is_rank)
            tl.store(agreed + PAIRS_OUT * RANKS + rank, of_here_out, mask=is_rank)
    tl.store(counts + 2, fails.to(tl.int32))
    tl.store(counts + 3, over)


@triton.jit(do_not_specialize=["max_tokens", "capacity"])
def receive_kernel(
    addresses, agreed, counts, copies_offset, words_offset, experts, max_tokens, capacity, lines, token_of_received,
    token_of_row, pair_of_row, row_of_pair, pair_start_of_token, block_counts,
    RANKS: tl.constexpr, SCORE_WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write lines (Q_max, words), the words of the pairs from all ranks; block_counts (B, e), the pairs by block and
    expert; token_of_received (M_max). Clears entries that no pair writes: rows past Q, and the ends of tokens past M.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_tokens, num_pairs = tl.load(counts), tl.load(counts + 1)
    copy = (addresses + at).to(tl.pointer_type(tl.int32))
    word = copy
    for rank in tl.static_range(RANKS):
        first = tl.load(agreed + FIRST_TOKEN_IN * RANKS + rank)
        from_rank = (at >= first) & (at < first + tl.load(agreed + TOKENS_IN * RANKS + rank))
        there = region_of(addresses, rank, copies_offset, copy) + tl.load(agreed + TOKENS_THERE * RANKS + rank)
        copy = tl.where(from_rank, there + (at - first), copy)
        first = tl.load(agreed + FIRST_PAIR_IN * RANKS + rank)
        from_rank = (at >= first) & (at < first + tl.load(agreed + PAIRS_IN * RANKS + rank))
        there = region_of(addresses, rank, words_offset, word)
        there += tl.load(agreed + PAIRS_THERE * RANKS + rank) * (SCORE_WORDS + 1)
        word = tl.where(from_rank, there + (at - first) * (SCORE_WORDS + 1), word)
    tl.store(token_of_received + at, tl.load(copy, mask=at < num_tokens, other=0), mask=at < max_tokens)
    inside = at < num_pairs
    line = lines + at.to(tl.int64) * (SCORE_WORDS + 1)
    for column in tl.static_range(SCORE_WORDS):
        tl.store(line + column, tl.load(word + column, mask=inside, other=0), mask=inside)
    place = tl.load(word + SCORE_WORDS, mask=inside, other=0)
    tl.store(line + SCORE_WORDS, place, mask=inside)
    bins = tl.arange(0, BLOCK_E)
    count = tl.histogram(place % experts, BLOCK_E, mask=inside)
    tl.store(block_counts + tl.program_id(0).to(tl.int64) * experts + bins, count, mask=bins < experts)
    is_past = (at >= num_pairs) & (at < capacity)
    tl.store(token_of_row + at, 0, mask=is_past)
    tl.store(pair_of_row + at, 0, mask=is_past)
    tl.store(row_of_pair + at, -1, mask=is_past)
    tl.store(pair_start_of_token + at, num_pairs, mask=(at >= num_tokens) & (at <= max_tokens))


@triton.jit(do_not_specialize=["num_out", "here"])
def pull_rows_kernel(
    addresses, agreed, counts, token_of_received, out, num_out, width, tokens_offset, here,
    RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each CTA copies rows from one rank, neighbouring CTAs from different ranks, so that all links are busy. Then it
    writes its share of the zeros past M.
    """
    rank = (here + 1 + tl.program_id(0) % RANKS) % RANKS
    of_rank, each = tl.program_id(0) // RANKS, tl.num_programs(0) // RANKS
    source = region_of(addresses, rank, tokens_offset, out)
    count, first_row = tl.load(agreed + TOKENS_IN * RANKS + rank), tl.load(agreed + FIRST_TOKEN_IN * RANKS + rank)
    for block in range(of_rank, tl.cdiv(count, ROWS), each):
        index = block * ROWS + tl.arange(0, ROWS)
        row = first_row + index
        token = tl.load(token_of_received + row, mask=index < count, other=0).to(tl.int64)
        for first in range(0, width, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            inside = (index < count)[:, None] & (column < width)[None, :]
            value = tl.load(source + token[:, None] * width + column[None, :], mask=inside)
            tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], value, mask=inside)
    for row in range(tl.load(counts).to(tl.int64) + tl.program_id(0), num_out, tl.num_programs(0)):
        for first in range(0, width, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            zeros = tl.zeros((BLOCK_D,), dtype=out.dtype.element_ty)
            tl.store(out + row * width + column, zeros, mask=column < width)


@triton.jit
def pull_sums_kernel(
    addresses, agreed, counts, copy_of_token, out, width, results_offset,
    RANKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Each CTA computes BLOCK_D columns of one token's sum."""
    blocks = tl.cdiv(width, BLOCK_D)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_fp64: tl.constexpr = out.dtype.element_ty == tl.float64
    total = tl.zeros((BLOCK_D,), dtype=tl.float64 if is_fp64 else tl.float32)
    fails = tl.load(counts + 2) > 0
    for rank in tl.static_range(RANKS):
        copy = tl.load(copy_of_token + token * RANKS + rank)
        is_there = (copy >= 0) & (fails == 0)
        row = (copy + tl.load(agreed + TOKENS_HOME * RANKS + rank)).to(tl.int64)
        source = region_of(addresses, rank, results_offset, out) + row * width
        value = tl.load(source + column, mask=is_there & (column < width), other=0.0)
        total += value.to(total.dtype)
    total = tl.where(fails, float("nan"), total)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["num_pairs"])
def pull_scores_kernel(
    addresses, agreed, position_of_pair, out, num_pairs, scores_offset, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each CTA handles a block of the sent pairs, in the order of sending."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    from_there = out + pair
    is_sent = pair < 0
    for rank in tl.static_range(RANKS):
        first = tl.load(agreed + FIRST_PAIR_OUT * RANKS + rank)
        to_rank = (pair >= first) & (pair < first + tl.load(agreed + PAIRS_OUT * RANKS + rank))
        there = region_of(addresses, rank, scores_offset, out) + tl.load(agreed + PAIRS_HOME * RANKS + rank)
        from_there = tl.where(to_rank, there + pair, from_there)
        is_sent = is_sent | to_rank
    position = tl.load(position_of_pair + pair, mask=is_sent, other=0)
    tl.store(out + position, tl.load(from_there, mask=is_sent, other=0.0), mask=is_sent)
