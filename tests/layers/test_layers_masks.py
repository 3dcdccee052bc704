"""A layer and the tokens that a mask leaves out; routers that cannot learn.

T tokens · d hidden_size · E experts · K experts per token
"""

from typing import Any

import pytest
import torch
from helpers import raises_one_line
from test_layers_custom_router import TwoLayers
from test_layers_moe import EVERYTHING, make

from tilemoe.config import RouterConfig, TokenRounding
from tilemoe.layers.lora import add_lora
from tilemoe.testing import assert_equal


@pytest.mark.parametrize("left_over", [float("nan"), float("inf"), 3e38])  # in memory that was not written
@pytest.mark.parametrize(
    "options",
    [
        EVERYTHING,
        EVERYTHING | {"rounding": TokenRounding("nearest", 16)},
        {"shared_intermediate_size": 12, "activation": "swiglu_oai", "expert_bias": True},
        {"hidden_size": 128, "intermediate_size": 128, "precision": "fp8", "save": "fp8"},
        {"custom": True},
        {"lora": 2, "shared_intermediate_size": 12, "shared_gate": True},
        {"replays": True, "shared_intermediate_size": 12},
    ],
    ids=["everything", "rounded", "gpt-oss", "fp8", "custom router", "adapters", "replay"],
)
def test_gradients_are_those_of_the_real_tokens_alone(options: dict[str, Any], left_over: float) -> None:
    """Whatever stands in the others, forward and backward, and whatever is done with their outputs."""
    options = dict(options)
    custom, lora, replays = (options.pop(name, None) for name in ("custom", "lora", "replays"))
    layer = make(**options)
    if custom:
        layer.router = TwoLayers(experts=16)
    if lora is not None:
        add_lora(layer, lora, 4.0)
        layer.experts.up_b.data.normal_()
        layer.router.requires_grad_(True), layer.shared.requires_grad_(True)
    mask = torch.arange(60) % 5 > 1
    x = torch.randn(60, layer.cfg.hidden_size)
    x[~mask] = left_over
    ids = torch.stack([torch.randperm(16)[:3] for _ in range(60)]) if replays else None
    found = []
    for given, token_mask, expert_ids in ((x, mask, ids), (x[mask], None, None if ids is None else ids[mask])):
        layer.zero_grad()
        leaf = given.clone().requires_grad_()
        out = layer(leaf, token_mask, expert_ids=expert_ids)
        loss = out.hidden.square().sum() + out.hidden.sum() + out.aux_loss
        poison = torch.zeros_like(out.hidden)
        if token_mask is not None:
            poison[~mask] = float("nan")  # as a norm's backward gives for rows of NaN
        torch.autograd.backward([loss, out.hidden], [torch.ones(()), poison])
        grads = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
        found.append((out.hidden, leaf.grad, grads, out.tokens_per_expert, out.aux_loss))
    (hidden, dx, *rest), (expected_hidden, expected_dx, *expected) = found
    torch.testing.assert_close((hidden[mask], dx[mask], *rest), (expected_hidden, expected_dx, *expected))
    assert len(rest[0]) == sum(p.requires_grad for p in layer.parameters())
    assert not hidden[~mask].any()
    assert not dx[~mask].any()


def test_replayed_ids_are_shaped_like_x_or_flat() -> None:
    layer, x, ids = make(**EVERYTHING), torch.randn(24, 16), torch.rand(24, 16).argsort(1)[:, :3]
    flat = layer(x, expert_ids=ids).hidden
    assert not torch.equal(flat, layer(x).hidden)
    assert torch.equal(layer(x.view(2, 3, 4, 16), expert_ids=ids.view(2, 3, 4, 3)).hidden.view(24, 16), flat)
    assert torch.equal(layer(x.view(2, 12, 16), expert_ids=ids.int()).hidden.view(24, 16), flat)
    assert torch.equal(layer(x[0], expert_ids=ids[0]).expert_ids, ids[:1])


def test_a_mask_is_of_bool_or_integers_and_compiles() -> None:
    """As transformers' attention_mask is, (B, S) int64."""
    layer, x, mask = make(**EVERYTHING), torch.randn(2, 5, 16), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    expected = layer(x, mask.bool())
    for dtype in (torch.int64, torch.int32, torch.uint8):
        assert_equal(layer(x, mask.to(dtype))._asdict(), expected._asdict())
    x[mask == 0] = float("nan")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(x, mask)
        out.hidden.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({}, r"router\.normalize=False, or freeze"),
        ({"score": "sigmoid", "selection_bias": True}, r"router\.normalize=False, or freeze"),
        ({"aux_loss_coef": 0.1}, r"router\.normalize=False, or freeze"),
        ({"softmax_after_topk": True}, r"router\.normalize=False and router\.softmax_after_topk=False, or freeze"),
        ({"softmax_after_topk": True, "normalize": False}, r"set router\.softmax_after_topk=False, or freeze"),
    ],
    ids=str,
)
def test_a_router_that_cannot_learn_is_refused_where_it_would(options: dict[str, Any], fix: str) -> None:
    layer, x = make(num_experts_per_tok=1, router=RouterConfig(**options)), torch.randn(9, 16, requires_grad=True)
    for router in (layer.router, torch.nn.Linear(16, 16)):
        layer.router, message = router, "router cannot learn: with num_experts_per_tok=1"
        if options.get("selection_bias"):
            router.selection_bias = torch.zeros(16)
        with raises_one_line(f"{message}.*{fix}"):
            layer(x)
        with torch.no_grad():
            assert layer(x).hidden.any()
        layer.eval()(x).hidden.sum().backward()
        layer.train().router.requires_grad_(False)
        layer(x).hidden.sum().backward()  # of x and of whatever is trained beside a frozen router
    add_lora(layer, 2, 4.0)
    layer(x).hidden.sum().backward()
    assert layer.experts.up_b.grad.any()


def test_a_router_of_one_expert_per_token_learns_by_its_score() -> None:
    layer = make(num_experts_per_tok=1, router=RouterConfig(normalize=False))
    layer(torch.randn(9, 16)).hidden.square().sum().backward()
    assert layer.router.weight.grad.any()
    alone = make(num_experts=1, num_experts_per_tok=1)  # nothing to choose, nothing to learn
    alone(torch.randn(9, 16)).hidden.sum().backward()
