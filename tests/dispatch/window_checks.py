"""What four processes check of windows, which are files that all map: of the protocol, of what does not fit, and of
backwards in any order. The kernels are interpreted; results are those of `Collective`, to the bit.

T tokens of a rank · d hidden_size · n intermediate_size · E experts · K experts per token · W ranks
"""

import importlib.util
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from dispatch_checks import (
    TOKENS,
    D,
    E,
    K,
    experts_of,
    ids_all_on_one_rank,
    ids_of_no_expert_of_the_last_rank,
    ids_spread,
    ids_with_sentinels,
    layer_config,
    make_weights,
    world,
)
from file_window import FileTransports
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import tilemoe
from tilemoe.dispatch import window as windows
from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.dispatch.base import Dispatched
from tilemoe.dispatch.choose import Transports
from tilemoe.dispatch.window import Windows
from tilemoe.kernels.expert_parallel import triton_window as window
from tilemoe.layers.moe import MoE
from tilemoe.ops import window as window_ops
from tilemoe.ops.lora import Adapters, moe_lora
from tilemoe.parallel.expert import divide_experts
from tilemoe.plan import RoutingPlan

CPU = torch.device("cpu")
ALL = (True, True, True, True)  # x, scores, w1 and w2 need gradients
WEIGHTS_ALONE = (False, False, True, True)
LONGEST_PAUSE = 0.003


class Batch(NamedTuple):
    """A rank's."""

    x: Tensor
    plan: RoutingPlan
    scores: Tensor
    do: Tensor


def batch(seed: int, tokens: int = 3, ids_of: Callable[[int, int], Tensor] = ids_spread) -> Batch:
    """Of this rank: values by ``seed``, experts by its number."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    x, do = torch.randn(2, tokens, D, generator=generator)
    return Batch(x, tilemoe.plan_topk(ids_of(rank, tokens), E), torch.rand(tokens, K, generator=generator), do)


def by_files(**options: Any) -> FileTransports:
    return FileTransports(dist.group.WORLD, Path(os.environ["WINDOWS"]), **options)


def windows_of(by: Transports) -> Windows:
    found = by.of(CPU)
    assert isinstance(found, Windows)
    return found


def view_of(by: Transports) -> window.Window:
    found = windows_of(by)._window
    assert found is not None
    return found.view


def forward(by: Transports, given: Batch, needs: tuple[bool, ...] = ALL, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """(o, the leaves that need gradients)"""
    w1, w2, *_ = make_weights(torch.float32).of(experts_of(dist.get_rank()))
    leaves = [t.detach().clone().requires_grad_(n) for t, n in zip((given.x, given.scores, w1, w2), needs, strict=True)]
    dispatcher = AllToAllDispatcher(by, E)
    here = dispatcher.dispatch(leaves[0], given.plan, leaves[1])
    sums = tilemoe.moe(here.x, leaves[2], leaves[3], here.plan, here.scores, **options)
    return dispatcher.combine(sums, here), [leaf for leaf in leaves if leaf.requires_grad]


def backward(made: tuple[Tensor, list[Tensor]], given: Batch, **options: Any) -> list[Tensor]:
    o, leaves = made
    return [o.detach(), *torch.autograd.grad(o, leaves, given.do, **options)]


def step(by: Transports, given: Batch, needs: tuple[bool, ...] = ALL, **options: Any) -> list[Tensor]:
    """o and the gradients that are needed of dx, ds, dw1, dw2."""
    return backward(forward(by, given, needs, **options), given)


def collective() -> Transports:
    return Transports(dist.group.WORLD, "collective")


def expected(given: Batch, needs: tuple[bool, ...] = ALL) -> list[Tensor]:
    return step(collective(), given, needs)


def are_equal(found: list[Tensor], want: list[Tensor]) -> bool:
    """On all ranks."""
    same = all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    everywhere = torch.tensor([int(same)])
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)


@contextmanager
def pauses() -> Iterator[None]:
    """Every change of a counter or flag, and every step of an exchange, comes a random while later."""
    from triton.runtime.interpreter import InterpreterBuilder

    dice = random.Random(dist.get_rank())

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def function_later(*args: Any, **options: Any) -> Any:
            time.sleep(dice.random() * LONGEST_PAUSE)
            return function(*args, **options)

        return function_later

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", late(InterpreterBuilder.create_atomic_rmw))
        for name in ("agree", "plan_pulled", "pull_rows", "pull_sums", "pull_scores"):
            patch.setattr(window, name, late(getattr(window, name)))
        yield


def check_with_pauses() -> None:
    """Few tokens and many, all for one rank, none of a rank or for it; many steps by one window."""
    by, numbers = by_files(), TOKENS * 2
    routings = (ids_spread, ids_all_on_one_rank, ids_of_no_expert_of_the_last_rank, ids_with_sentinels)
    with pauses():
        for turn, ids_of in enumerate(routings):
            given = batch(turn, numbers[turn + dist.get_rank()], ids_of)
            assert are_equal(step(by, given), expected(given)), ids_of


@contextmanager
def one_cta_at_a_time(order: Callable[[list[int]], list[int]]) -> Iterator[None]:
    """Other streams hold all but one place for a CTA: each begins when the one before it, in ``order``, has ended.

    AssertionError in the kernel: it waits for what a CTA of the same kernel is to do, which cannot begin.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    place, update = InterpreterBuilder.set_grid_idx, InterpreterBuilder.create_atomic_rmw
    last_look = None

    def place_in_order(builder: Any, x: int, y: int, z: int) -> None:
        nonlocal last_look
        last_look = None
        place(builder, order([*range(builder.grid_dim[0])])[x], y, z)

    def update_or_fail(builder: Any, kind: Any, pointer: Any, value: Any, *rest: Any) -> Any:
        nonlocal last_look
        address = None if value.data.any() else int(pointer.data.item())
        is_own = any(
            view.state.data_ptr() <= (address or 0) < view.state.data_ptr() + 4 * window.STATE for view in opened()
        )
        assert address is None or not (is_own and address == last_look), "waits for a CTA that cannot begin"
        last_look = address
        return update(builder, kind, pointer, value, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_idx", place_in_order)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", update_or_fail)
        patch.setattr(window, "_BLOCK", 32)  # many CTAs of few elements each
        yield


def opened() -> list[window.Window]:
    """All windows of this process."""
    return [each.view for each in window_ops._OPEN.values()]


def check_one_cta_at_a_time_in_any_order() -> None:
    """The exchange goes on; one that waits for the first CTA's turn stands still where that comes first."""
    from triton.runtime.errors import InterpreterError

    by, given, want = by_files(), batch(1), expected(batch(1))
    seed = dist.get_rank()
    orders: dict[str, Callable[[list[int]], list[int]]] = {
        "first to last": lambda ctas: ctas,
        "last to first": lambda ctas: ctas[::-1],
        "any": lambda ctas: random.Random(seed).sample(ctas, len(ctas)),
    }
    for name, order in orders.items():
        with one_cta_at_a_time(order):
            assert are_equal(step(by, given), want), name
    for name in ("last to first", "first to last"):
        with pytest.MonkeyPatch.context() as patch, one_cta_at_a_time(orders[name]):
            planted(patch, "put_kernel", LAST_CTA, FIRST_CTA_WAITS)
            if name == "last to first":
                assert are_equal(step(by, given), want)
            else:
                with pytest.raises(InterpreterError, match="waits for a CTA that cannot begin"):
                    step(by, given)


def planted(patch: pytest.MonkeyPatch, kernel: str, right: str, wrong: str) -> Any:
    """The kernel is another one, whose module this returns: in its text ``right`` is ``wrong``."""
    text = Path(window.__file__).read_text()
    assert text.count(right) == 1, f"{text.count(right)} times in the kernels: {right}"
    path = Path(os.environ["WINDOWS"]) / f"mutant_{time.monotonic_ns()}_{dist.get_rank()}.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    patch.setattr(window, kernel, getattr(module, kernel))
    return module


def last_is_late(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """The last rank begins this step half a second later."""
    function = getattr(owner, name)

    def late(*args: Any, **options: Any) -> Any:
        if dist.get_rank() == world() - 1:
            time.sleep(0.5)
        return function(*args, **options)

    patch.setattr(owner, name, late)


ENTERED = "    wait_for(flags, tl.load(state + REGION) + 1, here, RANKS)\n"
COPIES = "        copy_flat(rows, region_of(addresses, here, rows_offset, rows)"
READY = "        signal_all(addresses, tl.load(state + LAST) + 1, here, 4 * FLAGS, RANKS)\n"
LAST_CTA = '    if tl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:\n'
FIRST_CTA_WAITS = """    tl.atomic_add(state + DONE, 1, sem="acq_rel", scope="gpu")
    if tl.program_id(0) == 0:
        while tl.atomic_add(state + DONE, 0, sem="acquire", scope="gpu") < tl.num_programs(0):
            pass
"""
FAULTS: dict[str, tuple[str, str, str]] = {
    "nothing": ("put_kernel", COPIES, COPIES),
    "ready too early": ("put_kernel", COPIES, f"{READY}{COPIES}"),
    "a flag not waited for": ("put_kernel", "+ FLAGS, number, here, RANKS)", "+ FLAGS, number, here, RANKS - 1)"),
    "a count one off": ("agree_kernel", "arrived - first_out, mask", "arrived - first_out + 1, mask"),
}


def check_faults_of_an_exchange_are_found() -> None:
    """By the comparison with the collective, where the last rank is late to copy its rows."""
    given, other = batch(1), batch(2)
    for name, fault in FAULTS.items():
        by = by_files()
        assert are_equal(step(by, given), expected(given)), "before"
        with pytest.MonkeyPatch.context() as patch:
            module = planted(patch, *fault)
            last_is_late(module, "copy_flat", patch)
            assert are_equal(step(by, other), expected(other)) == (name == "nothing"), name


def check_a_region_used_again_too_early_is_found() -> None:
    """Where x and the scores need no gradient, tokens follow that of o; the last rank pulls those late."""
    given, other = batch(1), batch(2)
    for is_right in (True, False):
        by = by_files(keep_received=True)
        assert are_equal(step(by, given), expected(given)), "before"
        with pytest.MonkeyPatch.context() as patch:
            planted(patch, "enter_kernel", ENTERED, ENTERED if is_right else "")
            made = forward(by, other, WEIGHTS_ALONE)
            with pytest.MonkeyPatch.context() as late:
                last_is_late(window, "pull_rows", late)
                found = backward(made, other)
            made = forward(by, given)
            assert are_equal(found, expected(other, WEIGHTS_ALONE)) == is_right
            assert are_equal(backward(made, given), expected(given)) or not is_right


def results_of(here: Dispatched) -> Tensor:
    w1, w2, *_ = make_weights(torch.float32).of(experts_of(dist.get_rank()))
    return tilemoe.moe(here.x, w1, w2, here.plan, here.scores)


def check_results_are_computed_where_they_are_read() -> None:
    """o and dx, but not while the last rank, which is late, may still read the results before them."""
    by, batches, moved, put = by_files(), (batch(1), batch(2)), [], window.put
    want = [expected(each) for each in batches]

    def put_and_note(view: window.Window, rows: Tensor | None, *args: Any, **options: Any) -> None:
        moved.append(rows is not None)
        put(view, rows, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "put", put_and_note)
        assert are_equal(step(by, batches[0]), want[0])
        assert moved == [True, False, True, True, False], "x, o, do, x again, dx"
        for is_right in (True, False):
            if not is_right:
                always = property(lambda own: True, lambda own, value: None)
                patch.setattr(window_ops.OpenWindow, "_can_lend", always, raising=False)
            first, second = (AllToAllDispatcher(by, E).dispatch(*each[:3]) for each in batches)
            assert first.sent is not None
            assert second.sent is not None
            o = results_of(first)
            with pytest.MonkeyPatch.context() as late:
                last_is_late(window, "pull_sums", late)
                o = first.sent.combine(o)
            found = [o, second.sent.combine(results_of(second))]
            assert are_equal(found, [each[0] for each in want]) == is_right


def check_results_stay_while_other_tokens_are_sent() -> None:
    """Two layers in turn: dispatch, compute, dispatch, compute, combine, combine."""
    by, made = by_files(), []
    for seed in (1, 2):
        here = AllToAllDispatcher(by, E).dispatch(*batch(seed)[:3])
        made.append((here.sent, results_of(here)))
    found = [sent.combine(o) for sent, o in made if sent is not None]
    assert are_equal(found, [expected(batch(seed))[0] for seed in (1, 2)])


def check_results_that_others_replaced() -> None:
    """It is said, and no rank reads them."""
    by = by_files()
    first, second = (AllToAllDispatcher(by, E).dispatch(*batch(seed)[:3]) for seed in (1, 2))
    assert first.sent is not None
    assert second.sent is not None
    replaced = results_of(first)
    assert are_equal([second.sent.combine(results_of(second))], expected(batch(2))[:1])
    with pytest.raises(AssertionError, match="other results have been put there since"):
        first.sent.combine(replaced)


def check_numbers_of_exchanges_that_wrap() -> None:
    """2^31 exchanges later they are negative."""
    by, given, want = by_files(), batch(1), expected(batch(1))
    assert are_equal(step(by, given), want)
    view = view_of(by)
    last = int(view.state[window.LAST.value])
    dist.barrier()
    begin = 2**31 - 1 - 5
    for at in (window.LAST, window.TOKENS, window.RESULTS):
        view.state[at.value] += begin - last
    flags = windows_of(by)._window._memory[0][: window.HEADER_BYTES].view(torch.int32)  # type: ignore[union-attr]
    flags[: window.ROOM.value][flags[: window.ROOM.value] != 0] += begin - last
    dist.barrier()
    for _ in range(3):
        assert are_equal(step(by, given), want)
    assert int(view.state[window.LAST.value]) < 0


@contextmanager
def least_room() -> Iterator[None]:
    """Windows have room for what they are asked for and no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "SLACK_ROWS", 0)
        patch.setattr(windows, "_ROUNDED", 1)
        yield


def check_an_overflow() -> None:
    """Of either layer of two: NaN on every rank; all know how many rows there were, are told once, and go on."""
    tokens = 4
    spread, to_one = batch(1, tokens), batch(2, tokens, ids_all_on_one_rank)
    with least_room():
        by = by_files(capacity=1.5)
        own = windows_of(by)
        own.is_watched = True  # by one who asks after each step
        assert are_equal(step(by, spread), expected(spread))
        for layers in ((spread, to_one), (to_one, spread)):
            for given in layers:
                o, dx, ds, dw1, dw2 = step(by, given)
                assert bool(torch.stack((o, dx)).isnan().all()) == (given is to_one)
                assert not torch.cat([t.flatten() for t in (ds, dw1, dw2)]).isnan().any()
            rows = K * tokens * world()
            assert own.overflow().tolist()[:2] == [rows, 0]
            with pytest.raises(ValueError, match=rf"would have received {rows} rows in .* are NaN; ") as error:
                own.check()
            assert "\n" not in str(error.value)
            own.check()
        own.is_watched = False
        forward(by, to_one)
        with pytest.raises(ValueError, match="outputs of that step are NaN"):  # told at the next call, to all ranks
            forward(by, spread)
        own.grow(rows)
        for given in (to_one, spread):
            assert are_equal(step(by, given), expected(given))
        own.check()


def check_an_overflow_is_known_after_the_window_was_replaced() -> None:
    to_one, more = batch(2, 4, ids_all_on_one_rank), batch(1, 7)
    with least_room():
        by = by_files(capacity=1.5)
        windows_of(by).is_watched = True
        assert bool(forward(by, to_one)[0].isnan().all())
        assert are_equal(step(by, more), expected(more))
        assert windows_of(by).overflow().tolist() == [K * 4 * world(), 0, 0]
        with pytest.raises(ValueError, match="would have received 48 rows"):
            windows_of(by).check()


def check_one_rank_has_more_tokens_than_there_is_room_for() -> None:
    """It says so before it sends any; the others' outputs are NaN, and they know why."""
    with least_room():
        by = by_files()
        own = windows_of(by)
        step(by, batch(1, 4))
        is_last = dist.get_rank() == world() - 1
        given = batch(2, 6 if is_last else 2)
        if is_last:
            with pytest.raises(ValueError, match=r"this process has 6 tokens and 18 pairs, but .* holds 5 and 15"):
                forward(by, given)
            rows = torch.zeros(own.rows, D)
            window.put(
                view_of(by), rows, window.RESULTS, counts=torch.zeros(4, dtype=torch.int32)
            )  # the others wait for it
        else:
            assert bool(forward(by, given)[0].isnan().all())
        assert own.overflow().tolist()[:2] == [0, 6]
        with pytest.raises(ValueError, match="a process had 6 tokens, but its expert-parallel group's window holds 5"):
            own.check()


def check_windows_that_grow() -> None:
    """All ranks have more tokens than ever: another window, on all; fewer are no reason."""
    opened = []
    with least_room(), pytest.MonkeyPatch.context() as patch:
        real = Windows._open
        patch.setattr(Windows, "_open", lambda self, more: (opened.append(more), real(self, more)))
        by = by_files()
        for turn, tokens in enumerate((2, 5, 1, 5, 9)):
            given = batch(turn, tokens + dist.get_rank() % 2)
            assert are_equal(step(by, given), expected(given))
        assert len(opened) == 3


def check_backwards_in_any_order() -> None:
    by, given = by_files(), [batch(1), batch(2)]
    want = [expected(each) for each in given]
    forward(by, given[0])  # without a backward
    for order in ((0, 1), (1, 0)):
        made = [forward(by, each) for each in given]
        for i in order:
            assert are_equal(backward(made[i], given[i]), want[i]), order
    once = forward(by, given[0])
    for retain in (True, False):
        assert are_equal(backward(once, given[0], retain_graph=retain), want[0])


def check_gradients_of_some() -> None:
    """Exchanges of a region follow one another, where x and the scores need none."""
    by, given = by_files(keep_received=True), batch(1)
    for needs in (WEIGHTS_ALONE, WEIGHTS_ALONE, (True, False, False, False), (False, True, True, False)):
        assert are_equal(step(by, given, needs), expected(given, needs)), needs


def check_a_window_replaced_before_the_backward() -> None:
    by, given, other = by_files(), batch(1), batch(2)
    made = forward(by, given)
    windows_of(by).grow(K * 3 * world())
    between = forward(by, other)
    assert are_equal(backward(made, given), expected(given))
    assert are_equal(backward(between, other), expected(other))


def check_what_a_layer_saves() -> None:
    """Its own tokens, not those received, which cross once more in the backward; repeated forwards change no bit."""
    x, found = torch.randn(3, D, generator=torch.Generator().manual_seed(dist.get_rank())), []
    for keep, repeat, exchanges in ((True, False, [2, 2]), (False, False, [2, 3]), (False, True, [2, 4])):
        torch.manual_seed(0)
        layer = MoE(layer_config())
        divide_experts([layer.experts], init_device_mesh("cpu", (world(),)), by_files(keep_received=keep))
        leaf = x.clone().requires_grad_()
        with watched() as (puts, received):
            out = checkpoint(layer, leaf, use_reentrant=False) if repeat else layer(leaf)
            assert (received[0]() is not None) == keep
            forward_puts = len(puts)
            (out.hidden.square().sum() + out.aux_loss).backward()
        assert [forward_puts, len(puts) - forward_puts] == exchanges
        assert leaf.grad is not None
        found.append([out.hidden.detach(), leaf.grad, *[p.grad.to_local() for p in layer.experts.parameters()]])
    assert all(are_equal(found[0], each) for each in found[1:])


def check_nothing_is_pulled_that_nobody_needs() -> None:
    """x crosses once more for w1's gradient, for h that was not saved, or for the adapter that multiplies it."""
    by, given = by_files(), batch(1)
    of_x, of_w2 = (True, True, False, False), (False, True, False, True)
    cases: list[tuple[tuple[bool, ...], dict[str, Any], int]] = [
        (ALL, {}, 5),
        (of_x, {}, 4),
        (of_w2, {}, 4),
        (of_x, {"recompute": "up_proj"}, 5),
    ]
    for needs, options, exchanges in cases:
        with watched() as (puts, _):
            assert are_equal(step(by, given, needs, **options), expected(given, needs))
        assert len(puts) == exchanges, (needs, options)
    for is_up_a_trained in (True, False):
        with watched() as (puts, _):
            found = step_of_adapters(by, given, is_up_a_trained)
        assert len(puts) == 4 + is_up_a_trained
        assert are_equal(found, step_of_adapters(collective(), given, is_up_a_trained))


def step_of_adapters(by: Transports, given: Batch, is_up_a_trained: bool) -> list[Tensor]:
    """o, and the gradients of x and of the adapters that are trained."""
    w1, w2 = (t.detach() for t in make_weights(torch.float32).of(experts_of(dist.get_rank()))[:2])
    (e, w, d), n, generator = w1.shape, w2.shape[2], torch.Generator().manual_seed(3)
    shapes = ((e, 2, d), (e, w, 2), (e, 2, n), (e, d, 2))
    x, up_a, *others = (
        t.clone().requires_grad_() for t in (given.x, *(torch.randn(s, generator=generator) for s in shapes))
    )
    up_a.requires_grad_(is_up_a_trained)
    dispatcher = AllToAllDispatcher(by, E)
    here = dispatcher.dispatch(x, given.plan, given.scores)
    o = dispatcher.combine(moe_lora(here.x, w1, w2, here.plan, here.scores, Adapters(up_a, *others, 2.0)), here)
    trained = [leaf for leaf in (x, up_a, *others) if leaf.requires_grad]
    return [o.detach(), *torch.autograd.grad(o, trained, given.do)]


def check_scores_of_another_dtype_in_turn() -> None:
    """Layers that share a window, which has room for the widest."""
    by = by_files()
    for dtype in (torch.float32, torch.float64, torch.float32):
        given = batch(1)._replace(scores=batch(1).scores.to(dtype))
        assert are_equal(step(by, given), expected(given)), dtype


def check_a_window_that_inference_opened() -> None:
    """Is one for training, too: what does not fit there is known, and a larger one follows."""
    to_one = batch(2, 4, ids_all_on_one_rank)
    with least_room():
        by = by_files(capacity=1.5)
        windows_of(by).is_watched = True
        with torch.inference_mode():
            forward(by, batch(1, 4), (False,) * 4)
        assert bool(forward(by, to_one)[0].isnan().all())
        windows_of(by).grow(int(windows_of(by).overflow()[0]))
        assert are_equal(step(by, to_one), expected(to_one))


def check_saved_bytes_follow_each_layer() -> None:
    """At most 1.05 of x and the exact h once a layer's room is learnt, also beside a layer whose rows all go to one
    rank; what does not fit in a layer makes its room larger and no other's.
    """
    of_one, of_all = 2 * WIDE_TOKENS, 2 * WIDE_TOKENS * world()
    even, to_one = torch.arange(of_one).view(-1, 2) % E, torch.tensor([0, 1]).expand(WIDE_TOKENS, 2)
    with least_room():
        by = by_files(capacity=1.5)
        own = windows_of(by)
        own.is_watched = True
        layers = [AllToAllDispatcher(by, E) for _ in range(2)]
        want = [saved_of(layers[0], even)[2]]
        for layer in (1, 0):  # the second time of a room that was learnt
            before = by.layers[1 - layer].rows
            assert bool(saved_of(layers[layer], to_one)[2][0].isnan().all())
            assert own.overflow().tolist() == [of_all, 0, layer]
            own.grow(of_all, layer)
            assert by.layers[1 - layer].rows == before
            want.append(saved_of(layers[layer], to_one)[2])
            if layer == 1:
                rows = [of_one, of_all if dist.get_rank() == 0 else 0]
                own.learn(rows, of_all)
                for index, ids in enumerate((even, to_one)):
                    share, received, found = saved_of(layers[index], ids)
                    assert received == rows[index]
                    assert share <= 1.05, share
                    assert are_equal(found, want[index])
        assert are_equal(want[2], want[1])


WIDE_TOKENS, WIDE = 64, (128, 64)  # d, n


def check_saved_bytes_of_qwen3_30b() -> None:
    """At most 1.05 of x and the exact h, with its widths and experts per token, in bf16, once the room is learnt."""
    ids = torch.rand(32, 4 * world(), generator=torch.Generator().manual_seed(dist.get_rank())).topk(8, dim=1).indices
    with least_room():
        by = by_files()
        layer = AllToAllDispatcher(by, 4 * world())
        for is_learnt in (False, True):
            share, rows, _ = saved_of(layer, ids, (2048, 768), torch.bfloat16)
            assert (share <= 1.05) == is_learnt, share
            windows_of(by).learn([rows], rows)


def saved_of(
    layer: AllToAllDispatcher, ids: Tensor, widths: tuple[int, int] = WIDE, dtype: torch.dtype = torch.float64
) -> tuple[float, int, list[Tensor]]:
    """A layer's saved bytes over those of x and the exact h, its rows, and the output with its gradients."""
    (d, n), experts, generator = widths, layer.experts_per_rank, torch.Generator().manual_seed(dist.get_rank())
    shapes = ((len(ids), d), (experts, 2 * n, d), (experts, d, n))
    x, w1, w2 = (torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes)
    kept: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FunctionCtx, "save_for_backward", keeping(kept, FunctionCtx.save_for_backward))
        here = layer.dispatch(
            x, tilemoe.plan_topk(ids, experts * dist.get_world_size(layer.transports.group)), torch.ones(ids.shape)
        )
        sums = tilemoe.moe(here.x, w1, w2, here.plan, here.scores)
        o = layer.combine(sums, here)
    for each in (w1, w2):
        kept.pop(each.data_ptr())
    rows = int(here.plan.row_start_of_expert[-1])
    exact = dtype.itemsize * (len(ids) * d + rows * 2 * n)
    return sum(kept.values()) / max(1, exact), rows, [o.detach(), *torch.autograd.grad(o.sum(), [x, w1, w2])]


def keeping(kept: dict[int, int], save: Callable[..., None]) -> Callable[..., None]:
    """``save``, which notes the bytes of what it keeps by their address."""

    def save_and_note(ctx: Any, *tensors: Tensor | None) -> None:
        kept.update({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None})
        save(ctx, *tensors)

    return save_and_note


@contextmanager
def watched() -> Iterator[tuple[list[None], list[Any]]]:
    """(one for each exchange, references to what was received, which die with its memory)"""
    puts: list[None] = []
    received: list[Any] = []
    put, pull = window.put, window.pull_rows

    def put_and_count(*args: Any, **options: Any) -> None:
        puts.append(None)
        put(*args, **options)

    def pull_and_watch(*args: Any) -> Tensor:
        array = pull(*args).numpy().copy()
        received.append(weakref.ref(array))
        return torch.from_numpy(array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "put", put_and_count)
        patch.setattr(window, "pull_rows", pull_and_watch)
        yield puts, received


def check_room_that_is_exactly_full() -> None:
    """All rows go to one rank; they fit to the last, and with room for one less they do not."""
    given, rows = batch(3, 4, ids_all_on_one_rank), K * 4 * world()
    for short in (0, 1):
        with least_room():
            by = by_files(capacity=1.5)
            own = windows_of(by)
            own.is_watched = True
            forward(by, batch(1, 4))
            own._usual = rows - short  # the next layer's
            own._widen(own._usual)
            assert are_equal(step(by, given), expected(given)) == (not short)
            assert own.overflow().tolist() == [rows * short, 0, short]


def check_groups_of_two_and_three() -> None:
    """A part of the job; 4 and 6 experts, one or all of them a token's; tokens there are one, few or none."""
    rank = dist.get_rank()
    for members in ([0, 1, 2], [1, 3]):
        group = dist.new_group(members)
        if rank not in members:
            continue
        folder = Path(os.environ["WINDOWS"]) / f"group_{members}"
        folder.mkdir(exist_ok=True)
        experts = 2 * len(members)
        for per_token in (1, experts):
            by = FileTransports(group, folder, count(experts * per_token))
            for tokens in (7, 0, 1, rank % 3, 8):
                generator = torch.Generator().manual_seed(rank)
                ids = torch.rand(tokens, experts, generator=generator).topk(per_token, dim=1).indices
                found, want = (
                    saved_of(AllToAllDispatcher(each, experts), ids, (24, 16))[2]
                    for each in (by, Transports(group, "collective"))
                )
                assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    dist.barrier()


def check_a_step_that_an_exception_ends() -> None:
    """Before, between and after its exchanges; the next step is as ever."""
    by, given, want = by_files(), batch(1), expected(batch(1))

    def fail_at(place: int) -> None:
        here = AllToAllDispatcher(by, E).dispatch(given.x.clone().requires_grad_(), *given[1:3])
        assert here.sent is not None
        assert place > 0 or 1 // 0
        sums = results_of(here)
        assert place > 1 or 1 // 0
        o = here.sent.combine(sums)
        assert place > 2 or 1 // 0
        here.x.register_hook(lambda grad: 1 // 0)
        o.sum().backward()

    for ends_at in range(4):
        with pytest.raises(ZeroDivisionError):
            fail_at(ends_at)
        assert are_equal(step(by, given), want), ends_at


def check_nested_checkpoints() -> None:
    by, x = by_files(), batch(1).x
    torch.manual_seed(0)
    layers = [MoE(layer_config()) for _ in range(2)]
    divide_experts([layer.experts for layer in layers], init_device_mesh("cpu", (world(),)), by)
    first, second = (lambda x, layer=layer: layer(x).hidden for layer in layers)
    again = partial(checkpoint, use_reentrant=False)
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda x: second(first(x)),
        lambda x: again(lambda x: second(again(first, x)), x),
        lambda x: checkpoint(second, checkpoint(first, x, use_reentrant=True), use_reentrant=True),
    ]
    found = []
    for way in ways:
        leaves = [x.clone().requires_grad_(), *(p for layer in layers for p in layer.experts.parameters())]
        o = way(leaves[0])
        o.square().sum().backward()
        found.append([o.detach(), *[g.to_local() if hasattr(g, "to_local") else g for g in (p.grad for p in leaves)]])
        for leaf in leaves:
            leaf.grad = None
    assert all(are_equal(found[0], each) for each in found[1:])


def check_one_graph() -> None:
    """Traced whole, forward and backward; traced once more, and not again, where a layer's room becomes another."""
    by, given = by_files(), batch(1)
    want, dispatcher = expected(given), AllToAllDispatcher(by, E)
    w1, w2 = (t.detach() for t in make_weights(torch.float32).of(experts_of(dist.get_rank()))[:2])
    leaves = [t.clone().requires_grad_() for t in (given.x, given.scores, w1, w2)]

    def layer(x: Tensor, scores: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        here = dispatcher.dispatch(x, given.plan, scores)
        sums = tilemoe.moe(here.x, w1, w2, here.plan, here.scores)
        return dispatcher.combine(sums, here)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call the model once uncompiled before"):
        compiled(*leaves)
    step(by, given)
    traced = []
    for more in (0, 5, 7):
        by.layers[0].rows += more
        o = compiled(*leaves)
        assert are_equal([o.detach(), *torch.autograd.grad(o, leaves, given.do)], want)
        traced.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert traced == [traced[0], traced[0] + 1, traced[0] + 1]


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
