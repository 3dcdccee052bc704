"""``precision="fp8"``: what is computed, where it is not had, and what stays as it is without it.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import saved_tensors
from torch import Tensor

import tilemoe
from tilemoe import config, reference
from tilemoe.activations import REGISTRY
from tilemoe.plan import experts_of_rows
from tilemoe.runtime import tracing
from tilemoe.testing import relative_error

T, D, N, E, K = 96, 256, 128, 8, 2
NAMES = ("o", "x", "w1", "w2", "scores", "b1", "b2")


class Layer:
    """Operands of a layer at the scale of training; call it with an implementation for o and all gradients."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, activation: str = "swiglu", bias: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        width = N * (2 if REGISTRY[activation].is_gated else 1)
        self.plan = tilemoe.plan_topk(torch.rand(T, E).topk(K, 1).indices, E)
        self.x = torch.randn(T, D).to(dtype)
        self.w1, self.w2 = (torch.randn(E, width, D) / 16).to(dtype), (torch.randn(E, D, N) / 12).to(dtype)
        self.s = torch.rand(T, K)
        self.b1 = torch.randn(E, width).to(dtype) if bias else None
        self.b2 = torch.randn(E, D).to(dtype) if bias else None
        self.do = torch.randn(T, D).to(dtype)
        self.options = {"activation": activation, **options}

    def __call__(self, moe: Callable[..., Tensor], **options: Any) -> dict[str, Tensor]:
        given = [self.x, self.w1, self.w2, self.s, self.b1, self.b2]
        x, w1, w2, s, b1, b2 = [None if t is None else t.detach().requires_grad_() for t in given]
        o = moe(x, w1, w2, self.plan, s, b1=b1, b2=b2, **{**self.options, **options})
        wanted = [t for t in (x, w1, w2, s, b1, b2) if t is not None]
        return dict(zip(NAMES, [o.detach(), *torch.autograd.grad(o, wanted, self.do)], strict=False))


def assert_agree(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To fp32's rounding, but for rows of which a value lay on the border of two of e4m3's and fell to the other."""
    for name, value in found.items():
        rows, right = value.flatten(0, -2).double(), expected[name].flatten(0, -2).double()
        error = (rows - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-3 * float(right.norm(dim=-1).mean()))
        assert (error > 1e-5).double().mean() <= 0.02, name
        assert relative_error(value, expected[name]) < 2e-3, name


@pytest.mark.parametrize(
    "options",
    [{"gate_up": "interleaved"}, {"recompute": "up_proj"}, *({"activation": name, "bias": True} for name in REGISTRY)],
    ids=str,
)
def test_it_is_the_oracle(options: dict[str, Any]) -> None:
    layer = Layer(**options)
    expected = layer(reference.moe, precision="fp8")
    assert_agree(layer(tilemoe.moe, precision="fp8"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(dtype: torch.dtype) -> None:
    """A value that 16 bits have rounded may be quantised to the neighbour: 1/8 of it, seldom."""
    layer = Layer(dtype, bias=True)
    expected = layer(reference.moe, precision="fp8")
    for name, found in layer(tilemoe.moe, precision="fp8").items():
        assert found.dtype == expected[name].dtype
        assert relative_error(found, expected[name]) < 0.02, name


def test_error_budget() -> None:
    """Of e4m3's three bits: 2.6% for an operand, 3.7% for a product, two products in a row and a gate beside it."""
    layer = Layer(torch.bfloat16)
    exact = layer(reference.moe)
    for name, found in layer(tilemoe.moe, precision="fp8").items():
        error = relative_error(found, exact[name])
        assert 0.02 < error < 0.08, (name, error)


def test_narrow_weight_gradients_have_operands_as_they_are() -> None:
    """x, do and the weights are e4m3's: what is inexact comes from rounding a and dh, which these down_proj_wgrad and
    up_proj_wgrad do not."""
    layer = Layer(activation="relu")

    def exact(*shape: int) -> Tensor:
        values = torch.randint(4, 8, shape) / 4 * torch.randint(0, 2, shape).mul(2).sub(1)
        values[..., ::64, ::128] = 1.75  # scales are powers of two
        return values

    layer.x = torch.cat([exact(T, N), exact(T, N) / 16], dim=1)
    layer.x[:, ::N] = torch.tensor([1.75, 1.75 / 16])
    layer.w1, layer.w2 = torch.cat([torch.eye(N)] * 2, dim=1).expand(E, N, D) * 1.75, exact(E, D, N)
    layer.do = layer.do.sign()
    expected, found = layer(reference.moe), layer(tilemoe.moe, precision="fp8")
    for name in ("w1", "w2"):
        assert relative_error(found[name], expected[name]) < 1e-6, name
    for name in ("o", "x"):
        assert relative_error(found[name], expected[name]) > 1e-3, name


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """These layers count as wide enough for weight gradients in FP8."""
    monkeypatch.setattr(config, "FP8_WGRAD_WIDTH", N)
    monkeypatch.setattr(config, "FP8_WGRAD_ELEMENTS", D * N)
    monkeypatch.setattr("tilemoe.reference.fp8._WIDE", (N, D * N))


def test_the_oracle_and_the_layer_agree_on_what_is_wide() -> None:
    assert (config.FP8_WGRAD_WIDTH, config.FP8_WGRAD_ELEMENTS) == reference.fp8._WIDE
    for widths in ((2048, 2048), (4096, 1024), (1024, 4096)):
        assert config.quantizes_wgrad(*widths)
    for widths in ((2048, 1920), (1920, 2048), (8192, 896), (896, 8192)):
        assert not config.quantizes_wgrad(*widths)


@pytest.mark.parametrize("options", [
    {}, {"activation": "relu2", "bias": True}, {"activation": "swiglu_oai", "bias": True, "gate_up": "interleaved"},
], ids=str)  # fmt: skip
def test_wide_weight_gradients_are_the_oracles(wide: None, options: dict[str, Any]) -> None:
    layer = Layer(**options)
    expected = layer(reference.moe, precision="fp8")
    found = layer(tilemoe.moe, precision="fp8")
    assert_agree(found, expected)
    for name in ("w1", "w2"):  # weights as a transposed view of (E, in, out)
        setattr(layer, name, getattr(layer, name).transpose(1, 2).contiguous().transpose(1, 2))
    assert_agree(layer(tilemoe.moe, precision="fp8"), found)


def test_error_budget_of_wide_weight_gradients(wide: None) -> None:
    layer = Layer(torch.bfloat16)
    exact, found = layer(reference.moe), layer(tilemoe.moe, precision="fp8")
    for name in ("w1", "w2"):
        assert 0.05 < relative_error(found[name], exact[name]) < 0.08, name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_weight_gradients_of_its_experts_alone(wide: None, bad: float) -> None:
    layer = Layer()
    layer.x[5, 3] = bad
    found = layer(tilemoe.moe, precision="fp8")
    rows = (layer.plan.token_of_row == 5).nonzero()
    experts = experts_of_rows(layer.plan.row_start_of_expert, rows).flatten()
    for name in ("w1", "w2"):
        broken = found[name].isnan().flatten(1).all(1).nonzero().flatten()
        assert torch.equal(broken, experts.long()), name


def test_as_much_is_saved_as_without_it() -> None:
    layer = Layer(torch.bfloat16)

    def saved_bytes(precision: str) -> int:
        with saved_tensors() as saved:
            layer(tilemoe.moe, precision=precision)
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in saved}.values())

    assert saved_bytes("fp8") == saved_bytes("bf16") > 0


def test_an_expert_without_rows_and_a_token_of_zeros() -> None:
    layer = Layer()
    layer.plan = tilemoe.plan_topk(torch.zeros(T, K, dtype=torch.int64) + torch.arange(K), E)
    layer.x[7] = 0
    found = layer(tilemoe.moe, precision="fp8")
    assert (found["o"][7] == 0).all()
    assert (found["w1"][K:] == 0).all()
    assert_agree(found, layer(reference.moe, precision="fp8"))


def test_where_it_is_not_had_it_is_the_layers_own_dtype() -> None:
    cfg = tilemoe.MoEConfig(96, 64, 4, 2, precision="fp8")
    choice = tilemoe.select_kernels("cpu", torch.float32, cfg)
    assert choice.name == "torch"
    assert "not in FP8 (d is not a multiple of 128)" in choice.reason
    torch.manual_seed(0)
    layer, x = tilemoe.MoE(cfg), torch.randn(16, 96)
    plain = tilemoe.MoE(tilemoe.MoEConfig(96, 64, 4, 2))
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], plain(x)[0])


@pytest.mark.parametrize(
    ("d", "dtype", "compiled", "said"),
    [
        (
            96,
            torch.float32,
            False,
            r"float32 use kernels='torch', not in FP8 \(d is not a multiple of 128\): change that",
        ),
        (96, torch.bfloat16, True, r"bfloat16 use kernels='torch', not in FP8 \(d is not a multiple of 128\)"),
        (128, torch.float64, False, r"float64 use kernels='torch', not in FP8 \(fp64 is not quantised\)"),
        (128, torch.float16, False, r"float16 use kernels='torch_fp8', .* emulated, not faster"),
    ],
)
def test_fp8_that_is_not_had_is_said_once(d: int, dtype: torch.dtype, compiled: bool, said: str) -> None:
    """For all layers, all steps and backward, eager or in one graph."""
    tracing._warn.cache_clear()
    torch._dynamo.reset()
    layers = [tilemoe.MoE(tilemoe.MoEConfig(d, 128, 4, 2, precision="fp8"), dtype=dtype) for _ in range(2)]
    run = [torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer for layer in layers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for tokens in (8, 12, 16):
            x = torch.randn(tokens, d, dtype=dtype)
            for layer in run:
                x = layer(x).hidden
            x.sum().backward()
        tilemoe.select_kernels("cpu", dtype, layers[0].cfg)  # who asks is not warned
    (message,) = [str(each.message) for each in caught if "precision='fp8'" in str(each.message)]
    assert re.match(rf"precision='fp8': experts in torch\.{said}", message)

    assert "\n" not in message


def test_a_layer_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cfg = tilemoe.MoEConfig(D, N, E, K, precision="fp8")
    assert tilemoe.select_kernels("cpu", torch.bfloat16, cfg).name == "torch_fp8"
    layer, x = tilemoe.MoE(cfg), torch.randn(T, D)
    found = layer(x)[0]
    monkeypatch.setattr("tilemoe.layers.experts.moe", reference.moe)
    assert relative_error(found, layer(x)[0]) < 2e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp4"}, r"precision must be one of bf16, fp8; got 'fp4'"),
        ({"precision": "fp8", "kernels": "torch"}, r"kernels='torch' computes in bf16, but precision is 'fp8'"),
        ({"kernels": "torch_fp8"}, r"kernels='torch_fp8' computes in fp8, but precision is 'bf16'"),
        ({"save": "fp4"}, r"save must be one of fp8, full; got 'fp4'"),
        ({"save": None}, r"save must be one of fp8, full; got None"),
        ({"save": "fp8", "recompute": "up_proj"}, r"save='fp8' needs h, which recompute='up_proj' drops; leave one"),
        ({"save": "fp8", "dtype": torch.float64}, r"save='fp8': fp64 is not quantised; use save='full', or another d"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layer(**options)(tilemoe.moe)
