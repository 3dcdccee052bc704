"""Routers with token rounding: scores, gradients and losses against the reference, and what they refuse.

T tokens · d hidden_size · E experts · K experts per token
"""

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from routing_checks import assert_routes_as_the_reference, random, seeded
from torch.utils.checkpoint import checkpoint

import tilemoe
from tilemoe import reference
from tilemoe.config import ROUNDING_MODES, ROUTER_PRESETS, MoEConfig, RouterConfig, TokenRounding, from_dict, to_dict
from tilemoe.layers.moe import MoE
from tilemoe.routing.rounding import draw_uniform
from tilemoe.routing.topk import route

TILE = 16
LOSSES = RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01)


def config(mode: str, experts: int = 8, k: int = 2, router: RouterConfig = LOSSES, **options: Any) -> MoEConfig:
    rounding = TokenRounding(mode, TILE)  # type: ignore[arg-type]
    return MoEConfig(16, 8, experts, k, router=router, rounding=rounding, **options)


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_every_mode_equals_the_reference(mode: str) -> None:
    routing = assert_routes_as_the_reference(random(75, 8), config(mode))
    assert routing.scores.shape == (routing.plan.capacity,)
    rows = int(routing.plan.row_start_of_expert[-1])
    assert not routing.scores[rows:].any()
    assert (routing.tokens_per_expert % TILE == 0).all()


@pytest.mark.parametrize("name", sorted(ROUTER_PRESETS))
def test_presets_equal_the_reference(name: str) -> None:
    cfg = config("nearest", 16, 4, replace(RouterConfig.preset(name), z_loss_coef=0.01))
    mask = torch.arange(90) % 7 != 0
    assert_routes_as_the_reference(random(90, 16), cfg)
    assert_routes_as_the_reference(random(90, 16, seed=1), cfg, mask)


def test_evaluation_is_plain_top_k_and_draws_nothing() -> None:
    logits, cfg, generator = random(75, 8), config("stochastic"), seeded()
    routing = route(logits, cfg, training=False, generator=generator)
    plain = route(logits, replace(cfg, rounding=None))
    assert torch.equal(routing.scores, plain.scores)
    assert torch.equal(routing.plan.token_of_row, plain.plan.token_of_row)
    assert torch.equal(generator.get_state(), seeded().get_state())


@pytest.mark.parametrize("mode", ["stochastic", "nearest_score"])
def test_draws_are_reproducible_and_the_first_of_the_generator(mode: str) -> None:
    logits, cfg = random(400, 32), config(mode, 32, 4)
    counts = {tuple(route(logits, cfg, generator=seeded(i)).tokens_per_expert.tolist()) for i in range(6)}
    assert len(counts) == 6
    again = [route(logits, cfg, generator=seeded(3)).tokens_per_expert for _ in range(2)]
    assert torch.equal(*again)
    torch.manual_seed(3)
    assert torch.equal(route(logits, cfg).tokens_per_expert, again[0])
    generator = seeded(3)
    route(logits, cfg, generator=generator)
    expected = seeded(3)
    torch.rand(32, generator=expected)
    assert torch.equal(generator.get_state(), expected.get_state())


class Elsewhere(torch.Generator):
    """A generator that says it is another GPU's."""

    device = torch.device("cuda:1")  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["nearest", "stochastic"])
def test_a_generator_elsewhere_is_one_line(mode: str) -> None:
    rounding = TokenRounding(mode, TILE)  # type: ignore[arg-type]
    with raises_one_line(r"generator is on cpu but the logits are on meta; .*device='meta'"):
        draw_uniform(8, rounding, torch.device("meta"), seeded())
    with pytest.raises(ValueError, match=r"generator is on cuda:1 but the logits are on cuda:0; .*device='cuda:0'"):
        draw_uniform(8, rounding, torch.device("cuda:0"), Elsewhere())
    with pytest.raises(ValueError, match=r"must be a torch.Generator or None, got int; .*\.manual_seed"):
        draw_uniform(8, rounding, torch.device("cpu"), 3)  # type: ignore[arg-type]


def test_fewer_tokens_than_a_tile_are_routed_by_top_k_with_one_warning() -> None:
    cfg = MoEConfig(16, 8, 8, 2, rounding=TokenRounding("nearest", 2048))
    logits = random(2047, 8)
    with pytest.warns(UserWarning, match=r"rounding.tile = 2048 is larger than the number of tokens") as caught:
        routing = route(logits, cfg)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert torch.equal(routing.scores, route(logits, cfg, training=False).scores)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        route(logits[:100], cfg)
        route(torch.cat([logits, logits]), cfg)


def test_the_configuration_takes_a_token_rounding_alone() -> None:
    with pytest.raises(ValueError, match="rounding must be a TokenRounding or None, got str"):
        MoEConfig(16, 8, 8, 2, rounding="nearest")  # type: ignore[arg-type]
    cfg = config("balance")
    assert from_dict(MoEConfig, to_dict(cfg)) == cfg


@pytest.mark.parametrize("mode", ROUNDING_MODES)
def test_layer_equals_the_reference(mode: str) -> None:
    router = RouterConfig(score="sigmoid", scale=2.5, selection_bias=True)
    layer = MoE(config(mode, 6, 2, router, shared_intermediate_size=12, initializer_range=0.3), dtype=torch.float64)
    layer.router.selection_bias.copy_(0.1 * random(6, seed=2))
    x = random(70, 16, seed=4)
    out = layer(x, generator=seeded())
    routing = reference.route(
        layer.router(x).logits, layer.cfg, generator=seeded(), selection_bias=layer.router.selection_bias
    )
    token, expert = routing.scores.nonzero(as_tuple=True)
    plan = tilemoe.plan_pairs(token, expert, 70, 6)
    hidden = reference.moe(x, layer.experts.w1, layer.experts.w2, plan, routing.scores[token, expert])
    hidden = hidden + reference.shared_expert(x, layer.shared.w1, layer.shared.w2)
    torch.testing.assert_close(out.hidden, hidden)
    assert out.tokens_per_expert.tolist() == routing.tokens_per_expert.tolist()
    parameters = list(layer.parameters())
    do = random(70, 16, seed=5)
    found = torch.autograd.grad((out.hidden * do).sum(), parameters)
    torch.testing.assert_close(found, torch.autograd.grad((hidden * do).sum(), parameters))


def test_a_token_that_loses_every_expert_gives_and_gets_exactly_zero() -> None:
    layer = MoE(config("down", 2, 1, RouterConfig(normalize=False)), dtype=torch.float32)
    x = random(17, 16).float()
    x[:, 0] = 5.0
    x[9, 0] = 3.0  # the least sure of expert 0
    x.requires_grad_()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, 0] = 1.0
    out = layer(x)
    assert out.tokens_per_expert.tolist() == [16, 0]
    assert not out.hidden[9].any()
    assert bool(out.hidden[8].any())
    (grad,) = torch.autograd.grad(out.hidden.sum(), x)
    assert not grad[9].any()
    assert bool(grad[8].any())


def test_checkpointing_repeats_the_draws_of_the_default_generator() -> None:
    layer = MoE(config("stochastic", 8, 2, initializer_range=0.3), dtype=torch.float32)
    x = random(150, 16).float()
    grads = []
    for repeat in (False, True):
        torch.manual_seed(11)
        hidden = checkpoint(layer, x, use_reentrant=False) if repeat else layer(x)
        grads.append(torch.autograd.grad(hidden.hidden.square().sum(), layer.experts.w1)[0])
    assert torch.equal(*grads)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["stochastic", "nearest"])
def test_checkpointing_refuses_draws_that_it_cannot_repeat(mode: str, reentrant: bool) -> None:
    layer, generator = MoE(config(mode, 8, 2), dtype=torch.float32), torch.Generator()
    x = random(150, 16).float().requires_grad_()
    out = checkpoint(lambda *given: layer(*given)[0], x, None, generator, use_reentrant=reentrant)
    with raises_one_line("generator cannot be given under activation") if mode == "stochastic" else nullcontext():
        out.sum().backward()
