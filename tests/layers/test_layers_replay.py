"""A layer that replays a routing: outputs and shapes.

T tokens · d hidden_size · E experts · K experts per token
"""

import torch
from torch import Tensor, nn

from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.layers.moe import MoE

T, D, E, K = 24, 16, 8, 2
ROUTERS = {
    "softmax": RouterConfig(aux_loss_coef=0.1, z_loss_coef=0.01),
    "biased": RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, aux_loss_coef=0.1),
}


def make(router: str = "softmax") -> MoE:
    torch.manual_seed(0)
    cfg = MoEConfig(D, 8, E, K, router=ROUTERS[router], initializer_range=0.3)
    layer = MoE(cfg)
    if layer.selection_bias is not None:
        nn.init.normal_(layer.selection_bias, 0.0, 0.5)
    return layer


def tokens() -> Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1))


def any_ids() -> Tensor:
    return torch.rand(T, E, generator=torch.Generator().manual_seed(2)).argsort(dim=1)[:, :K]


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
