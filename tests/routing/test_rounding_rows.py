"""Which rows token rounding keeps: the fast way against the reference, and every bound, on hostile scores.

T tokens · E experts · K experts per token · m tile · f rows of an expert under top-K · r rows it computes
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tilemoe.config import ROUNDING_MODES, TokenRounding
from tilemoe.ops.rounding import round_rows
from tilemoe.plan import RoutingPlan
from tilemoe.reference import rounding as reference
from tilemoe.routing.rounding import row_capacity


@dataclass(frozen=True, eq=False)
class Selection:
    """What a router hands over: scores (T, E) of all, the K chosen experts and what they carry."""

    all_scores: Tensor
    expert_ids: Tensor
    kept_scores: Tensor
    token_mask: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.all_scores.shape[0]

    @property
    def num_experts(self) -> int:
        return self.all_scores.shape[1]

    @property
    def real_tokens(self) -> int:
        return self.num_tokens if self.token_mask is None else int(self.token_mask.sum())

    def pairs_of_expert(self) -> list[int]:
        return [int((self.expert_ids == expert).sum()) for expert in range(self.num_experts)]


def select(all_scores: Tensor, k: int, scale: float = 1.0, token_mask: Tensor | None = None) -> Selection:
    """Top-K with ties to the lower expert, normalised."""
    ids = all_scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    kept = all_scores.gather(1, ids)
    kept = kept / (kept.sum(1, keepdim=True) + 1e-20) * scale
    if token_mask is not None:
        ids = ids.masked_fill(~token_mask[:, None], all_scores.shape[1])
        kept = kept.masked_fill(~token_mask[:, None], 0.0)
    return Selection(all_scores, ids, kept, token_mask)


def rounded_plan(
    selection: Selection, rounding: TokenRounding, uniform: Tensor | None = None, scale: float = 1.0
) -> RoutingPlan:
    num_tokens, num_experts = selection.all_scores.shape
    capacity = row_capacity(rounding, num_tokens, selection.expert_ids.shape[1], num_experts)
    before = (selection.all_scores.clone(), selection.kept_scores.clone())
    *tensors, f = round_rows(
        selection.all_scores,
        selection.expert_ids,
        selection.kept_scores,
        uniform,
        selection.token_mask,
        rounding.mode,
        rounding.tile,
        scale,
        capacity,
    )
    assert torch.equal(before[0], selection.all_scores)
    assert torch.equal(before[1], selection.kept_scores)
    assert f.dtype == torch.int32
    assert f.tolist() == selection.pairs_of_expert()
    return RoutingPlan(*tensors, num_experts, num_tokens)


def tokens_of_expert(plan: RoutingPlan) -> list[list[int]]:
    starts, tokens = plan.row_start_of_expert.tolist(), plan.token_of_row.tolist()
    return [tokens[starts[e] : starts[e + 1]] for e in range(plan.num_experts)]


def assert_plan_is_whole(plan: RoutingPlan) -> None:
    """Its arrays say the same in both directions, every one is int32, and nothing lies past R."""
    rows = int(plan.row_start_of_expert[-1])
    assert rows <= plan.capacity
    assert plan.pair_start_of_token is not None
    tensors = (plan.token_of_row, plan.pair_of_row, plan.row_of_pair, plan.pair_start_of_token)
    assert all(t.dtype == torch.int32 for t in (*tensors, plan.row_start_of_expert))
    assert plan.token_of_row.shape == plan.pair_of_row.shape == plan.row_of_pair.shape == (plan.capacity,)
    starts = plan.pair_start_of_token.tolist()
    assert starts[0] == 0
    assert starts[-1] == rows
    row_of_pair = plan.row_of_pair.tolist()
    assert sorted(row_of_pair[:rows]) == list(range(rows))
    assert row_of_pair[rows:] == [-1] * (plan.capacity - rows)
    for token in range(plan.num_tokens):
        mine = row_of_pair[starts[token] : starts[token + 1]]
        assert mine == sorted(mine), "a token's rows are in the order of its experts"
        assert plan.token_of_row[mine].tolist() == [token] * len(mine)
    assert plan.pair_of_row.tolist() == list(range(rows)) + [0] * (plan.capacity - rows)
    assert not plan.token_of_row[rows:].any()


def assert_bounds(selection: Selection, rounding: TokenRounding, found: list[list[int]]) -> None:
    """Every promise about how many rows there are and whose they are."""
    mode, tile, real = rounding.mode, rounding.tile, selection.real_tokens
    most = real // tile * tile
    f, r = selection.pairs_of_expert(), [len(tokens) for tokens in found]
    for expert, tokens in enumerate(found):
        assert tokens == sorted(set(tokens))
        chosen = set((selection.expert_ids == expert).any(1).nonzero().flatten().tolist())
        if most == 0:
            assert set(tokens) == chosen, "fewer real tokens than a tile: plain top-K"
            continue
        assert r[expert] % tile == 0
        assert abs(r[expert] - f[expert]) < tile
        assert r[expert] <= most
        # The chosen come first: with one of them missing, nobody else is there.
        assert chosen <= set(tokens) or set(tokens) <= chosen
        if selection.token_mask is not None:
            assert bool(selection.token_mask[tokens].all())
        if f[expert] % tile == 0 and f[expert] <= most:
            assert r[expert] == f[expert]
        if mode == "up":
            assert r[expert] >= f[expert] or r[expert] == most
        if mode == "down":
            assert r[expert] <= f[expert]
        if mode == "nearest" and r[expert] < most:
            assert abs(r[expert] - f[expert]) <= tile // 2
    if mode == "balance" and most and max(r) < most:
        assert abs(sum(r) - sum(f)) <= tile // 2
        for expert in range(selection.num_experts):
            assert abs(sum(r[:expert]) - sum(f[:expert])) <= tile // 2


def assert_rounds_as_the_reference(
    selection: Selection, rounding: TokenRounding, uniform: Tensor | None = None, scale: float = 1.0
) -> RoutingPlan:
    plan = rounded_plan(selection, rounding, uniform, scale)
    expected = reference.round_rows(
        selection.all_scores,
        selection.expert_ids,
        selection.kept_scores,
        rounding,
        scale=scale,
        uniform=uniform,
        token_mask=selection.token_mask,
    )
    assert tokens_of_expert(plan) == expected
    assert_plan_is_whole(plan)
    assert_bounds(selection, rounding, expected)
    return plan


def uniform_for(rounding: TokenRounding, num_experts: int, seed: int = 0) -> Tensor | None:
    return reference.draw_uniform(num_experts, rounding, torch.Generator().manual_seed(seed))


def random_scores(tokens: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(1.5 * logits, dim=1).to(dtype)


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    experts, tokens = draw(st.integers(1, 6)), draw(st.integers(16, 90))
    k = draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if draw(st.booleans()):
        # A few values, zero among them: ties everywhere, in every column.
        values = torch.tensor([0.0, 0.125, 0.25, 1.0])
        scores = values[torch.randint(0, 4, (tokens, experts), generator=generator)]
    else:
        scores = torch.rand(tokens, experts, generator=generator)
    skew = torch.rand(experts, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.6]))
    scores = scores * torch.where(skew, 0.5, 1.0)  # some experts are short of tokens
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
    return select(scores.to(draw(st.sampled_from([torch.float32, torch.float64]))), k, 1.0, mask)


@settings(deadline=None, max_examples=200)
@given(selections(), st.sampled_from(ROUNDING_MODES), st.integers(0, 2**16))
def test_any_selection_is_rounded_as_the_reference_says_and_within_bounds(
    selection: Selection, mode: str, seed: int
) -> None:
    rounding = TokenRounding(mode, 16)  # type: ignore[arg-type]
    assert_rounds_as_the_reference(selection, rounding, uniform_for(rounding, selection.num_experts, seed))


HOSTILE = {
    "E = 1": select(torch.ones(40, 1), 1),
    "K = E": select(random_scores(50, 5), 5),
    "T = tile": select(random_scores(16, 6), 2),
    "T one below two tiles": select(random_scores(31, 6), 2),
    "T one above a tile": select(random_scores(17, 6), 3),
    "all tokens on one expert": select(torch.tensor([[0.0, 1.0, 0.0, 0.0]]).repeat(45, 1), 1),
    "all scores equal": select(torch.full((70, 6), 1 / 6), 2),
    "all scores zero": select(torch.zeros(70, 6), 2),
    "scores far below one": select(random_scores(70, 6) * 1e-30, 2),
    "no real token": select(random_scores(40, 6), 2, token_mask=torch.zeros(40, dtype=torch.bool)),
    "fewer real tokens than a tile": select(random_scores(40, 6), 2, token_mask=torch.arange(40) % 3 == 0),
    "scores that differ in their last bit": select(0.25 * (1 + torch.arange(420).view(70, 6) % 7 * 2.0**-23), 2),
}


@pytest.mark.parametrize("mode", ROUNDING_MODES)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_selections(name: str, mode: str) -> None:
    rounding = TokenRounding(mode, 16)  # type: ignore[arg-type]
    for seed in range(3):
        uniform = uniform_for(rounding, HOSTILE[name].num_experts, seed)
        assert_rounds_as_the_reference(HOSTILE[name], rounding, uniform, scale=2.5)


def test_ties_go_to_the_lower_token() -> None:
    # 20 and 60 tokens: expert 0 drops the last 4 of equal scores, expert 1 adds the first 4 of the others.
    scores = torch.tensor([[0.5, 0.25]]).repeat(80, 1)
    scores[20:] = torch.tensor([0.25, 0.5])
    selection = select(scores, 1)
    plan = rounded_plan(selection, TokenRounding("nearest", 16))
    assert tokens_of_expert(plan) == [list(range(16)), [*range(4), *range(20, 80)]]


def test_nearest_goes_down_at_one_half() -> None:
    scores = torch.tensor([[0.5, 0.25]]).repeat(64, 1)
    scores[24:] = torch.tensor([0.25, 0.5])
    plan = rounded_plan(select(scores, 1), TokenRounding("nearest", 16))
    assert plan.rows_per_expert.tolist() == [16, 32]


def test_stochastic_keeps_the_mean_number_of_rows() -> None:
    selection = select(random_scores(200, 8, seed=5), 2)
    generator = torch.Generator().manual_seed(0)
    rounding = TokenRounding("stochastic", 16)
    draws = [torch.rand(8, generator=generator) for _ in range(400)]
    rows = torch.stack([rounded_plan(selection, rounding, draw).rows_per_expert for draw in draws]).double()
    f = torch.tensor(selection.pairs_of_expert()).double()
    assert float((rows.mean(0) - f).abs().max()) < 5 * 8 / 400**0.5  # a draw's deviation is at most half a tile
    assert float(rows.std(0).max()) > 4


def test_nearest_score_goes_up_with_the_share_of_the_scores() -> None:
    # f = 24: eight dropped rows carry 3/4 of what the sixteen around f carry, so it goes up for draws below 3/4.
    scores = torch.full((64, 2), 0.1)
    scores[:24, 0], scores[24:, 1] = 0.3, 0.9
    selection = Selection(scores, (scores[:, 0] < 0.2).long()[:, None], torch.full((64, 1), 0.3))
    for draw, rows in ((0.0, 32), (0.74, 32), (0.76, 16)):
        plan = rounded_plan(selection, TokenRounding("nearest_score", 16), torch.tensor([draw, 0.0]))
        assert int(plan.rows_per_expert[0]) == rows, draw


@pytest.mark.parametrize("mode", ["nearest", "nearest_score"])
def test_the_operator_is_what_its_schema_says(mode: str) -> None:
    for experts, mask in ((1, None), (5, torch.arange(40) % 4 != 0)):
        selection = select(random_scores(40, experts), 1, token_mask=mask)
        tensors = (selection.all_scores, selection.expert_ids, selection.kept_scores, torch.rand(experts), mask)
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
