"""torchtitan's mixture-of-experts layer, stock and with the override, of equal weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from tilemoe.integrations import torchtitan as integration
from tilemoe.testing import assert_equal

E, K, D, F = 6, 2, 32, 24
TARGET = "tilemoe.integrations.torchtitan.tilemoe_experts"


def linear(inputs: int, outputs: int) -> Any:
    return Linear.Config(in_features=inputs, out_features=outputs, bias=False)


def config(inner: Any = None) -> Any:
    return MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=inner or GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(num_experts=E, gate=linear(D, E), top_k=K, route_norm=True),
        shared_experts=FeedForward.Config(w1=linear(D, F), w2=linear(F, D), w3=linear(D, F)),
    )


def filled(stock: nn.Module, ours: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both with the same weights, loaded from the stock layer's checkpoint."""
    assert isinstance(ours.routed_experts, integration.TileMoERoutedExperts)
    generator = torch.Generator().manual_seed(0)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    for layer in (stock, ours):
        nn.init.zeros_(layer.expert_bias_E)
        layer.tokens_per_expert_E.zero_()
    ours.load_state_dict(stock.state_dict())
    assert_equal(ours.state_dict(), stock.state_dict())
    return stock, ours


def run(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output and every gradient under the stock layer's names."""
    x = x.clone().requires_grad_()
    out = layer(x)
    (out * torch.linspace(-1.0, 1.5, out.numel()).view_as(out)).sum().backward()
    results = {"out": out.detach(), "x": x.grad}
    results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    for name in [name for name in results if name.endswith(".w13")]:
        w13 = results.pop(name)
        results |= {name.replace("w13", part): w13[:, :, i] for i, part in enumerate(("w1_EFD", "w3_EFD"))}
    return results
