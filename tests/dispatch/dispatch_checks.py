"""What the processes of a job, two or four of them, check of the all-to-all dispatcher.

T tokens of a rank · d hidden_size · n intermediate_size · E experts · K experts per token · W ranks
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from file_window import NAMES, FileTransports
from ranks import device_of_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tilemoe
from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.dispatch import collective
from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.dispatch.base import Dispatched, Dispatcher, LocalDispatcher
from tilemoe.dispatch.choose import Transports
from tilemoe.kernels.expert_parallel import triton_window
from tilemoe.layers.moe import MoE
from tilemoe.ops import window as window_ops
from tilemoe.parallel.expert import divide_experts
from tilemoe.plan import RoutingPlan
from tilemoe.runtime.precompile import withholds_values

D, N, E, K = 24, 16, 8, 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
EXCHANGE = os.environ.get("EXCHANGE_UNDER_TEST", "collective")
IS_COLLECTIVE = EXCHANGE == "collective"  # else by windows: symmetric memory, or files
TOKENS = (5, 0, 13, 1)  # of each rank: odd numbers, and a rank without any


def world() -> int:
    return dist.get_world_size()


def transports() -> Transports:
    """By what the job's tests ask for; the checks are the same."""
    if EXCHANGE == "files":
        return FileTransports(dist.group.WORLD, Path(os.environ["WINDOWS"]), NAMES)
    return Transports(dist.group.WORLD, EXCHANGE)


def arrived(here: Dispatched) -> tuple[int, int]:
    """How many tokens and pairs there are at this rank's experts; the rest of a window's rows is padding."""
    if IS_COLLECTIVE:
        return here.x.shape[0], here.plan.capacity
    tokens, pairs, fails, _ = here.sent.places.counts.tolist()
    assert not fails
    return tokens, pairs


def copies_of_tokens(here: Dispatched, tokens: int) -> Tensor:
    """(T, 1): to how many ranks each token was sent."""
    places = here.sent if IS_COLLECTIVE else here.sent.places
    return (places.copy_of_token.view(tokens, world()) >= 0).sum(1, keepdim=True)


def experts_of(rank: int) -> slice:
    return slice(rank * E // world(), (rank + 1) * E // world())


def ids_spread(rank: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(tokens, E, generator=generator).topk(K, dim=1).indices.to(device_of_rank())


def ids_all_on_one_rank(rank: int, tokens: int) -> Tensor:
    """Every token's experts are 0 and 1, one of them twice: those of rank 0."""
    return torch.tensor([0, 1, 0], device=device_of_rank()).expand(tokens, K)


def ids_of_no_expert_of_the_last_rank(rank: int, tokens: int) -> Tensor:
    return ids_spread(rank, tokens) % experts_of(world() - 1).start


def ids_with_sentinels(rank: int, tokens: int) -> Tensor:
    ids = ids_spread(rank, tokens)
    ids[::2, 1:] = E
    ids[::3] = E + 5
    return ids


@dataclass
class Weights:
    w1: Tensor
    w2: Tensor
    b1: Tensor
    b2: Tensor

    def of(self, experts: slice) -> list[Tensor]:
        parts = (self.w1, self.w2, self.b1, self.b2)
        return [part[experts].clone().to(device_of_rank()).requires_grad_() for part in parts]


def make_weights(dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(99)
    shapes = ((E, 2 * N, D), (E, D, N), (E, 2 * N), (E, D))
    return Weights(*(0.5 * torch.randn(s, generator=generator, dtype=dtype) for s in shapes))


def run(
    dispatcher: Dispatcher, weights: list[Tensor], x: Tensor, plan: RoutingPlan, scores: Tensor, do: Tensor
) -> tuple[Tensor, ...]:
    """(o, dx, ds)"""
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    w1, w2, b1, b2 = weights
    here = dispatcher.dispatch(x, plan, scores)
    sums = tilemoe.moe(here.x, w1, w2, here.plan, here.scores, b1=b1, b2=b2)
    o = dispatcher.combine(sums, here)
    o.backward(do)
    assert x.grad is not None
    assert scores.grad is not None
    return o.detach(), x.grad, scores.grad


def error(got: Tensor, want: Tensor) -> float:
    """Root-mean-square error over root-mean-square value, of all ranks together; all call it."""
    assert got.shape == want.shape
    sums = torch.stack([(got.double() - want.double()).square().sum(), want.double().square().sum()]).cpu()
    dist.all_reduce(sums)
    return float((sums[0] / sums[1].clamp(min=1e-300)).sqrt())


def assert_error(name: str, got: Tensor, want: Tensor, limit: float) -> None:
    found = error(got, want)
    assert found <= limit, f"{name} in {want.dtype}: error {found:.2e}, limit {limit:.2e}"


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=device_of_rank())


def assert_as_one_process(ids_of: Callable[[int, int], Tensor], dtype: torch.dtype) -> None:
    rank, tokens = dist.get_rank(), TOKENS[dist.get_rank()]
    ids = ids_of(rank, tokens)
    generator = torch.Generator().manual_seed(10 + rank)
    device = device_of_rank()
    x, do = torch.randn(2, tokens, D, generator=generator, dtype=dtype).to(device)
    pair_tokens = torch.arange(tokens, device=device).repeat_interleave(K)
    for plan in (tilemoe.plan_topk(ids, E), tilemoe.plan_pairs(pair_tokens.flip(0), ids.flatten().flip(0), tokens, E)):
        shape = (tokens, K) if plan.pair_start_of_token is None else (tokens * K,)
        scores = torch.rand(shape, generator=generator, dtype=dtype).to(device)
        weights = make_weights(dtype)
        whole = weights.of(slice(None))
        mine = weights.of(experts_of(rank))
        expected = run(LocalDispatcher(), whole, x, plan, scores, do)
        got = run(AllToAllDispatcher(transports(), E), mine, x, plan, scores, do)
        for name, a, b in zip(("o", "dx", "ds"), got, expected, strict=True):
            assert_error(name, a, b, TOLERANCE[dtype])
        for index, (a, b) in enumerate(zip(mine, whole, strict=True)):
            assert a.grad is not None
            assert b.grad is not None
            dist.all_reduce(b.grad)
            assert_error(f"weight {index}", a.grad, b.grad[experts_of(rank)], TOLERANCE[dtype])


def check_spread() -> None:
    for dtype in TOLERANCE:
        assert_as_one_process(ids_spread, dtype)


def check_all_on_one_rank() -> None:
    for dtype in TOLERANCE:
        assert_as_one_process(ids_all_on_one_rank, dtype)
    tokens = TOKENS[dist.get_rank()]
    plan = tilemoe.plan_topk(ids_all_on_one_rank(0, tokens), E)
    here = AllToAllDispatcher(transports(), E).dispatch(ones(tokens, D), plan, ones(tokens, K))
    # The most there can be: every token of every rank, once each, though it has three pairs.
    most = sum(TOKENS[: world()]) if dist.get_rank() == 0 else 0
    assert arrived(here) == (most, K * most)


def check_a_rank_whose_experts_get_nothing() -> None:
    for dtype in TOLERANCE:
        assert_as_one_process(ids_of_no_expert_of_the_last_rank, dtype)


def check_sentinels() -> None:
    for dtype in TOLERANCE:
        assert_as_one_process(ids_with_sentinels, dtype)


def check_plan() -> None:
    """The plan of what came is the one that `plan_pairs` would build; past it no row has a pair."""
    rank, tokens = dist.get_rank(), TOKENS[dist.get_rank()]
    given = tilemoe.plan_topk(ids_with_sentinels(rank, tokens), E)
    here = AllToAllDispatcher(transports(), E).dispatch(ones(tokens, D), given, ones(tokens, K))
    plan, (count, pairs) = here.plan, arrived(here)
    assert plan.pair_start_of_token is not None
    token = torch.repeat_interleave(torch.diff(plan.pair_start_of_token[: count + 1]))
    expert = torch.repeat_interleave(plan.rows_per_expert)[plan.row_of_pair[:pairs]]
    expected = tilemoe.plan_pairs(token, expert, count, plan.num_experts)
    past = {"token_of_row": 0, "pair_of_row": 0, "row_of_pair": -1, "pair_start_of_token": pairs}
    for name in (*past, "row_start_of_expert"):
        got, want = getattr(plan, name), getattr(expected, name)
        assert got.dtype == want.dtype, name
        assert torch.equal(got[: len(want)], want), name
        assert set(got[len(want) :].tolist()) <= {past.get(name)}, name
    assert token.numel() >= count > 0


def check_nothing_anywhere() -> None:
    """No rank has a token, and then no token has an expert."""
    dispatcher = AllToAllDispatcher(transports(), E)
    for tokens in (0, 3):
        mine = make_weights(torch.float32).of(experts_of(0))
        plan = tilemoe.plan_topk(torch.full((tokens, K), E, device=device_of_rank()), E)
        o, dx, ds = run(dispatcher, mine, ones(tokens, D), plan, ones(tokens, K), ones(tokens, D))
        assert o.shape == dx.shape == (tokens, D)
        for tensor in (o, dx, ds, *(weight.grad for weight in mine)):
            assert tensor is not None
            assert not tensor.any()


def check_gradients_that_change_on_their_way() -> None:
    """By hooks of autograd, or added to by another use of x."""
    rank, tokens = dist.get_rank(), TOKENS[dist.get_rank()]
    weights = make_weights(torch.float64).of(experts_of(rank))
    dispatcher = AllToAllDispatcher(transports(), E)
    # The second: no token has an expert of the last rank, whose x is empty then.
    for ids in (ids_spread(rank, tokens), ids_of_no_expert_of_the_last_rank(rank, tokens)):
        plan = tilemoe.plan_topk(ids, E)

        def gradients(change: Callable[[Tensor], Tensor | None], second_use: float = 0.0) -> tuple[Tensor, ...]:
            x, scores = ones(tokens, D).double().requires_grad_(), ones(tokens, K).double().requires_grad_()
            here = dispatcher.dispatch(x, plan, scores)  # noqa: B023
            for given in (here.x, here.scores):
                given.register_hook(change)
            w1, w2, b1, b2 = weights
            sums = tilemoe.moe(here.x, w1, w2, here.plan, here.scores, b1=b1, b2=b2)
            o = dispatcher.combine(sums, here)
            loss = o.square().sum() + (second_use * here.x.sum() if second_use else 0.0)
            dx, ds = torch.autograd.grad(loss, (x, scores))
            return dx, ds, copies_of_tokens(here, tokens) * ones(tokens, D).double()

        dx, ds, copies = gradients(lambda grad: None)
        for change in (lambda grad: 2 * grad, lambda grad: grad.mul_(2)):
            changed = gradients(change)
            assert torch.equal(changed[0], 2 * dx)
            assert torch.equal(changed[1], 2 * ds)
        used_twice = gradients(lambda grad: None, 0.5)
        assert_error("dx", used_twice[0], dx + 0.5 * copies, 1e-12)
        assert torch.equal(used_twice[1], ds)


def check_gradients_taken_again_and_in_part() -> None:
    """What has left for one backward is neither taken for another's, nor left behind by one that wants less."""
    rank, tokens = dist.get_rank(), TOKENS[dist.get_rank()]
    w1, w2, b1, b2 = make_weights(torch.float64).of(experts_of(rank))
    dispatcher = AllToAllDispatcher(transports(), E)
    x, scores = ones(tokens, D).double().requires_grad_(), ones(tokens, K).double().requires_grad_()
    here = dispatcher.dispatch(x, tilemoe.plan_topk(ids_spread(rank, tokens), E), scores)
    sums = [tilemoe.moe(here.x, w1, w2, here.plan, here.scores, b1=b1, b2=b2) for _ in range(2)]
    once, twice = dispatcher.combine(sums[0], here).sum(), dispatcher.combine(sums[0] + sums[1], here).sum()
    inputs = (x, scores, w1, w2)
    whole = torch.autograd.grad(once, inputs, retain_graph=True)
    for part in ((0,), (1,), (2,), (0, 3), (0, 1, 2, 3)):
        found = torch.autograd.grad(once, [inputs[i] for i in part], retain_graph=True)
        for got, i in zip(found, part, strict=True):
            assert_error("gradient", got, whole[i], 1e-12)
    for got, want in zip(torch.autograd.grad(twice, inputs), whole, strict=True):
        assert_error("gradient", got, 2 * want, 1e-12)


def check_without_gradients() -> None:
    rank, tokens = dist.get_rank(), TOKENS[dist.get_rank()]
    dispatcher = AllToAllDispatcher(transports(), E)
    w1, w2, b1, b2 = (weight.detach() for weight in make_weights(torch.float64).of(experts_of(rank)))
    x, scores = ones(tokens, D).double().cumsum(0), ones(tokens, K).double()
    found = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            here = dispatcher.dispatch(x, tilemoe.plan_topk(ids_spread(rank, tokens), E), scores)
            sums = tilemoe.moe(here.x, w1, w2, here.plan, here.scores, b1=b1, b2=b2)
            found.append(dispatcher.combine(sums, here))
    for o in found[1:]:
        assert_error("o", o, found[0], 1e-12)


@contextmanager
def counted() -> Iterator[list[tuple[int, int]]]:
    """(bytes, elements of a row) of every exchange in the block: sent to other ranks, or pulled from the window."""
    log: list[tuple[int, int]] = []
    all_gather, all_to_all = collective.all_gather, dist.all_to_all_single

    def counting(arrived: Tensor, rows: Tensor, into: list[int], out: list[int], **options: Any) -> Any:
        row = rows.shape[1:].numel()
        own = out[dist.get_rank()] * row * rows.element_size()
        log.append((rows.nbytes - own, row))
        return all_to_all(arrived, rows, into, out, **options)

    def counting_sizes(out: Tensor, sizes: Tensor, **options: Any) -> Any:
        log.append((sizes.nbytes * (world() - 1), sizes.shape[1]))
        return all_gather(out, sizes, **options)

    def counting_rows(pull: Callable[..., Tensor], view: triton_window.Window, rows: Tensor, *rest: Any) -> Tensor:
        pulled = pull(view, rows, *rest)
        if not withholds_values():  # else kernels are only compiled, and the operator runs again
            log.append((rows.nbytes, rows.shape[1]))
        return pulled

    for operator in (
        window_ops.to_experts,
        window_ops.to_experts_again,
        window_ops.from_experts,
    ):
        operator._launches.known.clear()  # on a GPU launches would be repeated without a call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        patch.setattr(collective, "all_gather", counting_sizes)
        for name in ("pull_rows", "pull_sums"):
            patch.setattr(triton_window, name, partial(counting_rows, getattr(triton_window, name)))
        yield log


def check_volume() -> None:
    """Each token once to each other rank that has experts of it, and back; but for a window, 2% of the bytes for all
    else. (A window's are those that are read: they lie in it once.)
    """
    tokens, width, per_token = 64, 1536, 8
    rank, experts = dist.get_rank(), 32
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, experts, generator=generator).topk(per_token, dim=1).indices
    ranks = ids // (experts // world())
    copies = sum(len(set(row) - {rank}) for row in ranks.tolist())
    least = copies * width * 2
    device = device_of_rank()
    x = torch.randn(tokens, width, generator=generator).bfloat16().to(device).requires_grad_()
    scores = torch.rand(tokens, per_token, generator=generator).to(device).requires_grad_()
    dispatcher = AllToAllDispatcher(transports(), experts)
    with counted() as forward:
        here = dispatcher.dispatch(x, tilemoe.plan_topk(ids.to(device), experts), scores)
        o = dispatcher.combine(here.x * here.scores.sum().to(here.x.dtype), here)
    with counted() as backward:
        o.sum().backward()
    own = int((ranks == rank).any(1).sum())
    assert int(copies_of_tokens(here, tokens).sum()) == copies + own
    if not IS_COLLECTIVE:
        assert [row for _, row in forward + backward] == [width] * 4
        return
    assert [row for _, row in forward] == [2, 2, width, width]
    assert [row for _, row in backward] == [width, width, 1]  # the sizes are not exchanged again
    returned = sum(size for source, size in enumerate(here.sent.tokens.into) if source != rank) * width * 2
    assert [size for size, row in forward if row == width] == [least, returned]
    assert [size for size, row in backward if row == width] == [least, returned]
    everything = torch.tensor([sum(size for size, _ in forward + backward), 4 * least])
    dist.all_reduce(everything)
    assert everything[1] < everything[0] <= 1.02 * everything[1]


def layer_config(**options: Any) -> MoEConfig:
    router = RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01)
    return MoEConfig(D, N, E, K, router=router, initializer_range=0.3, **options)


def make_layers(cfg: MoEConfig, dtype: torch.dtype, recompute: str | None = None) -> tuple[MoE, MoE]:
    """The same layer twice: whole, and with its experts divided."""
    layers = []
    for _ in range(2):
        torch.manual_seed(0)
        layers.append(MoE(cfg, dtype=dtype, recompute=recompute).to(device_of_rank()))
    divide_experts([layers[1].experts], init_device_mesh(device_of_rank().type, (world(),)), transports())
    return layers[0], layers[1]


def run_layer(layer: MoE, x: Tensor, seed: int) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x, generator=torch.Generator(x.device).manual_seed(seed))
    (out.hidden.square().sum() + out.aux_loss).backward()
    assert x.grad is not None
    return {"hidden": out.hidden.detach(), "aux_loss": out.aux_loss.detach(), "dx": x.grad}


def assert_layers_agree(whole: MoE, divided: MoE, x: Tensor, tolerance: float, seed: int = 0) -> None:
    expected, got = run_layer(whole, x, seed), run_layer(divided, x, seed)
    for name, want in expected.items():
        assert_error(name, got[name], want, tolerance)
    for (name, a), b in zip(divided.named_parameters(), whole.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        grad, want = a.grad, b.grad.clone()
        if isinstance(grad, DTensor):
            assert grad.placements == (Shard(0),)
            dist.all_reduce(want)
            grad = grad.full_tensor()
        assert_error(name, grad, want, tolerance)


def check_layer() -> None:
    options = {"expert_bias": True, "shared_intermediate_size": 12, "shared_gate": True}
    x = torch.randn(7 + dist.get_rank(), D, dtype=torch.float64).to(device_of_rank())
    for recompute in (None, "up_proj"):
        assert_layers_agree(*make_layers(layer_config(**options), torch.float64, recompute), x, 1e-12)


def check_token_rounding() -> None:
    """Each rank rounds its own tokens, before they leave."""
    tile, tokens = 16, 64 + 7 * dist.get_rank()
    for mode in ("nearest", "stochastic", "up"):
        cfg = layer_config(rounding=TokenRounding(mode=mode, tile=tile))  # type: ignore[arg-type]
        whole, divided = make_layers(cfg, torch.float64)
        x = torch.randn(tokens, D, dtype=torch.float64).to(device_of_rank())
        assert_layers_agree(whole, divided, x, 1e-12, seed=dist.get_rank())
        counts = divided(x).tokens_per_expert
        assert not (counts % tile).any()
        assert counts.any()


def check_repeats_bit_for_bit() -> None:
    _, layer = make_layers(layer_config(expert_bias=True), torch.bfloat16)
    x = torch.randn(33 + dist.get_rank(), D).bfloat16().to(device_of_rank())
    first, again = run_layer(layer, x, 0), run_layer(layer, x, 0)
    assert all(torch.equal(first[name], again[name]) for name in first)


def check_autocast_sends_its_dtype() -> None:
    _, layer = make_layers(layer_config(), torch.float32)
    x = torch.randn(8, D).to(device_of_rank())
    with counted() as plain:
        layer(x)
    with counted() as log, torch.autocast(x.device.type, torch.bfloat16):
        assert layer(x).hidden.dtype == torch.bfloat16
    plain_bytes, half_bytes = (sum(size for size, row in found if row == D) for found in (plain, log))
    assert half_bytes == plain_bytes / 2 > 0, f"{plain} and {log}"


def check_errors() -> None:
    message = rf"num_experts \(7\) must be divisible by the {world()} processes"
    with pytest.raises(ValueError, match=message):
        AllToAllDispatcher(transports(), 7)
    layer = MoE(MoEConfig(D, N, 7, K))
    with pytest.raises(ValueError, match=message):
        divide_experts([layer.experts], init_device_mesh(device_of_rank().type, (world(),)), transports())
    assert not isinstance(layer.experts.w1, DTensor)


def on_gpu_what_the_host_reads() -> None:
    """The sizes, once, in the forward; by a window nothing."""
    tokens = 64
    dispatcher = AllToAllDispatcher(transports(), E)
    mine = [w.detach().bfloat16().requires_grad_() for w in make_weights(torch.float32).of(experts_of(0))]
    x = torch.randn(tokens, D).bfloat16().to(device_of_rank()).requires_grad_()
    plan, scores = tilemoe.plan_topk(ids_spread(dist.get_rank(), tokens), E), ones(tokens, K).requires_grad_()
    for _ in range(2):  # once to compile the kernels and set up the communicators
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as forward:
            warnings.simplefilter("always")
            here = dispatcher.dispatch(x, plan, scores)
            w1, w2, b1, b2 = mine
            o = dispatcher.combine(tilemoe.moe(here.x, w1, w2, here.plan, here.scores, b1=b1, b2=b2), here)
        with warnings.catch_warnings(record=True) as backward:
            warnings.simplefilter("always")
            o.backward(torch.ones_like(o))
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in forward if "synchronizing" in str(w.message)]) == int(IS_COLLECTIVE)
    assert not [w for w in backward if "synchronizing" in str(w.message)]


GPU_CHECKS = [on_gpu_what_the_host_reads]
CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
