"""Replayed expert ids: the router's scores, losses and gradients for them, what is refused, and the record of them.

T tokens · E experts · K experts per token
"""

from typing import Any

import pytest
import torch
from helpers import raises_one_line
from routing_checks import assert_routes_as_the_reference, random, selection_bias_for
from torch import Tensor

from tilemoe.config import ROUTER_PRESETS, MoEConfig, RouterConfig, TokenRounding
from tilemoe.routing.replay import RoutingRecord
from tilemoe.routing.topk import Routing, route

T, E, K = 20, 16, 3


def config(router: RouterConfig, **options: Any) -> MoEConfig:
    return MoEConfig(8, 8, E, K, router=router, **options)


def any_ids(tokens: int = T, seed: int = 5) -> Tensor:
    """K different experts of each token, whatever its logits say."""
    return random(tokens, E, seed=seed).argsort(dim=1)[:, :K]


def replayed(logits: Tensor, cfg: MoEConfig, ids: Tensor, **options: Any) -> Routing:
    return route(logits, cfg, selection_bias=selection_bias_for(cfg), expert_ids=ids, **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("preset", sorted(ROUTER_PRESETS))
def test_any_ids_have_the_references_scores_losses_and_gradients(preset: str, masked: bool) -> None:
    """Groups and a bias would not have chosen these."""
    mask = random(T) < 0.5 if masked else None
    ids = any_ids()
    routing = assert_routes_as_the_reference(random(T, E, seed=1), config(RouterConfig.preset(preset)), mask, ids)
    assert routing.expert_ids is not None
    assert torch.equal(routing.expert_ids, ids if mask is None else ids.masked_fill(~mask[:, None], E))


@pytest.mark.parametrize("preset", ["gpt_oss", "olmoe", "glm4_moe"])
def test_experts_that_are_all_masked_score_zero(preset: str) -> None:
    cfg, ids = config(RouterConfig.preset(preset)), any_ids()
    logits = random(T, E, seed=1).index_put(
        (torch.arange(0, T, 2)[:, None], ids[::2]), torch.tensor(-torch.inf).double()
    )
    dense = replayed(logits.requires_grad_(), cfg, ids).dense()
    assert not dense[::2].any()
    assert dense[1::2].any(dim=1).all()
    assert torch.autograd.grad(dense.square().sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("preset", sorted(ROUTER_PRESETS))
def test_replaying_what_was_chosen_changes_no_bit(preset: str) -> None:
    cfg = config(RouterConfig.preset(preset))
    logits = random(T, E, dtype=torch.float32)
    mask = torch.arange(T) % 3 > 0
    first = route(logits, cfg, selection_bias=selection_bias_for(cfg), token_mask=mask)
    assert first.expert_ids is not None
    again = replayed(logits, cfg, first.expert_ids, token_mask=mask)  # ids of masked tokens are E, and are not read
    for name in ("scores", "tokens_per_expert", "aux_loss", "expert_ids"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert torch.equal(first.plan.token_of_row, again.plan.token_of_row)


def test_nothing_is_rounded_where_ids_are_replayed() -> None:
    cfg = config(RouterConfig(), rounding=TokenRounding("up", 16))
    logits, ids = random(T, E), any_ids()
    routing = replayed(logits, cfg, ids)
    assert torch.equal(routing.tokens_per_expert, ids.flatten().bincount(minlength=E).int())
    assert not torch.equal(route(logits, cfg).tokens_per_expert, routing.tokens_per_expert)
    chosen = route(logits, cfg).expert_ids  # of the selection that was rounded afterwards
    assert chosen is not None
    assert torch.equal(chosen, route(logits, cfg, training=False).expert_ids)


def test_ids_that_nobody_can_check_read_nothing_outside() -> None:
    """As on a GPU: an id past the last expert is skipped, and the other tokens' scores are theirs."""
    cfg = config(RouterConfig())
    logits, ids = random(T, E, dtype=torch.float32), any_ids()
    wrong = ids.clone()
    wrong[3, 1] = E + 1000
    got = torch.compile(route, backend="aot_eager", fullgraph=True)(logits, cfg, expert_ids=wrong)
    assert int(got.tokens_per_expert.sum()) == T * K - 1
    others = torch.arange(T) != 3
    assert torch.equal(got.scores[others], replayed(logits, cfg, ids).scores[others])


@pytest.mark.parametrize("preset", [name for name, router in ROUTER_PRESETS.items() if router.score == "softmax"])
def test_a_tokens_experts_and_scores_do_not_depend_on_the_others(preset: str) -> None:
    """To the bit, given its logits, and its gradient neither. PyTorch's sigmoid depends on the place in memory."""
    cfg = config(RouterConfig.preset(preset))
    logits, d_scores = random(50, E, dtype=torch.float32), random(50, K, seed=2, dtype=torch.float32)

    def run(tokens: Tensor, ids: Tensor | None) -> list[Tensor]:
        part = logits[tokens].requires_grad_()
        routing = route(part, cfg, selection_bias=selection_bias_for(cfg), expert_ids=ids)
        assert routing.expert_ids is not None
        return [
            routing.expert_ids,
            routing.scores.detach(),
            *torch.autograd.grad(routing.scores, part, d_scores[tokens]),
        ]

    for ids in (None, any_ids(50)):
        whole = run(torch.arange(50), ids)
        for tokens in (torch.tensor([7]), torch.arange(20, 33), random(50).argsort()):
            for got, want in zip(run(tokens, None if ids is None else ids[tokens]), whole, strict=True):
                assert torch.equal(got, want[tokens])


GOOD = any_ids()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (GOOD.clone().index_fill_(0, torch.tensor([4]), E), r"expert_ids must lie in \[0, 16\), got 16; leave tokens"),
        (GOOD.clone().index_fill_(0, torch.tensor([4]), 7), "expert_ids names expert 7 twice for one token"),
    ],
)
def test_wrong_ids_are_one_line(ids: Any, message: str) -> None:
    with raises_one_line(message):
        route(random(T, E), config(RouterConfig()), expert_ids=ids)


def test_a_record_joins_the_calls_of_a_sequence() -> None:
    record, calls = RoutingRecord(), [random(2, 5, E, seed=1), random(2, 1, E, seed=2), random(2, 1, E, seed=3)]
    layers = [[call.argsort(dim=-1)[..., first : first + K] for call in calls] for first in (0, 4)]
    for step in range(3):  # as a model calls them
        record.add("one", layers[0][step])
        record.add("two", layers[1][step].flatten(0, 1))  # (T, K), as layers give them
    ids = record.expert_ids(batch_size=2)
    assert ids.shape == (2, 2, 7, K)
    for layer in range(2):
        assert torch.equal(ids[layer], torch.cat(layers[layer], dim=1))


def test_a_record_that_does_not_fit_is_one_line() -> None:
    with raises_one_line("the record is empty; pass it as record="):
        RoutingRecord().expert_ids(1)
    record = RoutingRecord()
    record.add("one", any_ids(6))
    for batch_size, message in ((0, "must be an integer >= 1, got 0"), (4, r"\(4\) must divide the 6 tokens")):
        with raises_one_line(f"batch_size {message}"):
            record.expert_ids(batch_size)
    record.add("two", any_ids(12))
    with raises_one_line(r"the record's layers have \[3, 6\] tokens per sequence"):
        record.expert_ids(2)
