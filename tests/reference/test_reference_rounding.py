"""The reference's token rounding, on cases small enough to be worked out by hand."""

import pytest
import torch
from torch import Tensor

from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.reference import route
from tilemoe.reference.rounding import draw_uniform, round_rows

TILE = 16


def rows_of(counts: list[int], mode: str, tokens: int, uniform: list[float] | None = None) -> list[int]:
    """Rows of experts that ``counts`` of the tokens chose each, one expert a token; scores fall with the token."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([ids, torch.full((tokens - ids.shape[0],), len(counts))])[:, None]
    scores = torch.linspace(0.9, 0.1, tokens)[:, None].repeat(1, len(counts))
    draws = None if uniform is None else torch.tensor(uniform)
    rounding = TokenRounding(mode, TILE)  # type: ignore[arg-type]
    return [len(rows) for rows in round_rows(scores, ids, scores[:, :1], rounding, uniform=draws)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("nearest", [0, 0, 16, 16, 32]),
        ("up", [0, 16, 16, 16, 32]),
        ("down", [0, 0, 0, 16, 16]),
        # z: 0, then down to -8 (a tie), up to -1, stays, up from 25 to 32 would be 6, which is below 10.
        ("balance", [0, 0, 16, 16, 32]),
    ],
)
def test_counts(mode: str, expected: list[int]) -> None:
    assert rows_of([0, 8, 9, 16, 25], mode, 90) == expected


def test_balance_makes_up_for_what_the_experts_before_lost() -> None:
    assert rows_of([4] * 8, "balance", 64) == [0, 0, 16, 0, 0, 0, 16, 0]
    assert rows_of([4] * 8, "nearest", 64) == [0] * 8


def test_stochastic_goes_up_with_the_remainder() -> None:
    assert rows_of([20, 20, 20, 16], "stochastic", 80, [0.24, 0.25, 0.99, 0.0]) == [32, 16, 16, 16]


def test_rows_are_clamped_to_whole_tiles_of_tokens() -> None:
    assert rows_of([40], "up", 40) == [32]
    assert rows_of([33], "nearest", 40) == [32]
    assert rows_of([15], "up", 15) == [15]


def test_the_best_are_kept_and_the_next_best_are_added() -> None:
    scores = torch.zeros(40, 2)
    scores[:18, 0] = torch.arange(18) / 100 + 0.5
    scores[18:, 1] = 0.5
    scores[18:, 0] = torch.arange(22) / 100
    ids = (torch.arange(40) >= 18).long()[:, None]
    down, _ = round_rows(scores, ids, scores.amax(1, keepdim=True), TokenRounding("nearest", TILE))
    assert down == list(range(2, 18))
    up, _ = round_rows(scores, ids, scores.amax(1, keepdim=True), TokenRounding("up", TILE))
    assert up == [*range(18), *range(26, 40)]


def test_draws_are_those_of_torch_rand() -> None:
    drawn = draw_uniform(5, TokenRounding("stochastic"), torch.Generator().manual_seed(3))
    assert drawn is not None
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(3)))
    assert draw_uniform(5, TokenRounding("nearest"), None) is None


def config(mode: str, **router: object) -> MoEConfig:
    rounding = TokenRounding(mode, TILE)  # type: ignore[arg-type]
    return MoEConfig(8, 8, 4, 2, router=RouterConfig(**router), rounding=rounding)  # type: ignore[arg-type]


def random_logits(tokens: int) -> Tensor:
    return torch.randn(tokens, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_padded_pair_carries_the_score_of_all_experts_times_scale() -> None:
    logits = random_logits(40)
    plain = route(logits, config("up", scale=2.5), training=False).scores
    rounded = route(logits, config("up", scale=2.5)).scores
    added = (plain == 0) & (rounded != 0)
    assert bool(added.any())
    assert torch.equal(rounded[plain != 0], plain[plain != 0])
    torch.testing.assert_close(rounded[added], 2.5 * torch.softmax(logits, dim=1)[added])


def test_losses_count_from_before_the_rounding() -> None:
    cfg = config("down", aux_loss_coef=0.1)
    logits = random_logits(40)
    rounded, plain = route(logits, cfg), route(logits, cfg, training=False)
    assert rounded.tokens_per_expert.tolist() != plain.tokens_per_expert.tolist()
    assert float(rounded.aux_loss) == float(plain.aux_loss)
