"""The FP8 kernels for Hopper on a GPU: against the torch backend, in whole layers, and what is kept from call to call.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_checks import assert_columns_agree, assert_gemms_agree, assert_wgrads_agree
from torch import Tensor
from triton_checks import LAYOUTS, Case

import tilemoe
from tilemoe import reference
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.routing.build import plan_topk
from tilemoe.testing import assert_equal, hostile_routings, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory", "on_hopper")]

BF16, FP16 = torch.bfloat16, torch.float16
LIMITS = {BF16: 3e-3, FP16: 1e-3}
LIMIT_OF_17408 = 4.5e-3  # a contraction that long: 4.0e-3 measured, the output's rounding 1.7e-3 of it
T, D, N, E, K = 777, 512, 384, 8, 2


def make_layer(kernels: str | None = None, d: int = D, n: int = N, **options: Any) -> tilemoe.MoE:
    torch.manual_seed(0)
    cfg = tilemoe.MoEConfig(d, n, E, K, **{"precision": "fp8", **options})
    return tilemoe.MoE(cfg, device="cuda", dtype=BF16, kernels=kernels)


def ours_and_torchs(d: int, n: int) -> list[tilemoe.MoE]:
    """Two layers of equal weights: on these kernels, and on the torch backend of the same precision."""
    return [make_layer(kernels, d, n) for kernels in (None, "torch_fp8")]


def step(layer: tilemoe.MoE, x: Tensor) -> list[Tensor]:
    """The output and all gradients, of ones."""
    x = x.detach().requires_grad_()
    o = layer(x).hidden
    return [o.detach(), *torch.autograd.grad(o, [x, *layer.parameters()], torch.ones_like(o))]


@pytest.mark.parametrize(
    "case",
    [
        Case(BF16, hidden_size=256, intermediate_size=128),
        Case(FP16, hidden_size=384, intermediate_size=256),
        Case(BF16, "relu2", bias=True, hidden_size=256, intermediate_size=128),
    ],
    ids=str,
)
def test_hostile_routings(case: Case) -> None:
    kernels = backend_named("hopper_fp8")
    for routing in hostile_routings(tile=128, device="cuda"):
        assert_gemms_agree(kernels, routing.plan, case, LIMITS[case.dtype])
        assert_columns_agree(kernels, routing.plan, case, slice(128, 256), LIMITS[case.dtype])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias, transposed"])
@pytest.mark.parametrize(("activation", "gate_up"), LAYOUTS)
def test_every_layout(activation: str, bias: bool, gate_up: str) -> None:
    torch.manual_seed(0)
    plan = plan_topk(torch.rand(T, E, device="cuda").topk(K, 1).indices, E)
    case = Case(BF16 if bias else FP16, activation, gate_up, bias, bias, D, N)
    assert_gemms_agree(backend_named("hopper_fp8"), plan, case, LIMITS[case.dtype])


def test_tiles_in_bands() -> None:
    """up_proj beyond 8 column tiles, down_proj_dgrad beyond 32, both with a contraction beyond 1024."""
    plan = plan_topk(torch.rand(300, 4, device="cuda").topk(2, 1).indices, 4)
    case = Case(BF16, hidden_size=1152, intermediate_size=8704)
    assert_gemms_agree(backend_named("hopper_fp8"), plan, case, LIMIT_OF_17408)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_wide_weight_gradients(all_wgrads_in_fp8: None, dtype: torch.dtype, column_major: bool) -> None:
    for routing in hostile_routings(tile=128, device="cuda"):
        assert_wgrads_agree(backend_named("hopper_fp8"), routing.plan, D, 640, column_major, dtype, LIMITS[dtype])


def test_long_sums_of_products_with_a_mean() -> None:
    """Tensor cores alone would make the sum of 20,000 rows 5% too small. More tiles than CTAs; an empty expert."""
    width, rows = 4096, torch.tensor([5120, 0, 20000, 5121])
    torch.manual_seed(0)
    experts = torch.arange(4).repeat_interleave(rows)[torch.randperm(int(rows.sum()))]
    plan = plan_topk(experts[:, None].cuda(), 4)
    x, dh = ((torch.randn(plan.num_tokens, width, device="cuda") + 0.5).to(BF16) for _ in range(2))
    exact = backend_named("torch_fp8").up_proj_wgrad(x.float(), dh.float(), plan)
    before = torch.randn_like(exact)
    found = backend_named("hopper_fp8").up_proj_wgrad(x, dh, plan)
    assert relative_error(found.float(), exact) < 0.012
    assert_equal(found, backend_named("hopper_fp8").up_proj_wgrad(x, dh, plan))
    added = backend_named("hopper_fp8").up_proj_wgrad(x, dh, plan, out=before.clone()) - before
    assert relative_error(added, exact) < 0.012


def test_wide_layers_of_different_slices_accumulate() -> None:
    """Gradients are added to once per call, also while launches are compiled and recorded: d is one slice or two."""
    for d in (4096, 3072, 2048):
        layers = ours_and_torchs(d, 1024)
        for layer in layers:
            tilemoe.accumulate_grads(layer)
        for count in range(1, 5):
            x, do = torch.randn(2, T, d, device="cuda", dtype=BF16)
            for layer in layers:
                layer(x).hidden.backward(do)
            for ours, right in zip(*(layer.experts.parameters() for layer in layers), strict=True):
                assert ours.grad is not None
                assert right.grad is not None
                assert relative_error(ours.grad, right.grad) < 0.03, (d, count)  # .021 measured; added twice: 1


@pytest.mark.parametrize("options", [{}, {"activation": "swiglu_oai", "gate_up": "interleaved", "expert_bias": True}])
def test_a_layer_is_the_oracles(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make_layer(**options), torch.randn(T, D, device="cuda", dtype=BF16)
    found = step(layer, x)
    monkeypatch.setattr("tilemoe.layers.experts.moe", reference.moe)
    for value, expected in zip(found, step(layer, x), strict=True):
        assert relative_error(value, expected) < 0.02


def test_weights_that_have_changed_are_quantised_anew() -> None:
    layer, x = make_layer(), torch.randn(T, D, device="cuda", dtype=BF16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(4):  # compiled, recorded, repeated
        found = step(layer, x)
        fresh = make_layer()
        fresh.load_state_dict(layer.state_dict())
        assert_equal(found, step(fresh, x))
        for parameter, grad in zip(layer.parameters(), found[2:], strict=True):
            parameter.grad = grad
        optimizer.step()


@pytest.mark.parametrize(("precision", "by_torch"), [("bf16", "torch"), ("fp8", "torch_fp8")])
def test_h_kept_in_fp8(precision: str, by_torch: str) -> None:
    """The output is that of h in its own dtype; gradients are the torch backend's."""
    x = torch.randn(T, D, device="cuda", dtype=BF16)
    layer, plain = make_layer(precision=precision, save="fp8"), make_layer(precision=precision)
    first, expected = step(layer, x), step(plain, x)
    assert_equal(first[0], expected[0])
    assert all(0.005 < relative_error(*pair) < 0.1 for pair in zip(first[1:], expected[1:], strict=True))
    for value, right in zip(first, step(make_layer(by_torch, precision=precision, save="fp8"), x), strict=True):
        assert relative_error(value, right) < 0.02


def test_captured_in_a_graph_weights_are_quantised_at_each_replay() -> None:
    layer, x = make_layer(), torch.randn(T, D, device="cuda", dtype=BF16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(3):
            layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            o = layer(x).hidden
    for _ in range(2):
        with torch.no_grad():
            layer.experts.w1.mul_(0.5)
            graph.replay()
            torch.cuda.synchronize()
            assert_equal(o, layer(x).hidden)


def test_compiled_in_one_graph() -> None:
    layer, x = make_layer(), torch.randn(T, D, device="cuda", dtype=BF16)
    expected = step(layer, x)
    compiled = torch.compile(layer, fullgraph=True)
    x = x.detach().requires_grad_()
    o = compiled(x).hidden
    assert relative_error(o, expected[0]) < 1e-2
    (dw1,) = torch.autograd.grad(o, [layer.experts.w1], torch.ones_like(o))
    names = [name for name, _ in layer.named_parameters()]
    assert relative_error(dw1, expected[2 + names.index("experts.w1")]) < 1e-2
