"""Layers with adapters on experts in 4 bits on a GPU: as fp64 on the decoded weights, the same bits, no waiting.

Inputs are random, and fresh each time (`nf4_checks`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_layers import no_host_sync
from nf4_checks import LIMIT, errors_of, gradients

import tilemoe
from tilemoe.kernels.experts.table import STORAGES
from tilemoe.layers.lora import add_lora
from tilemoe.layers.moe import MoE
from tilemoe.testing import assert_equal

pytestmark = pytest.mark.gpu

T, D, N, E, K = 777, 320, 192, 8, 2  # not whole tiles
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved, biased": {"activation": "swiglu_oai", "gate_up": "interleaved", "expert_bias": True},
    "ungated": {"activation": "relu2"},
}


def make_layer(storage: str, dtype: torch.dtype = torch.bfloat16, kernels: str | None = None, **options: Any) -> MoE:
    torch.manual_seed(0)
    cfg = tilemoe.MoEConfig(D, N, E, K, initializer_range=D**-0.5, **options)
    layer = MoE(cfg, device="cuda", dtype=dtype, kernels=kernels)
    with torch.no_grad():
        for adapter in add_lora(layer, 16, 16.0, storage=storage):
            adapter.copy_(torch.randn_like(adapter) * 0.1)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernels", [None, "triton", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_step_is_that_of_fp64(
    storage: str, layout: str, kernels: str | None, dtype: torch.dtype, poisoned_memory: None
) -> None:
    errors = errors_of(make_layer(storage, dtype, kernels, **LAYOUTS[layout]), T)
    assert len(errors) == 6
    assert max(errors.values()) < (1e-5 if dtype == torch.float32 else LIMIT), errors


@pytest.mark.parametrize("storage", STORAGES)
def test_the_same_bits_each_time_and_no_waiting(storage: str) -> None:
    layer = make_layer(storage)
    x, do = (torch.randn(T, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    first = gradients(layer, x, None, do)
    with no_host_sync():
        again = [gradients(layer, x, None, do) for _ in range(3)]  # compiled, recorded, repeated
    for found in again:
        assert_equal(found, first)


@pytest.mark.parametrize("storage", STORAGES)
def test_no_dense_weight_is_made(storage: str) -> None:
    """The peak of a step on the weights of many idle experts."""
    torch.manual_seed(0)
    layer = MoE(tilemoe.MoEConfig(2048, 1024, 64, 2), device="cuda", dtype=torch.bfloat16)
    dense = sum(weight.nbytes for weight in (layer.experts.w1, layer.experts.w2))
    add_lora(layer, 8, 8.0, storage=storage)
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    gradients(layer, x, None, x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients(layer, x, None, x)
    assert torch.cuda.max_memory_allocated() - before < dense / 20
