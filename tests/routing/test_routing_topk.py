"""The router against its reference, on hostile logits, what it refuses, and the balancing of its selection bias.

T tokens · E experts · K experts per token
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_checks import assert_routes_as_the_reference, random, selection_bias_for
from torch import Tensor

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.routing.balance import update_selection_bias
from tilemoe.routing.build import plan_pairs
from tilemoe.routing.topk import Routing, route, router_entropy


def config(num_experts: int, k: int, router: RouterConfig | None = None) -> MoEConfig:
    return MoEConfig(8, 8, num_experts, k, router=RouterConfig() if router is None else router)


@st.composite
def router_configs(draw: st.DrawFn) -> MoEConfig:
    num_groups = draw(st.sampled_from([1, 1, 2, 3]))
    top_groups = draw(st.integers(1, num_groups))
    group_size = draw(st.integers(1 if num_groups == 1 else 2, 8 // num_groups))
    k = draw(st.integers(1, top_groups * group_size))
    score = draw(st.sampled_from(["softmax", "sigmoid"]))
    router = RouterConfig(
        score=score,
        softmax_after_topk=score == "softmax" and draw(st.booleans()),
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        selection_bias=draw(st.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        aux_loss_coef=draw(st.sampled_from([0.0, 0.01])),
        z_loss_coef=draw(st.sampled_from([0.0, 0.001])),
    )
    return config(num_groups * group_size, k, router)


@settings(deadline=None, max_examples=150)
@given(st.data(), router_configs(), st.integers(0, 6), st.booleans())
def test_any_router_equals_the_reference(data: st.DataObject, cfg: MoEConfig, num_tokens: int, masked: bool) -> None:
    # Few distinct values, so that ties are the rule, and masked experts among them.
    value = st.sampled_from([-2.0, 0.0, 0.5, 1.0, float("-inf")])
    row = st.lists(value, min_size=cfg.num_experts, max_size=cfg.num_experts).filter(lambda r: max(r) > -10)
    rows = data.draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    logits = torch.tensor(rows, dtype=torch.float64).view(num_tokens, cfg.num_experts)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), dtype=torch.bool)
    assert_routes_as_the_reference(logits, cfg, mask if masked else None)


LOSSES = RouterConfig(aux_loss_coef=0.01, z_loss_coef=0.001)


@pytest.mark.parametrize(
    ("logits", "cfg"),
    [
        pytest.param(random(7, 5), config(5, 5, LOSSES), id="K = E"),
        pytest.param(random(7, 1), config(1, 1, LOSSES), id="E = 1"),
        pytest.param(random(1, 6), config(6, 2, LOSSES), id="T = 1"),
        pytest.param(random(0, 6), config(6, 2, LOSSES), id="T = 0"),
        pytest.param(torch.zeros(9, 6), config(6, 2, LOSSES), id="equal logits"),
        pytest.param(torch.full((9, 6), -1e30), config(6, 2), id="equal, very negative logits"),
        pytest.param(random(9, 6) * 1e4, config(6, 2), id="scores that underflow"),
        pytest.param(random(9, 6) * 1e4, config(6, 2, RouterConfig(score="sigmoid")), id="sigmoids that underflow"),
    ],
)
def test_hostile_logits(logits: Tensor, cfg: MoEConfig) -> None:
    routing = assert_routes_as_the_reference(logits, cfg)
    assert routing.scores.shape == (logits.shape[0], cfg.num_experts_per_tok)


def test_ties_go_to_the_lower_expert_best_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]]).repeat(200, 1)
    plan = route(logits, config(5, 3)).plan
    expert_of_row = torch.repeat_interleave(torch.arange(5), plan.rows_per_expert)
    assert expert_of_row[plan.row_of_pair.long()].view(-1, 3)[:2].tolist() == [[1, 3, 2], [0, 1, 2]]
    assert plan.rows_per_expert.tolist() == [200, 400, 400, 200, 0]


@pytest.mark.parametrize(
    "router", [RouterConfig(), RouterConfig(softmax_after_topk=True), RouterConfig(score="sigmoid")]
)
def test_experts_masked_by_minus_infinity_come_last_and_score_zero(router: RouterConfig) -> None:
    logits = random(50, 6)
    logits[:, [0, 2, 3]] = float("-inf")
    logits[:, 5] = -1e4  # underflows to a score of 0, and still comes before a masked expert
    routing = assert_routes_as_the_reference(logits, config(6, 2, router))
    assert routing.tokens_per_expert[[0, 2, 3]].tolist() == [0, 0, 0]
    crowded = route(logits, config(6, 4, router))
    assert crowded.tokens_per_expert.tolist() == [50, 50, 0, 0, 50, 50]
    assert not crowded.dense()[:, 0].any()


def test_groups_of_masked_experts_alone_never_repeat_an_expert() -> None:
    cfg = config(6, 4, RouterConfig(score="sigmoid", num_groups=3, top_groups=2))
    logits = random(5, 6)
    logits[:, 2:] = float("-inf")
    routing = assert_routes_as_the_reference(logits, cfg)
    assert routing.tokens_per_expert.tolist() == [5, 5, 5, 5, 0, 0]


def test_a_biased_masked_expert_stays_masked() -> None:
    cfg = config(4, 1, RouterConfig(score="sigmoid", selection_bias=True))
    logits = torch.tensor([[float("-inf"), 0.0, 1.0, 2.0]])
    routing = route(logits, cfg, selection_bias=torch.tensor([5.0, 0.5, 0.0, float("-inf")]))
    assert routing.tokens_per_expert.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "granite_moe"])
def test_all_tokens_masked_gives_nothing_and_no_nan(name: str) -> None:
    cfg = config(16, 4, RouterConfig.preset(name))
    logits = torch.full((5, 16), float("nan"), requires_grad=True)  # padding may hold anything
    routing = route(logits, cfg, selection_bias=selection_bias_for(cfg), token_mask=torch.zeros(5, dtype=torch.bool))
    assert not routing.scores.any()
    assert not routing.tokens_per_expert.any()
    assert float(routing.aux_loss.detach()) == 0.0
    assert (routing.plan.row_of_pair == -1).all()
    (grad,) = torch.autograd.grad(routing.scores.sum() + routing.aux_loss, logits)
    assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_routed_in_fp32_also_under_autocast(dtype: torch.dtype) -> None:
    cfg = config(16, 4, LOSSES)
    logits = random(33, 16, dtype=dtype)
    exact = route(logits.float(), cfg)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = route(logits, cfg)
    assert routing.scores.dtype == torch.float32
    assert torch.equal(routing.scores, exact.scores)
    assert torch.equal(routing.aux_loss, exact.aux_loss)


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_entropy_of_a_router(name: str) -> None:
    """1 of even probabilities, 0 of certain ones and of one expert, else by its definition; experts masked count."""
    router = RouterConfig.preset(name)
    assert router_entropy(torch.full((3, 8), -2.0), router).item() == pytest.approx(1.0)
    assert router_entropy(torch.tensor([[50.0] + [-200.0] * 7]), router).item() == pytest.approx(0.0, abs=1e-6)
    assert router_entropy(torch.zeros(3, 1), router).item() == 0.0
    assert router_entropy(torch.tensor([[0.0, 0.0, -math.inf, -math.inf]]), router).item() == pytest.approx(0.5)
    logits = torch.randn(5, 6, dtype=torch.bfloat16, requires_grad=True)
    values = logits.double().sigmoid() if router.score == "sigmoid" else logits.double().exp()
    terms = [-float(row[e] / row.sum()) * math.log(row[e] / row.sum()) for row in values.detach() for e in range(6)]
    found = router_entropy(logits, router)
    assert found.item() == pytest.approx(sum(terms) / 5 / math.log(6), rel=1e-6)
    assert not found.requires_grad
    assert found.dtype == torch.float32


def test_dense_works_for_any_plan() -> None:
    token, expert = torch.tensor([2, 0, 2, 2, 1]), torch.tensor([1, 3, 1, 0, 4])
    plan = plan_pairs(token, expert, 3, 4)
    scores = torch.tensor([0.5, 1.0, 0.25, 2.0, 9.0], requires_grad=True)
    dense = Routing(plan, scores, plan.rows_per_expert, torch.zeros(())).dense()
    assert dense.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [2, 0.75, 0, 0]]
    (grad,) = torch.autograd.grad(dense.sum(), scores)
    assert grad.tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("replayed", [False, True])
def test_one_normalised_score_has_no_gradient_not_even_of_rounding(score: str, replayed: bool) -> None:
    logits = random(200, 6, dtype=torch.float32).requires_grad_()
    ids = torch.arange(200)[:, None] % 6 if replayed else None
    scores = route(logits, config(6, 1, RouterConfig(score=score, scale=2.5)), expert_ids=ids).scores
    assert torch.equal(scores, torch.full((200, 1), 2.5))
    (gradient,) = torch.autograd.grad((scores * random(200, 1, seed=1, dtype=torch.float32)).sum(), logits)
    assert not gradient.any()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
@pytest.mark.parametrize("normalize", [False, True])
def test_routing_under_func_says_what_to_do_instead(transform: Callable[..., Any], normalize: bool) -> None:
    cfg = config(6, 2, RouterConfig(normalize=normalize))
    with pytest.raises(RuntimeError, match=r"tilemoe.route does not go through torch\.vmap or torch\.func\."):
        transform(lambda t: route(t.view(-1, 6), cfg).scores.sum())(random(4, 6))


PLAIN, BIASED = config(6, 2), config(6, 2, RouterConfig(selection_bias=True))
LOGITS = torch.zeros(4, 6)


def with_value(value: float, *columns: int) -> Tensor:
    logits = LOGITS.clone()
    logits[2, list(columns)] = value
    return logits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: route(LOGITS, BIASED), "selection_bias is missing"),
        (lambda: route(LOGITS, PLAIN, selection_bias=torch.zeros(6)), "selection_bias was given, but"),
        (lambda: route(with_value(float("nan"), 1), PLAIN), r"logits\[2\] has NaN"),
        (lambda: route(with_value(float("inf"), 1), PLAIN), r"logits\[2\] has \+inf"),
        (lambda: route(with_value(float("-inf"), 0, 1, 2, 3, 4, 5), PLAIN), r"logits\[2\] has no finite value"),
    ],
)
def test_bad_arguments_are_named_in_one_line(call: Callable[[], Routing], message: str) -> None:
    with raises_one_line(message):
        call()


def test_bias_moves_against_the_load_in_place() -> None:
    biases = [torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])]
    storage = [bias.data_ptr() for bias in biases]
    counts = torch.tensor([[10, 0, 5, 5], [3, 3, 3, 3]], dtype=torch.int32)
    update_selection_bias(biases, counts, 0.25)
    assert [bias.tolist() for bias in biases] == [[-0.25, 0.25, 0, 0], [1, 2, 3, 4]]
    assert [bias.data_ptr() for bias in biases] == storage


def test_a_load_at_the_mean_stays_put_even_where_the_mean_is_no_float() -> None:
    load = 2**24 + 1  # not a number of fp32
    biases = [torch.zeros(3)]
    update_selection_bias(biases, torch.tensor([[load, load - 1, load + 1]]), 1.0)
    assert biases[0].tolist() == [0, 1, -1]
