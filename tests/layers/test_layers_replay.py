"""A layer that replays a routing: outputs, shapes, packing and what it refuses.

T tokens · d hidden_size · E experts · K experts per token
"""

from typing import Any

import torch
from helpers import raises_one_line
from torch import Tensor, nn

import tilemoe
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.layers.moe import MoE

T, D, E, K = 24, 16, 8, 2
ROUTERS = {
    "softmax": RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01),
    "gpt_oss": RouterConfig.preset("gpt_oss"),
    "biased": RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, aux_loss_coef=0.1),
}


def make(router: str = "softmax", dtype: torch.dtype = torch.float32) -> MoE:
    torch.manual_seed(0)
    cfg = MoEConfig(D, 8, E, K, router=ROUTERS[router], initializer_range=0.3)
    layer = MoE(cfg, dtype=dtype)
    if layer.selection_bias is not None:
        nn.init.normal_(layer.selection_bias, 0.0, 0.5)
    return layer


def tokens(count: int = T, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def any_ids(count: int = T) -> Tensor:
    return torch.rand(count, E, generator=torch.Generator().manual_seed(2)).argsort(dim=1)[:, :K]


def test_the_experts_that_computed_are_given_again() -> None:
    """With the same bits; others give another output, and the counts are theirs."""
    layer, x, ids = make("biased"), tokens(), any_ids()
    out = layer(x)
    assert torch.equal(layer(x, expert_ids=out.expert_ids).hidden, out.hidden)
    other = layer(x, expert_ids=ids)
    assert not torch.equal(other.hidden, out.hidden)
    assert torch.equal(other.tokens_per_expert, ids.flatten().bincount(minlength=E).int())


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
