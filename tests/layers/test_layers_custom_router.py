"""A router of one's own in the layer: modules that give logits, and modules that give a whole `Routing`.

T tokens · d hidden_size · E experts · K experts per token
"""

import copy
from typing import Any

import pytest
import torch
from helpers import raises_one_line
from torch import Tensor, nn
from torch.testing import assert_close

import tilemoe
from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.layers.moe import MoE

D, E, K, T = 16, 8, 2, 20


class TwoLayers(nn.Module):
    """Logits by an MLP."""

    def __init__(self, experts: int = E) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class ExpertChoice(nn.Module):
    """Each expert takes the tokens that it scores highest: a plan of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, E, bias=False)

    def forward(self, x: Tensor) -> tilemoe.Routing:
        scores, token = self.linear(x).softmax(-1).t().topk(max(1, K * x.shape[0] // E))
        expert = torch.arange(E)[:, None].expand_as(token)
        plan = tilemoe.plan_pairs(token.flatten(), expert.flatten(), x.shape[0], E)
        return tilemoe.Routing(plan, scores.flatten(), plan.rows_per_expert, scores.new_zeros(()))


class Gives(nn.Module):
    """Whatever it was told to."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what


def config(**options: Any) -> MoEConfig:
    return MoEConfig(D, 8, E, K, initializer_range=0.3, **options)


def make(module: nn.Module, **options: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(config(**options), router=module)


def routing_of(tokens: int, experts: int) -> tilemoe.Routing:
    plan = tilemoe.plan_topk(torch.zeros(tokens, 1, dtype=torch.int32), experts)
    return tilemoe.Routing(plan, torch.ones(tokens, 1), plan.rows_per_expert, torch.zeros(()))


def by_reference(layer: MoE, x: Tensor) -> Tensor:
    """The layer's output in fp64 from its router's decision."""
    out = layer.router(x)
    routing = out if isinstance(out, tilemoe.Routing) else tilemoe.route(out, layer.cfg)
    w1, w2 = layer.experts.w1.double(), layer.experts.w2.double()
    return tilemoe.reference.moe(x.double(), w1, w2, routing.plan, routing.scores.double())


ROUTERS = [TwoLayers, ExpertChoice]


@pytest.mark.parametrize("router", ROUTERS)
def test_output_and_every_gradient(router: type[nn.Module]) -> None:
    layer = make(router())
    x = torch.randn(2, T // 2, D, requires_grad=True)
    leaves = [x, *layer.parameters()]
    out, exact = layer(x).hidden, by_reference(layer, x.flatten(0, 1)).view(x.shape)
    assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    do = torch.randn_like(out)
    expected = torch.autograd.grad(exact, leaves, do.double())
    assert_close(torch.autograd.grad(out, leaves, do), expected, rtol=1e-4, atol=1e-5)


def test_compiles_without_a_break() -> None:
    layer = make(ExpertChoice())

    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    x = torch.randn(T, D)
    got, expected = compiled(x), layer(x)
    assert_close(got.hidden, expected.hidden)
    assert_close(got.tokens_per_expert, expected.tokens_per_expert)
    for out in (got, expected):
        out.hidden.square().sum().backward()
    for theirs, ours in zip(compiled.parameters(), layer.parameters(), strict=True):
        assert_close(theirs.grad, ours.grad)


def test_parameters_are_in_the_state_and_stay_when_weights_are_drawn_anew() -> None:
    layer = make(TwoLayers())
    names = {name for name in layer.state_dict() if name.startswith("router.")}
    assert names == {"router.up.weight", "router.up.bias", "router.down.weight", "router.down.bias"}
    other = make(TwoLayers())
    other.load_state_dict(layer.state_dict())
    x = torch.randn(T, D)
    assert torch.equal(other(x).hidden, layer(x).hidden)
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("router."), name


def test_mask_rounding_and_selection_bias_go_with_logits() -> None:
    router = TwoLayers()
    router.register_buffer("selection_bias", torch.zeros(E))
    cfg = RouterConfig(score="sigmoid", selection_bias=True)
    layer = make(router, router=cfg, rounding=TokenRounding("nearest", 16))
    mask = torch.rand(4 * T) < 0.7
    out = layer(torch.randn(4 * T, D), mask)
    assert not out.hidden[~mask].any()
    assert all(count % 16 == 0 for count in out.tokens_per_expert.tolist())
    layer.update_selection_bias(torch.arange(E), 0.1)
    assert_close(router.selection_bias, 0.1 * torch.tensor([1.0] * 4 + [-1.0] * 4))


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (len, {}, r"router must be None or a torch\.nn\.Module that gives .*, got builtin_function_or_method; wrap a"),
    (Gives(None), {}, r"router must give logits \(T, E\) or a Routing, got NoneType; return a tensor"),
    (Gives(torch.zeros(T, 5)), {}, r"router must give logits \(T, E\) = \(20, 8\) .* got shape \(20, 5\); let it give"),
    (Gives(torch.zeros(1, T, E)), {}, r"router must give logits .* got shape \(1, 20, 8\); let it give one row for"),
    (
        Gives(torch.zeros(T, E, dtype=torch.int64)),
        {},
        "logits must be bfloat16, float16, float32 or float64, got torch.int64",
    ),
    (Gives(routing_of(19, E)), {}, "a Routing of 19 tokens and 8 experts, not 20 and 8; make its plan for"),
    (Gives(routing_of(T, 9)), {}, "a Routing of 20 tokens and 9 experts, not 20 and 8; make its plan for"),
    (ExpertChoice(), {"rounding": TokenRounding("up", 16)}, "cfg.rounding needs a router that gives logits; set it to"),
    (TwoLayers(), {"router": RouterConfig(selection_bias=True)}, "selection_bias is missing"),
]


@pytest.mark.parametrize(("router", "options", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(router: Any, options: dict[str, Any], message: str) -> None:
    with raises_one_line(message):
        make(router, **options)(torch.randn(T, D))


def test_logits_of_ones_own_score_replayed_ids() -> None:
    x, ids = torch.randn(T, D), torch.rand(T, E).argsort(dim=1)[:, :K]
    assert torch.equal(make(TwoLayers())(x, expert_ids=ids).expert_ids, ids)
    routed = make(ExpertChoice())
    assert routed(x).expert_ids is None
    with raises_one_line("expert_ids needs a router that gives logits, which score them"):
        routed(x, expert_ids=ids)


def test_a_mask_for_a_router_that_gives_a_routing_is_refused() -> None:
    with pytest.raises(ValueError, match="token_mask needs a router that gives logits; let one that gives a Routing"):
        make(ExpertChoice())(torch.randn(T, D), torch.ones(T, dtype=torch.bool))
    with pytest.raises(ValueError, match="no selection bias"):
        make(ExpertChoice()).update_selection_bias(torch.ones(E), 0.1)
