"""Which rows token rounding keeps: the router against the reference, and every bound, on hostile scores.

T tokens · E experts · K experts per token · m tile · f rows of an expert under top-K · r rows it computes
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_checks import assert_routes_as_the_reference, random, seeded
from test_rounding_route import TILE, config
from torch import Tensor

from tilemoe.config import ROUNDING_MODES, MoEConfig, RouterConfig, TokenRounding
from tilemoe.ops.rounding import round_rows
from tilemoe.plan import RoutingPlan
from tilemoe.routing.rounding import row_capacity
from tilemoe.routing.topk import Routing, route

SIGMOID = RouterConfig(score="sigmoid")


def tokens_of_expert(routing: Routing) -> list[list[int]]:
    starts, tokens = routing.plan.row_start_of_expert.tolist(), routing.plan.token_of_row.tolist()
    return [tokens[starts[e] : starts[e + 1]] for e in range(routing.plan.num_experts)]


def assert_plan_is_whole(plan: RoutingPlan) -> None:
    """Its arrays say the same in both directions, every one is int32, and nothing lies past R."""
    rows = int(plan.row_start_of_expert[-1])
    assert rows <= plan.capacity
    assert plan.pair_start_of_token is not None
    tensors = (plan.token_of_row, plan.pair_of_row, plan.row_of_pair, plan.pair_start_of_token)
    assert all(t.dtype == torch.int32 for t in (*tensors, plan.row_start_of_expert))
    assert plan.token_of_row.shape == plan.pair_of_row.shape == plan.row_of_pair.shape == (plan.capacity,)
    starts = plan.pair_start_of_token.tolist()
    assert (starts[0], starts[-1]) == (0, rows)
    row_of_pair = plan.row_of_pair.tolist()
    assert sorted(row_of_pair[:rows]) == list(range(rows))
    assert row_of_pair[rows:] == [-1] * (plan.capacity - rows)
    for token in range(plan.num_tokens):
        mine = row_of_pair[starts[token] : starts[token + 1]]
        assert mine == sorted(mine), "a token's rows are in the order of its experts"
        assert plan.token_of_row[mine].tolist() == [token] * len(mine)
    assert plan.pair_of_row.tolist() == list(range(rows)) + [0] * (plan.capacity - rows)
    assert not plan.token_of_row[rows:].any()


def assert_bounds(cfg: MoEConfig, plain: Routing, found: list[list[int]], token_mask: Tensor) -> None:
    """Every promise about how many rows there are and whose they are."""
    assert cfg.rounding is not None
    mode, most = cfg.rounding.mode, int(token_mask.sum()) // TILE * TILE
    f, r = plain.tokens_per_expert.tolist(), [len(tokens) for tokens in found]
    for expert, (tokens, of_top_k) in enumerate(zip(found, tokens_of_expert(plain), strict=True)):
        chosen = set(of_top_k)
        assert tokens == sorted(set(tokens))
        assert bool(token_mask[tokens].all())
        if most == 0:
            assert set(tokens) == chosen, "fewer real tokens than a tile: plain top-K"
            continue
        assert r[expert] % TILE == 0
        assert abs(r[expert] - f[expert]) < TILE
        assert r[expert] <= most
        # The chosen come first: with one of them missing, nobody else is there.
        assert chosen <= set(tokens) or set(tokens) <= chosen
        if f[expert] % TILE == 0 and f[expert] <= most:
            assert r[expert] == f[expert]
        if mode == "up":
            assert r[expert] >= f[expert] or r[expert] == most
        if mode == "down":
            assert r[expert] <= f[expert]
        if mode == "nearest" and r[expert] < most:
            assert abs(r[expert] - f[expert]) <= TILE // 2
    if mode == "balance" and most and max(r) < most:
        for expert in range(cfg.num_experts + 1):
            assert abs(sum(r[:expert]) - sum(f[:expert])) <= TILE // 2


def assert_rounded(logits: Tensor, cfg: MoEConfig, token_mask: Tensor | None = None) -> None:
    routing = assert_routes_as_the_reference(logits, cfg, token_mask)
    assert_plan_is_whole(routing.plan)
    plain = route(logits, replace(cfg, rounding=None), token_mask=token_mask)
    real = torch.ones(len(logits), dtype=torch.bool) if token_mask is None else token_mask
    assert_bounds(cfg, plain, tokens_of_expert(routing), real)


@st.composite
def routed(draw: st.DrawFn) -> tuple[Tensor, int, Tensor | None]:
    """Logits, K and a mask."""
    experts, tokens = draw(st.integers(1, 6)), draw(st.integers(16, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):  # a few values: ties everywhere, in every column
        logits = logits.round()
    skew = torch.rand(experts, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.6]))
    logits -= 2 * skew  # some experts are short of tokens
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return logits, draw(st.integers(1, experts)), mask


@settings(deadline=None, max_examples=150)
@given(routed(), st.sampled_from(ROUNDING_MODES), st.sampled_from([RouterConfig(), SIGMOID]))
def test_any_selection_is_rounded_as_the_reference_says_and_within_bounds(
    case: tuple[Tensor, int, Tensor | None], mode: str, router: RouterConfig
) -> None:
    logits, k, mask = case
    assert_rounded(logits, config(mode, logits.shape[1], k, router), mask)


HOSTILE: dict[str, tuple[Tensor, int, Tensor | None]] = {
    "E = 1": (torch.ones(40, 1).double(), 1, None),
    "K = E": (random(50, 5), 5, None),
    "T = tile": (random(16, 6), 2, None),
    "T one below two tiles": (random(31, 6), 2, None),
    "T one above a tile": (random(17, 6), 3, None),
    "all tokens on one expert": (torch.tensor([[0.0, 9.0, 0.0, 0.0]]).double().repeat(45, 1), 1, None),
    "all scores equal": (torch.zeros(70, 6).double(), 2, None),
    "scores that underflow": (random(70, 6) * 1e4, 2, None),
    "scores that differ in their last bit": (1 + torch.arange(420).view(70, 6).double() % 7 * 2.0**-52, 2, None),
    "experts that the router masks": (random(60, 6).index_fill(1, torch.tensor([2]), -torch.inf), 2, None),
    "no real token": (random(40, 6), 2, torch.zeros(40, dtype=torch.bool)),
    "fewer real tokens than a tile": (random(40, 6), 2, torch.arange(40) % 3 == 0),
}


@pytest.mark.parametrize("mode", ROUNDING_MODES)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_selections(name: str, mode: str) -> None:
    logits, k, mask = HOSTILE[name]
    assert_rounded(logits, config(mode, logits.shape[1], k, RouterConfig(scale=2.5, normalize=k > 1)), mask)


def two_experts(of_the_first: int, tokens: int) -> Tensor:
    logits = torch.tensor([[1.0, 0.0]]).repeat(tokens, 1)
    logits[of_the_first:] = torch.tensor([0.0, 1.0])
    return logits


def test_ties_go_to_the_lower_token() -> None:
    # 20 and 60 tokens: expert 0 drops the last 4 of equal scores, expert 1 adds the first 4 of the others.
    routing = route(two_experts(20, 80), config("nearest", 2, 1))
    assert tokens_of_expert(routing) == [list(range(16)), [*range(4), *range(20, 80)]]


def test_nearest_goes_down_at_one_half() -> None:
    assert route(two_experts(24, 64), config("nearest", 2, 1)).tokens_per_expert.tolist() == [16, 32]


def test_stochastic_keeps_the_mean_number_of_rows() -> None:
    logits, cfg, generator = random(200, 8, seed=5), config("stochastic", 8, 2), seeded()
    rows = torch.stack([route(logits, cfg, generator=generator).tokens_per_expert for _ in range(400)]).double()
    f = route(logits, replace(cfg, rounding=None)).tokens_per_expert.double()
    assert float((rows.mean(0) - f).abs().max()) < 5 * 8 / 400**0.5  # a draw's deviation is at most half a tile
    assert float(rows.std(0).max()) > 4


@pytest.mark.parametrize("mode", ["nearest", "nearest_score"])
def test_the_operator_is_what_its_schema_says(mode: str) -> None:
    for experts, mask in ((1, None), (5, torch.arange(40) % 4 != 0)):
        kept, ids = (scores := torch.softmax(random(40, experts).float(), 1)).topk(1)
        tensors = (scores, ids, kept, torch.rand(experts), mask)
        torch.library.opcheck(round_rows.registered, (*tensors, mode, 16, 1.0, 40 + 15 * experts))


def test_capacities_are_the_largest_row_counts() -> None:
    def capacity(mode: str) -> int:
        return row_capacity(TokenRounding(mode, 128), 16384, 8, 64)  # type: ignore[arg-type]

    pairs = 16384 * 8
    assert capacity("down") == pairs
    assert capacity("balance") == pairs + 64
    assert capacity("nearest") == pairs + 64 * 64
    assert capacity("up") == capacity("stochastic") == capacity("nearest_score") == pairs + 64 * 127
    assert row_capacity(TokenRounding("up", 128), 300, 64, 64) == 64 * 256
    with pytest.raises(ValueError, match=r"could become \d+ rows; row indices are int32"):
        row_capacity(TokenRounding("up", 128), 2**28, 16, 64)
