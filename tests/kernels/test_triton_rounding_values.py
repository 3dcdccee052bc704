"""Checks of token rounding in Triton, on a GPU and in Triton's interpreter.

T tokens · E experts · K experts per token
"""

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE, INTERPRETED

from tilemoe.config import ROUNDING_MODES, MoEConfig, RouterConfig, TokenRounding
from tilemoe.kernels.choose import choose_rounding
from tilemoe.kernels.rounding import triton as triton_rounding
from tilemoe.kernels.rounding.triton import RoundedRows
from tilemoe.kernels.router.triton import RouterSpec, select
from tilemoe.ops import rounding as rounding_ops
from tilemoe.ops.router import spec_args
from tilemoe.routing.rounding import row_capacity
from tilemoe.routing.topk import Routing, route

TILE = 16

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
on_a_gpu = pytest.mark.skipif(
    INTERPRETED, reason="takes sizes that the interpreter does not finish, and a GPU's choice"
)

LATE = RouterConfig(softmax_after_topk=True)
PLAIN = RouterConfig(normalize=False, scale=1.5)
SIGMOID = RouterConfig(score="sigmoid", scale=2.5)
PLAIN_SIGMOID = RouterConfig(score="sigmoid", normalize=False)


def config(mode: str, experts: int, k: int, router: RouterConfig | None = None, tile: int = TILE) -> MoEConfig:
    rounding = TokenRounding(mode, tile)  # type: ignore[arg-type]
    return MoEConfig(8, 8, experts, k, router=RouterConfig() if router is None else router, rounding=rounding)


def random_logits(tokens: int, experts: int) -> Tensor:
    """With experts that are short of tokens, and tokens that are alike."""
    generator = torch.Generator().manual_seed(0)
    logits = 1.5 * torch.randn(tokens, experts, generator=generator)
    logits -= (torch.arange(experts) % 5 == 3).float()
    logits[tokens // 2 : tokens // 2 + tokens // 4] = logits[: tokens // 4]
    return logits


def rounded(logits: Tensor, cfg: MoEConfig, uniform: Tensor | None = None, mask: Tensor | None = None) -> RoundedRows:
    """By the registered operator, on DEVICE; differentiable in the logits."""
    assert cfg.rounding is not None
    logits, uniform, mask = (None if t is None else t.to(DEVICE) for t in (logits, uniform, mask))
    assert logits is not None
    kept, ids, *_ = select(logits.detach(), None, mask, RouterSpec(*spec_args(cfg)))
    capacity = row_capacity(cfg.rounding, logits.shape[0], cfg.num_experts_per_tok, cfg.num_experts)
    spec = rounding_ops.spec_args(cfg, capacity)
    return RoundedRows(*rounding_ops.rounded_scores(logits, ids, kept, uniform, mask, *spec))


def uniform_of(cfg: MoEConfig, seed: int) -> Tensor:
    return torch.rand(cfg.num_experts, generator=torch.Generator().manual_seed(seed))


def assert_equals_torch(
    logits: Tensor, cfg: MoEConfig, mask: Tensor | None = None, seed: int = 0
) -> tuple[RoundedRows, Routing]:
    """Every index, every score and the gradient as by plain PyTorch on the CPU."""
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    rows = rounded(leaves[0], cfg, uniform_of(cfg, seed), mask)
    expected = route(leaves[1], cfg, generator=torch.Generator().manual_seed(seed), token_mask=mask)
    plan = expected.plan
    for name in ("row_start_of_expert", "token_of_row", "pair_of_row", "pair_start_of_token", "row_of_pair"):
        actual, wanted = getattr(rows, name).cpu(), getattr(plan, name)
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual, wanted), name
    plain = route(logits, cfg, training=False, token_mask=mask)
    assert torch.equal(rows.pairs_of_expert.cpu(), plain.tokens_per_expert)
    torch.testing.assert_close(rows.scores.cpu(), expected.scores, rtol=1e-5, atol=1e-9)

    d_scores = torch.randn(plan.capacity, generator=torch.Generator().manual_seed(1))
    (wanted,) = torch.autograd.grad(expected.scores, leaves[1], d_scores)
    d_scores[int(plan.row_start_of_expert[-1]) :] = float("nan")  # the tails hold nothing
    (found,) = torch.autograd.grad(rows.scores, leaves[0], d_scores.to(DEVICE))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    return rows, expected


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_every_mode(mode: str) -> None:
    """And of large logits."""
    assert_equals_torch(random_logits(130, 7), config(mode, 7, 3))
    assert_equals_torch(random_logits(130, 4) * 1e4, config(mode, 4, 2, PLAIN_SIGMOID))


@pytest.mark.parametrize(
    ("mode", "tokens", "experts", "k", "tile"),
    [
        ("up", 16, 6, 2, 16),
        ("nearest", 17, 1, 1, 16),
        ("nearest_score", 64, 5, 5, 64),
        ("nearest", 65, 40, 3, 32),
        ("nearest_score", 200, 3, 2, 64),
        ("down", 90, 40, 9, 16),
    ],
)
def test_sizes(mode: str, tokens: int, experts: int, k: int, tile: int) -> None:
    assert_equals_torch(random_logits(tokens, experts), config(mode, experts, k, tile=tile))


@pytest.mark.parametrize("mode", ["nearest", "nearest_score"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.6])
def test_masks(share: float, mode: str) -> None:
    logits, router = random_logits(150, 4), SIGMOID if mode == "nearest" else None
    mask = torch.rand(150, generator=torch.Generator().manual_seed(4)) < share
    hidden = logits.masked_fill(~mask[:, None], float("nan"))
    rows, _ = assert_equals_torch(hidden, config(mode, 4, 2, router), mask)
    if int(mask.sum()) < TILE:
        assert int(rows.row_start_of_expert[-1]) == 2 * int(mask.sum()), "nothing is rounded"


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(5, 12))]
)
def test_ties_of_any_shape(seed: int) -> None:
    """A few kinds of tokens, some experts at -inf, in every mode and under every router, some tokens left out.

    Tokens of a kind are alike to the bit wherever they are computed.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    tokens, experts = draw(16, 90), draw(2, 7)
    kinds = torch.randn(draw(1, 5), experts, generator=generator)
    kinds[:, 1:].masked_fill_(torch.rand(kinds[:, 1:].shape, generator=generator) < 0.3, float("-inf"))
    logits = kinds[torch.randint(0, len(kinds), (tokens,), generator=generator)]
    mask = torch.rand(tokens, generator=generator) < 0.8 if seed % 2 else None
    router = (None, LATE, PLAIN, SIGMOID, PLAIN_SIGMOID)[seed % 5]
    cfg = config(ROUNDING_MODES[seed % len(ROUNDING_MODES)], experts, draw(1, experts), router)
    assert_equals_torch(logits, cfg, mask, seed)


@pytest.mark.parametrize(
    ("mode", "tokens", "experts", "k", "tile"),
    [
        ("nearest", 300, 3, 2, 16),
        ("up", 130, 4, 2, 64),
        ("balance", 260, 2, 1, 128),
        pytest.param("up", 200, 9, 3, 64, marks=pytest.mark.thorough),
        pytest.param("down", 300, 3, 2, 16, marks=pytest.mark.thorough),
        pytest.param("nearest_score", 260, 2, 1, 128, marks=pytest.mark.thorough),
    ],
)
def test_lists_longer_than_registers_hold(
    mode: str, tokens: int, experts: int, k: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every list of keys is read in several parts, of scores that differ and of many that are equal."""
    monkeypatch.setattr(triton_rounding, "_BLOCKS", 4)
    monkeypatch.setattr(triton_rounding, "_ELEMENTS_OF_WARP", 8)
    monkeypatch.setattr(triton_rounding, "_NEAR", 16)
    monkeypatch.setattr(triton_rounding, "_LIST", dict.fromkeys((4, 8), 32))
    assert_equals_torch(random_logits(tokens, experts), config(mode, experts, k, tile=tile), seed=3)
    logits = torch.zeros(tokens, experts)
    logits[: tokens // 2, 1] = -1.0
    assert_equals_torch(logits, config(mode, experts, k, PLAIN, tile=tile), seed=2)


def test_balance_over_many_experts() -> None:
    rows, _ = assert_equals_torch(random_logits(60, 30), config("balance", 30, 4))
    assert abs(int(rows.row_start_of_expert[-1]) - 60 * 4) <= TILE // 2


def test_the_gradient_of_a_gradient_is_refused() -> None:
    logits = random_logits(40, 4).requires_grad_()
    scores = rounded(logits, config("nearest", 4, 2)).scores
    (grad,) = torch.autograd.grad(scores.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("router", [SIGMOID])
def test_the_operator_is_what_its_schema_says(router: RouterConfig) -> None:
    cfg = config("nearest_score", 4, 2, router)
    logits, mask = random_logits(40, 4).to(DEVICE), torch.ones(40, dtype=torch.bool, device=DEVICE)
    kept, ids, *_ = select(logits, None, mask, RouterSpec(*spec_args(cfg)))
    spec = rounding_ops.spec_args(cfg, 40 * 2 + 4 * 15)
    args = (logits.requires_grad_(), ids, kept, uniform_of(cfg, 0).to(DEVICE), mask, *spec)
    torch.library.opcheck(
        rounding_ops.rounded_scores.registered,
        args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


LOSSES = RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01)


def assert_same_pairs(found: Tensor, expected: Tensor) -> Tensor:
    """Of two (T, E) tables of scores, but for a few pairs: two scores that differ in their last bit may change places.

    Returns where they differ.
    """
    differs = (found != 0) != (expected != 0)
    assert int(differs.sum()) <= 16
    torch.testing.assert_close(found[~differs].to(expected.dtype), expected[~differs], rtol=1e-4, atol=1e-7)
    return differs


@on_a_gpu
@pytest.mark.parametrize("mode", ["nearest", "balance", "up", "down"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(4096, 64, 4), (16384, 512, 10), (3001, 128, 8), (40960, 60, 33)])
def test_route_equals_the_cpu(tokens: int, experts: int, k: int, mode: str) -> None:
    cfg = config(mode, experts, k, LOSSES, tile=128)
    on_cpu = (1.5 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))).requires_grad_()
    logits = on_cpu.detach().to(DEVICE).requires_grad_()
    found, expected = route(logits, cfg), route(on_cpu, cfg)
    assert torch.equal(found.tokens_per_expert.cpu(), expected.tokens_per_expert)
    torch.testing.assert_close(found.aux_loss.cpu(), expected.aux_loss, rtol=1e-4, atol=1e-6)
    differs = assert_same_pairs(found.dense().cpu(), expected.dense())
    weight = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(1)).masked_fill(differs, 0.0)
    (grad,) = torch.autograd.grad((found.dense() * weight.to(DEVICE)).sum() + found.aux_loss, logits)
    (exact,) = torch.autograd.grad((expected.dense() * weight).sum() + expected.aux_loss, on_cpu)
    torch.testing.assert_close(grad.cpu(), exact, rtol=1e-3, atol=1e-5)


@on_a_gpu
@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_fp64_logits_are_rounded_by_pytorch(mode: str) -> None:
    """By the operators of any device, and the fused kernels agree with them: the same draws, the same rows."""
    cfg, logits = config(mode, 64, 4, LOSSES, tile=128), torch.randn(4096, 64, device=DEVICE)
    assert choose_rounding(logits.device, torch.float64, 64).name == "torch"
    found, exact = (
        route(each, cfg, generator=torch.Generator(DEVICE).manual_seed(3)) for each in (logits, logits.double())
    )
    assert exact.scores.dtype == torch.float64
    assert torch.equal(found.tokens_per_expert, exact.tokens_per_expert)
    assert_same_pairs(found.dense(), exact.dense())


@on_a_gpu
def test_a_generator_on_the_cpu_is_one_line() -> None:
    logits, generator = torch.randn(4096, 64, device=DEVICE), torch.Generator().manual_seed(3)
    with pytest.raises(ValueError, match=r"generator is on cpu but the logits are on cuda.*device='cuda:0'"):
        route(logits, config("stochastic", 64, 4, tile=128), generator=generator)
