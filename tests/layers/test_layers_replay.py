"""A layer that replays a routing: outputs, gradients, checkpointing, compilation, packing and what it refuses.

T tokens · d hidden_size · E experts · K experts per token
"""

from typing import Any

import pytest
import torch
from helpers import raises_one_line
from torch import Tensor, nn

import tilemoe
from tilemoe import reference
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.layers.moe import MoE

T, D, E, K = 24, 16, 8, 2
ROUTERS = {
    "softmax": RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01),
    "gpt_oss": RouterConfig.preset("gpt_oss"),
    "biased": RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, aux_loss_coef=0.1),
    "grouped": RouterConfig(score="sigmoid", selection_bias=True, num_groups=4, top_groups=2),
}


def make(router: str = "softmax", dtype: torch.dtype = torch.float32, **options: Any) -> MoE:
    torch.manual_seed(0)
    cfg = MoEConfig(D, 8, E, K, router=ROUTERS[router], initializer_range=0.3, **options)
    layer = MoE(cfg, dtype=dtype)
    if layer.selection_bias is not None:
        nn.init.normal_(layer.selection_bias, 0.0, 0.5)
    return layer


def tokens(count: int = T, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def any_ids(count: int = T) -> Tensor:
    return torch.rand(count, E, generator=torch.Generator().manual_seed(2)).argsort(dim=1)[:, :K]


def values_and_grads(layer: MoE, x: Tensor, run: Any = None, **options: Any) -> list[Tensor]:
    """Hidden, loss and counts, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    hidden, aux_loss, counts = (layer if run is None else run)(x, **options)[:3]
    (hidden.square().sum() + aux_loss).backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    assert all(grad is not None and grad.any() for grad in (x.grad, *grads))
    return [hidden.detach(), aux_loss.detach(), counts, x.grad, *grads]


@pytest.mark.parametrize("router", ROUTERS)
def test_given_experts_compute_with_the_scores_of_the_present_router(router: str) -> None:
    layer, x, ids = make(router, torch.float64), tokens(dtype=torch.float64).requires_grad_(), any_ids()
    out = layer(x, expert_ids=ids)
    logits = nn.functional.linear(x, layer.router.weight, layer.router.bias)
    routing = reference.route(logits, layer.cfg, replayed_ids=ids)
    plan = tilemoe.plan_topk(ids, E)
    experts = (layer.experts.w1, layer.experts.w2, plan, routing.scores.gather(1, ids))
    expected = reference.moe(x, *experts)
    torch.testing.assert_close(out.hidden, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(out.aux_loss, routing.aux_loss.float())
    assert torch.equal(out.tokens_per_expert, ids.flatten().bincount(minlength=E).int())
    leaves = (x, layer.router.weight, layer.experts.w1, layer.experts.w2)
    got, want = (
        torch.autograd.grad(hidden.square().sum() + aux_loss, leaves)
        for hidden, aux_loss in ((out.hidden, out.aux_loss), (expected, routing.aux_loss))
    )
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)  # the losses are fp32


def test_ids_are_shaped_like_x_or_flat() -> None:
    layer, x, ids = make(), tokens(), any_ids()
    flat = layer(x, expert_ids=ids)
    shaped = layer(x.view(2, 3, 4, D), expert_ids=ids.view(2, 3, 4, K))
    assert torch.equal(shaped.hidden.view(T, D), flat.hidden)
    assert torch.equal(layer(x.view(2, 12, D), expert_ids=ids.int()).hidden.view(T, D), flat.hidden)
    assert torch.equal(layer(x[0], expert_ids=ids[0]).expert_ids, ids[:1])
    assert layer(x[:0], expert_ids=ids[:0]).hidden.shape == (0, D)


def test_micro_batches_and_packing_take_their_part_of_the_record() -> None:
    """The gradients of the parts add up to those of the whole; a padded batch has the outputs of a packed one."""
    layer, x, ids = make("gpt_oss", torch.float64), tokens(dtype=torch.float64), any_ids()
    hidden = layer(x, expert_ids=ids).hidden
    hidden.square().sum().backward()
    whole = [parameter.grad for parameter in layer.parameters()]
    parts = make("gpt_oss", torch.float64)
    for part in (slice(0, 7), slice(7, T)):
        parts(x[part], expert_ids=ids[part]).hidden.square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in parts.parameters()], whole)
    padded, mask = torch.randn(2, 16, D, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.bool)
    mask[0, :10], mask[1, :14] = True, True
    padded[mask] = x
    ids_of_padded = torch.full((2, 16, K), -1)  # what a trainer pads with is not looked at
    ids_of_padded[mask] = ids
    out = layer(padded, mask, expert_ids=ids_of_padded)
    torch.testing.assert_close(out.hidden[mask], hidden)


def test_replay_compiles_without_a_break() -> None:
    layer, x, ids = make("grouped"), tokens(), any_ids()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    want = values_and_grads(layer, x, expert_ids=ids)
    torch.testing.assert_close(values_and_grads(layer, x, compiled, expert_ids=ids), want)
    assert torch.equal(compiled(x).expert_ids, layer(x).expert_ids)


class Own(nn.Module):
    """A router that gives logits, or a whole `Routing`."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.linear, self.gives = nn.Linear(D, E), gives

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x)
        if self.gives == "logits":
            return logits
        scores, ids = logits.softmax(-1).topk(K)
        plan = tilemoe.plan_topk(ids, E)
        return tilemoe.Routing(plan, scores, plan.rows_per_expert, scores.new_zeros(()))


def test_a_router_of_ones_own_that_gives_logits_is_replayed_and_another_is_refused() -> None:
    cfg, x, ids = make().cfg, tokens(), any_ids()
    assert torch.equal(MoE(cfg, router=Own("logits"))(x, expert_ids=ids).expert_ids, ids)
    routed = MoE(cfg, router=Own("routing"))
    assert routed(x).expert_ids is None
    with raises_one_line("expert_ids needs a router that gives logits, which score them"):
        routed(x, expert_ids=ids)
