"""Bitwise repeatability, in PyTorch's ordinary mode: poisoned memory would turn its deterministic mode on.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

import functools
from collections.abc import Iterator

import pytest
import torch

from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_pairs, plan_topk
from tilemoe.testing import assert_equal, forward_and_grads, hostile_routings, make_inputs

PLANS = {routing.name: routing.plan for routing in hostile_routings()}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def test_two_shapes_and_two_activations_alternating() -> None:
    layers = []
    for name, size, options in (
        ("random", (16, 8), {"activation": "swiglu"}),
        ("pairs, repeated", (5, 3), {"activation": "relu2"}),
        ("K = E", (16, 8), {"activation": "swiglu_oai", "activation_alpha": 1.1}),
        ("random", (8, 24), {"activation": "swiglu", "gate_up": "interleaved"}),
    ):
        plan = PLANS[name]
        inputs = make_inputs(plan, *size, options["activation"], dtype=torch.bfloat16)
        layers.append(functools.partial(forward_and_grads, moe, inputs, plan, **options))
    first = [layer() for layer in layers]
    for _ in range(2):
        for layer, expected in zip(layers, first, strict=True):
            assert_equal(layer(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sentinels", "pairs, repeated", "pairs, unordered"])
def test_repeated_runs_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    plan = PLANS[name]
    inputs = make_inputs(plan, 16, 8, dtype=dtype, bias=True)
    first, second = (forward_and_grads(moe, inputs, plan) for _ in range(2))
    assert_equal(first, second)


@pytest.mark.usefixtures("_two_threads")
def test_repeated_runs_are_bit_equal_with_two_threads() -> None:
    plan = plan_topk(torch.rand(900, 4, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :2], 4)
    for dtype in (torch.bfloat16, torch.float32):
        inputs = make_inputs(plan, 64, 40, dtype=dtype, bias=True)
        first, second = (forward_and_grads(moe, inputs, plan) for _ in range(2))
        assert_equal(first, second)


@pytest.mark.usefixtures("_two_threads")
def test_a_sum_that_threads_would_share_out_is_bit_equal() -> None:
    """One pair, repeated so often that several threads add its scores."""
    pairs = torch.zeros(40_000, dtype=torch.int64)
    plan = plan_pairs(pairs, pairs, 1, 1)
    scores = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    first, *others = (TorchBackend().down_proj_bias_grad(torch.ones(1, 8), scores, plan) for _ in range(20))
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, scores.sum().expand(1, 8), rtol=1e-3, atol=0.0)


def test_hostile_routings_repeat_bit_for_bit_and_hold_no_nan_in_ordinary_mode() -> None:
    for plan in PLANS.values():
        inputs = make_inputs(plan, 16, 8, dtype=torch.bfloat16, bias=True)
        first, second = (forward_and_grads(moe, inputs, plan) for _ in range(2))
        for key, value in first.items():
            assert value.isfinite().all()
            assert torch.equal(value, second[key]), key
