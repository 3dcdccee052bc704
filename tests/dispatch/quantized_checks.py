"""What the processes of a job, two or four of them, check of tokens that cross in FP8.

T tokens of a rank · d hidden_size · n intermediate_size · E experts · K experts per token · W ranks

What is quantised twice is the oracle's once, so FP8's exchange is, to the bit, the other one of tokens and gradients
that `reference.fp8.rounded` has rounded before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from dispatch_checks import (
    IS_COLLECTIVE,
    TOKENS,
    E,
    K,
    assert_error,
    counted,
    error,
    experts_of,
    ids_all_on_one_rank,
    ids_of_no_expert_of_the_last_rank,
    ids_spread,
    ids_with_sentinels,
    make_layers,
    run_layer,
    transports,
    world,
)
from ranks import device_of_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import tilemoe
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.dispatch.base import Dispatcher, LocalDispatcher
from tilemoe.kernels.choose import choose_packing
from tilemoe.layers.moe import MoE
from tilemoe.reference import fp8
from tilemoe.testing import assert_equal

D, N = 256, 128
WORDS = D // 4 + 1  # int32, of a token that crosses
NAMES = ("o", "dx", "ds", "dw1", "dw2", "db1", "db2")
READ_AS_THEY_CROSSED = ("ds", "dw1", "dw2", "db2")  # x or do, which the bf16 products and sums of a layer read
ROUNDING = 0.04  # of e4m3's three bits: 2.6% in the square mean
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 0.01}  # of values on a border, and of partial sums that are rounded


def dtypes() -> list[torch.dtype]:
    """Those that the device computes in FP8."""
    return list(LIMITS) if device_of_rank().type == "cpu" else [torch.bfloat16]


def dispatcher_in(precision: str) -> AllToAllDispatcher:
    return AllToAllDispatcher(transports(), E, precision_of=lambda x: precision)


def rounded(values: Tensor) -> Tensor:
    """By the oracle; on a GPU, whose division is another, by what sends them."""
    if values.is_cuda:
        packing = choose_packing(values.device, values.dtype).impl
        return packing.unpack_rows(packing.pack_rows(values), values.dtype)
    return fp8.rounded(values.float(), 1, D).to(values.dtype)


class Case:
    """This rank's tokens and their way."""

    def __init__(self, ids_of: Callable[[int, int], Tensor], dtype: torch.dtype, tokens: int | None = None) -> None:
        rank = dist.get_rank()
        tokens = TOKENS[rank] if tokens is None else tokens
        generator, device = torch.Generator().manual_seed(10 + rank), device_of_rank()
        self.x, self.do = (torch.randn(tokens, D, generator=generator).to(device, dtype) for _ in range(2))
        self.scores = torch.rand(tokens, K, generator=generator).to(device)
        self.plan = tilemoe.plan_topk(ids_of(rank, tokens), E)
        generator = torch.Generator().manual_seed(99)
        shapes = ((E, 2 * N, D), (E, D, N), (E, 2 * N), (E, D))
        self.weights = [(torch.randn(s, generator=generator) / 16).to(device, dtype) for s in shapes]

    def run(self, dispatcher: Dispatcher, x: Tensor, do: Tensor, experts: slice) -> dict[str, Tensor]:
        """The output and all gradients, by experts that compute in FP8."""
        wanted = [t.detach().clone().requires_grad_() for t in (x, self.scores, *(w[experts] for w in self.weights))]
        x, scores, w1, w2, b1, b2 = wanted
        here = dispatcher.dispatch(x, self.plan, scores)
        sums = tilemoe.moe(here.x, w1, w2, here.plan, here.scores, b1=b1, b2=b2, precision="fp8")
        o = dispatcher.combine(sums, here)
        return dict(zip(NAMES, (o.detach(), *torch.autograd.grad(o, wanted, do)), strict=True))

    def shared(self, precision: str, x: Tensor, do: Tensor) -> dict[str, Tensor]:
        return self.run(dispatcher_in(precision), x, do, experts_of(dist.get_rank()))


def cases() -> Iterator[Case]:
    """A rank without tokens among them, and one without experts that are chosen."""
    for ids_of in (ids_spread, ids_all_on_one_rank, ids_of_no_expert_of_the_last_rank, ids_with_sentinels):
        for dtype in dtypes():
            yield Case(ids_of, dtype)


def check_it_is_the_exchange_of_rounded_tokens() -> None:
    """To the bit: so up_proj's and down_proj_dgrad's results are also those of tokens that crossed as they are."""
    for case in cases():
        found = case.shared("fp8", case.x, case.do)
        assert_equal(found, case.shared("bf16", rounded(case.x), rounded(case.do)))
        unrounded = case.shared("bf16", case.x, case.do)
        for name in ("o", "dx", "db1"):
            assert torch.equal(found[name], unrounded[name]), name


def check_as_one_process() -> None:
    """Weight gradients, b2's and its term of ds read what e4m3 has left of x and do."""
    for case in cases():
        rank, limit = dist.get_rank(), LIMITS[case.x.dtype]
        expected = case.run(LocalDispatcher(), case.x, case.do, slice(None))
        for name, got in case.shared("fp8", case.x, case.do).items():
            want = expected[name]
            if name.startswith(("dw", "db")):
                summed = want.float()
                dist.all_reduce(summed)
                want = summed[experts_of(rank)]
            assert_error(name, got, want, ROUNDING if name in READ_AS_THEY_CROSSED else limit)
            if name.startswith("dw"):
                assert error(got, want) > 0.01, name


def check_nothing_anywhere() -> None:
    """No rank has a token, and then no token has an expert."""
    for tokens in (0, 3):
        case = Case(lambda rank, count: torch.full((count, K), E, device=device_of_rank()), torch.bfloat16, tokens)
        for name, found in case.shared("fp8", case.x, case.do).items():
            assert not found.any(), name


def check_what_is_not_finite_stays_in_its_token() -> None:
    """In x and in do; all other tokens have the bits that they had."""
    case = Case(ids_spread, torch.bfloat16)
    clean = case.shared("fp8", case.x, case.do)
    for bad in (float("nan"), float("inf")):
        x, do = case.x.clone(), case.do.clone()
        x[2:3, 130], do[3:4, 5] = bad, bad
        of_x, of_do = (case.shared("fp8", *given) for given in ((x, case.do), (case.x, do)))
        for name, found, token in (("o", of_x, 2), ("dx", of_do, 3)):
            is_finite = found[name].isfinite().all(1)
            assert not is_finite[token : token + 1].any()
            assert is_finite.sum() == max(0, len(x) - 1) or len(x) <= token
            assert torch.equal(found[name][is_finite], clean[name][is_finite])


def check_volume() -> None:
    """There exactly a byte a value and four a token, half of bf16 and the scale; back as without FP8."""
    rank, tokens = dist.get_rank(), 64
    case = Case(ids_spread, torch.bfloat16, tokens)
    ranks = ids_spread(rank, tokens) // (E // world())
    copies = sum(len(set(row) - {rank}) for row in ranks.tolist())
    logs = {}
    for precision in ("bf16", "fp8"):
        with counted() as logs[precision]:
            case.shared(precision, case.x, case.do)
    if not IS_COLLECTIVE:
        (x, o, do, x_again, dx), plain = logs["fp8"], logs["bf16"]
        assert x == do == x_again == (tokens * (D + 4), WORDS)
        assert (o, dx) == (plain[1], plain[4])
        return
    (sizes, pairs, x, o, do, dx, ds), plain = logs["fp8"], logs["bf16"]
    assert x == do == (copies * (D + 4), WORDS)
    assert [plain[2], plain[4]] == [(copies * 2 * D, D)] * 2
    assert (sizes, pairs, o, dx, ds) == (plain[0], plain[1], plain[3], plain[5], plain[6])


def check_without_gradients() -> None:
    case = Case(ids_spread, torch.bfloat16)
    expected = case.shared("fp8", case.x, case.do)["o"]
    w1, w2, b1, b2 = (weight[experts_of(dist.get_rank())] for weight in case.weights)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            dispatcher = dispatcher_in("fp8")
            here = dispatcher.dispatch(case.x, case.plan, case.scores)
            assert here.sent.precision == "fp8"
            sums = tilemoe.moe(here.x, w1, w2, here.plan, here.scores, b1=b1, b2=b2, precision="fp8")
            assert_error("o", dispatcher.combine(sums, here), expected, 0.01)


def config(d: int = D, n: int = N, precision: str = "fp8") -> MoEConfig:
    router = RouterConfig(aux_loss_coef=0.1)
    return MoEConfig(d, n, E, K, router=router, initializer_range=0.1, precision=precision, expert_bias=True)  # type: ignore[arg-type]


def token_rows(layer: MoE, x: Tensor) -> set[int]:
    """Elements of a row of what crosses in a forward, but for scores and sizes."""
    with counted() as log:
        layer(x)
    return {row for _, row in log if row > 3}


def check_layers_send_what_their_experts_compute_in() -> None:
    """By the layer's precision where its widths and dtype have FP8, under autocast by autocast's; else as ever."""
    device = device_of_rank()
    given = torch.randn(9, D, device=device)
    for cfg, dtype, rows in (
        (config(), torch.bfloat16, {WORDS, D}),
        (config(precision="bf16"), torch.bfloat16, {D}),
        (config(n=64), torch.bfloat16, {D}),
        (config(d=200), torch.bfloat16, {200}),
        (config(), torch.float64, {D}),
    ):
        _, layer = make_layers(cfg, dtype)
        assert token_rows(layer, given[:, : cfg.hidden_size].to(dtype)) == rows
    _, layer = make_layers(config(), torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        assert token_rows(layer, given) == {WORDS, D}
        assert layer(given).hidden.dtype == torch.bfloat16


def check_layer() -> None:
    """Of a module: outputs and dx of one process; h computed again in the backward changes no bit."""
    x = torch.randn(7 + dist.get_rank(), D).to(device_of_rank(), dtypes()[0])
    found = []
    for recompute in (None, "up_proj"):
        whole, divided = make_layers(config(), x.dtype, recompute)
        expected, got = run_layer(whole, x, 0), run_layer(divided, x, 0)
        for name, want in expected.items():
            assert_error(name, got[name], want, 0.02)
        found.append({**got, **{name: p.grad.to_local() for name, p in divided.experts.named_parameters()}})  # type: ignore[union-attr]
    assert_equal(*found)


def check_fsdp_and_compile() -> None:
    """FSDP2 gathers in bf16 what is computed in FP8; compiled, the same bits."""
    torch.manual_seed(0)
    layer = MoE(config()).to(device_of_rank())
    mesh = init_device_mesh(device_of_rank().type, (1, world()), mesh_dim_names=("fsdp", "expert"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    tilemoe.expert_parallel(layer, mesh, mp_policy=policy, exchange=transports())
    layer.router.to(torch.bfloat16)
    x = torch.randn(7, D, device=device_of_rank()).bfloat16()
    assert token_rows(layer, x) == {WORDS, D}
    compiled = torch.compile(layer, backend="eager")
    results = [run_layer(run, x, 0) for run in (layer, compiled)]
    assert_equal(*results)


def check_checkpointing() -> None:
    """A forward that is repeated in the backward, its exchanges included, makes the same bits."""
    _, layer = make_layers(config(), torch.bfloat16)
    found, sent = [], []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = torch.randn(11, D, generator=torch.Generator().manual_seed(dist.get_rank()))
        x = x.to(device_of_rank(), torch.bfloat16).requires_grad_()
        layer.zero_grad()
        with counted() as log:
            out = run(x)
            (out.hidden.float().square().sum() + out.aux_loss).backward()
        assert x.grad is not None
        gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in layer.parameters()]
        found.append([out.hidden.detach(), x.grad, *gradients])
        sent.append([row for _, row in log].count(WORDS))
    assert_equal(*found)
    assert sent == [2 if IS_COLLECTIVE else 3, 3], "x and do; and x once more"


def check_replayed_routing() -> None:
    """The record of a forward, given again, and other experts than the router's."""
    whole, layer = make_layers(config(), torch.bfloat16)
    x = torch.randn(TOKENS[dist.get_rank()], D).to(device_of_rank(), torch.bfloat16)
    recorded = layer(x)
    assert_equal(layer(x, expert_ids=recorded.expert_ids).hidden, recorded.hidden)
    others = (recorded.expert_ids + 1) % E
    found, expected = (each(x, expert_ids=others).hidden for each in (layer, whole))
    assert_error("o", found, expected, LIMITS[x.dtype])
    assert error(found, recorded.hidden) > 0.1


def check_errors() -> None:
    """Before anything is sent, as without expert parallelism."""
    _, layer = make_layers(config(n=64), torch.bfloat16)
    layer.experts.kernels = "torch_fp8"
    with counted() as log, pytest.raises(ValueError, match="cannot serve precision='fp8': n is not a multiple of 128"):
        layer(torch.randn(3, D).to(device_of_rank(), torch.bfloat16))
    assert log == []


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
