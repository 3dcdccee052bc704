"""PyTorch's FLOP counter counts an expert GEMM as 2 x pairs x its weight's size.

T tokens · d hidden_size · n intermediate_size · w = 2n gated, n ungated · E experts · K experts per token · r rank
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tilemoe
from tilemoe.layers.lora import add_lora

T, D, N, E, K, R = 12, 32, 16, 4, 2, 3


def counted(layer: tilemoe.MoE, backward: bool = True, device: str = "cpu") -> dict[str, int]:
    """FLOPs of each of tilemoe's operators in one step."""
    x = torch.randn(T, D, requires_grad=backward, device=device)
    with FlopCounterMode(display=False) as mode:
        o = layer(x).hidden
        if backward:
            o.sum().backward()
    return {
        str(op).removeprefix("tilemoe."): n
        for op, n in mode.get_flop_counts()["Global"].items()
        if "tilemoe" in str(op)
    }


def layer_of(activation: str = "swiglu", device: str | None = None, **options: Any) -> tilemoe.MoE:
    return tilemoe.MoE(tilemoe.MoEConfig(D, N, E, K, activation=activation), device=device, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("activation", "w"), [("swiglu", 2 * N), ("relu2", N)])
def test_forward_and_backward(activation: str, w: int, device: str) -> None:
    found = counted(layer_of(activation, device), device=device)
    up, down = 2 * T * K * D * w, 2 * T * K * D * N
    assert found == {
        "moe": up + down,
        "down_proj_dgrad_dact": down,
        "down_proj_wgrad": down,
        "up_proj_input_grad": up,
        "up_proj_wgrad": up,
    }


def test_bias_gradients_count_nothing() -> None:
    plain, biased = counted(layer_of()), counted(tilemoe.MoE(tilemoe.MoEConfig(D, N, E, K, expert_bias=True)))
    assert biased == plain


def test_recomputed_up_projection_counts_again() -> None:
    assert counted(layer_of(recompute="up_proj"))["up_proj"] == 2 * T * K * D * 2 * N


def test_without_gradients() -> None:
    with torch.no_grad():
        assert sum(counted(layer_of(), backward=False).values()) == 2 * T * K * D * 3 * N


def test_adapters() -> None:
    """Of an adapter each of two factors has a product, a dgrad and a wgrad; ``a A2^T`` is computed twice."""
    layer = layer_of()
    add_lora(nn.ModuleList([layer]), rank=R, alpha=1.0)
    found = counted(layer)
    frozen, adapters = D * 2 * N + N * D, R * (D + 2 * N) + R * (N + D)
    assert found == {
        "moe_lora": 2 * T * K * (frozen + adapters),
        "moe_lora_grad": 2 * T * K * (frozen + 2 * adapters + R * N),
    }
