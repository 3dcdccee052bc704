"""The oracle's router on examples small enough to be worked out by hand."""

import math

import pytest
import torch

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.reference import route


def config(num_experts: int, k: int, **router: object) -> MoEConfig:
    return MoEConfig(8, 8, num_experts, k, router=RouterConfig(**router))  # type: ignore[arg-type]


def log_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def scores_of(logits: torch.Tensor, cfg: MoEConfig, **options: torch.Tensor) -> list[float]:
    return route(logits, cfg, **options).scores[0].tolist()


def test_softmax_scores_kept_normalised_and_scaled() -> None:
    logits = log_of(0.1, 0.4, 0.3, 0.2)
    assert scores_of(logits, config(4, 2, normalize=False)) == pytest.approx([0, 0.4, 0.3, 0])
    assert scores_of(logits, config(4, 2)) == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert scores_of(logits, config(4, 2, scale=2.5)) == pytest.approx([0, 10 / 7, 7.5 / 7, 0])
    assert scores_of(logits, config(4, 2, softmax_after_topk=True)) == pytest.approx([0, 4 / 7, 3 / 7, 0])


def test_sigmoid_scores_and_a_bias_that_only_selects() -> None:
    logits = torch.tensor([[0.0, math.log(3), -math.log(3)]], dtype=torch.float64)  # sigmoids 1/2, 3/4, 1/4
    assert scores_of(logits, config(3, 2, score="sigmoid", normalize=False)) == pytest.approx([0.5, 0.75, 0])
    bias = torch.tensor([0.0, 0.0, 1.0])
    biased = config(3, 2, score="sigmoid", selection_bias=True)
    assert scores_of(logits, biased, selection_bias=bias) == pytest.approx([0, 0.75, 0.25])


def test_groups_are_worth_their_two_best() -> None:
    # Group 1 holds the single best expert, group 0 the better pair.
    logits = torch.tensor([[2.0, 1.9, -9.0, 2.5, 0.0, -9.0]], dtype=torch.float64)
    cfg = config(6, 2, score="sigmoid", normalize=False, num_groups=2, top_groups=1)
    expected = torch.sigmoid(logits)[0].tolist()
    assert scores_of(logits, cfg) == pytest.approx([expected[0], expected[1], 0, 0, 0, 0])


def test_ties_go_to_the_lower_expert() -> None:
    assert scores_of(torch.zeros(1, 4), config(4, 2)) == pytest.approx([0.5, 0.5, 0, 0])


def test_losses_by_hand() -> None:
    logits = torch.cat([log_of(0.6, 0.4, 0.0), log_of(0.2, 0.3, 0.5), log_of(1.0, 0.0, 0.0)])
    routing = route(logits, config(3, 1, aux_loss_coef=0.5), token_mask=torch.tensor([True, True, False]))
    assert routing.tokens_per_expert.tolist() == [1, 0, 1]
    # f = (1/2, 0, 1/2), P = (0.4, 0.35, 0.25): 0.5 * 3 * (0.2 + 0.125)
    assert float(routing.aux_loss) == pytest.approx(0.4875)
    shifted = logits[:2] + torch.tensor([[1.0], [3.0]])  # logsumexp 1 and 3
    assert float(route(shifted, config(3, 1, z_loss_coef=0.1)).aux_loss) == pytest.approx(0.1 * (1 + 9) / 2)


def test_masked_tokens_are_left_out_entirely() -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, False, True, False])
    cfg = config(3, 2, aux_loss_coef=1.0, z_loss_coef=1.0)
    masked, alone = route(logits, cfg, token_mask=mask), route(logits[mask], cfg)
    assert torch.equal(masked.scores[mask], alone.scores)
    assert not masked.scores[~mask].any()
    assert torch.equal(masked.tokens_per_expert, alone.tokens_per_expert)
    assert masked.aux_loss == alone.aux_loss
