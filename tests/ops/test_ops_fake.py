"""Tensors without values, as estimators of memory use them, and torch.export: shapes, dtypes and strides of real ones.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token

Of tensors that claim to be on a GPU which is not there PyTorch runs no backward, and its build for CPUs alone takes no
views: there, forward runs without gradients, and what PyTorch's own operators compute is left out.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_python
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tilemoe.config import MoEConfig, RouterConfig, TokenRounding
from tilemoe.layers.moe import MoE

T, D, N, E, K = 40, 64, 32, 8, 2
LOSSES = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01}
LAYERS = {
    "softmax": MoEConfig(D, N, E, K, router=RouterConfig(**LOSSES)),
    "biased": MoEConfig(
        D, N, E, K, activation="swiglu_oai", gate_up="interleaved", expert_bias=True,
        router=RouterConfig(softmax_after_topk=True, bias=True, **LOSSES),
    ),
    "grouped": MoEConfig(
        D, N, E, K, activation="geglu",
        router=RouterConfig(score="sigmoid", scale=2.5, selection_bias=True, num_groups=4, top_groups=2),
    ),
    "shared": MoEConfig(D, N, E, K, shared_intermediate_size=16, shared_gate=True),
    "odd widths": MoEConfig(60, 30, E, K, activation="gelu"),
    **{
        f"rounded, {mode}": MoEConfig(D, N, E, K, rounding=TokenRounding(mode, 16), router=RouterConfig(**LOSSES))
        for mode in ("nearest", "stochastic", "nearest_score", "balance")
    },
}  # fmt: skip
WITHOUT_VIEWS = [name for name, cfg in LAYERS.items() if not cfg.shared_intermediate_size]
DTYPES = [torch.bfloat16, torch.float32]
Described = dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]


def described(tensors: dict[str, Tensor]) -> Described:
    return {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors.items()}


def where(kind: str) -> Any:
    """The mode in which tensors on this kind of device have no values; those on "meta" never have any."""
    return nullcontext() if kind == "meta" else FakeTensorMode(allow_non_fake_inputs=True)


def assert_without_values(tensor: Tensor, kind: str) -> None:
    assert tensor.device.type == kind
    assert tensor.is_meta or torch._subclasses.fake_tensor.is_fake(tensor)


def layer_outputs(layer: MoE, dtype: torch.dtype) -> dict[str, Tensor]:
    weight = layer.experts.w1
    x = torch.rand(2, T // 2, weight.shape[2], device=weight.device, dtype=dtype)
    mask = torch.ones(2, T // 2, dtype=torch.bool, device=weight.device)
    return layer(x, mask)._asdict()


def layer_gradients(layer: MoE, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of a forward with gradients and of its backward."""
    weight = layer.experts.w1
    x = torch.rand(2, T // 2, weight.shape[2], device=weight.device, dtype=dtype, requires_grad=True)
    out = layer(x)
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(out.hidden.float().square().mean() + out.aux_loss, [x, *parameters.values()])
    return {**out._asdict(), **dict(zip(["dx", *parameters], grads, strict=True))}


@pytest.mark.parametrize("recompute", [None, "up_proj"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_layer_forward_and_backward(kind: str, name: str, dtype: torch.dtype, recompute: str | None) -> None:
    expected = layer_gradients(MoE(LAYERS[name], dtype=dtype, recompute=recompute), dtype)
    with where(kind):
        found = layer_gradients(MoE(LAYERS[name], device=kind, dtype=dtype, recompute=recompute), dtype)
    assert described(found) == described(expected)
    assert_without_values(found["hidden"], kind)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WITHOUT_VIEWS)
def test_layer_on_a_gpu_that_is_not_there(name: str, dtype: torch.dtype, training: bool) -> None:
    """The kernels are chosen without asking a driver."""
    with torch.no_grad():
        expected = layer_outputs(MoE(LAYERS[name], dtype=dtype).train(training), dtype)
        with where("cuda"):
            found = layer_outputs(MoE(LAYERS[name], device="cuda", dtype=dtype).train(training), dtype)
    assert described(found) == described(expected)
    assert_without_values(found["hidden"], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [None, "up_proj"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_fake_layer_of_a_gpu(name: str, dtype: torch.dtype, recompute: str | None) -> None:
    def found_on_a_gpu() -> dict[str, Tensor]:
        return layer_gradients(MoE(LAYERS[name], device="cuda", dtype=dtype, recompute=recompute), dtype)

    expected = found_on_a_gpu()
    with where("cuda"):
        found = found_on_a_gpu()
    assert described(found) == described(expected)
    assert_without_values(found["hidden"], "cuda")


def export(dtype: torch.dtype, *, strict: bool) -> tuple[MoE, torch.export.ExportedProgram]:
    torch.manual_seed(0)
    groups = RouterConfig(score="sigmoid", selection_bias=True, num_groups=4, top_groups=2)
    cfg = replace(LAYERS["biased"], num_experts_per_tok=3, shared_intermediate_size=16, router=groups)
    model = MoE(cfg, dtype=dtype).eval().requires_grad_(False)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    example = torch.randn(6, D).to(dtype)
    with torch.no_grad():
        return model, torch.export.export(model, (example,), dynamic_shapes=({0: tokens},), strict=strict)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_one_graph_for_any_number_of_tokens(strict: bool) -> None:
    model, program = export(torch.float32, strict=strict)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("tilemoe.moe.default") == 1
    module = program.module()
    for tokens in (2, 6, 33, 1000):
        x = torch.randn(tokens, D)
        assert torch.equal(module(x).hidden, model(x).hidden)


def test_loaded_by_another_process(tmp_path: Path) -> None:
    """Which has imported PyTorch's FLOP counter after the layer, that counts all the same; elsewhere it is before."""
    model, program = export(torch.bfloat16, strict=False)
    x = torch.randn(9, D).bfloat16()
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((x, model(x).hidden), tmp_path / "expected.pt")
    code = (
        "import sys, torch, tilemoe\n"
        "layer = tilemoe.MoE(tilemoe.MoEConfig(8, 4, 4, 2))\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as mode:\n"
        "    layer(torch.ones(3, 8))\n"
        "flops = mode.get_flop_counts()['Global'][torch.ops.tilemoe.moe]\n"
        "assert flops == 2 * 3 * 2 * 8 * 3 * 4, flops\n"
        "x, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "found = torch.export.load(sys.argv[1] + '/layer.pt2').module()(x)\n"
        "assert torch.equal(found.hidden, expected)\n"
    )
    run_python(code, tmp_path)
