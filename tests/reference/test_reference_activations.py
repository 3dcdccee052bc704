"""The oracle's activations against PyTorch's own functions, and the package's table against the oracle."""

import pytest
import torch
import torch.nn.functional as F

from tilemoe.activations import activation_spec
from tilemoe.config import ACTIVATIONS, GATE_UP_LAYOUTS, GATED_ACTIVATIONS
from tilemoe.kernels.experts.torch.activations import activation_grad, activation_value
from tilemoe.reference import activation

UNGATED = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
}
INNER_OF_GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
CASES = [
    (name, layout, {})
    for name in sorted(ACTIVATIONS)
    for layout in (GATE_UP_LAYOUTS if name in GATED_ACTIVATIONS else ("concatenated",))
] + [("swiglu_oai", layout, {"limit": 0.8, "alpha": 2.5}) for layout in GATE_UP_LAYOUTS]


def pre_activation(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """(R, 2n or n) values wide enough to reach the clamps, with exact zeros (a kink of relu) among them."""
    generator = torch.Generator().manual_seed(0)
    h = 6 * torch.randn(37, 10 if name in GATED_ACTIVATIONS else 5, dtype=torch.float64, generator=generator)
    h[3] = 0.0
    return h.to(dtype)


@pytest.mark.parametrize("name", sorted(UNGATED))
def test_ungated_values_are_pytorchs(name: str) -> None:
    h = pre_activation(name)
    torch.testing.assert_close(activation(h, name), UNGATED[name](h))


@pytest.mark.parametrize("name", sorted(INNER_OF_GATED))
@pytest.mark.parametrize("layout", GATE_UP_LAYOUTS)
def test_gated_values_are_the_gates_times_up(name: str, layout: str) -> None:
    h = pre_activation(name)
    gate, up = (h[:, :5], h[:, 5:]) if layout == "concatenated" else (h[:, 0::2], h[:, 1::2])
    torch.testing.assert_close(activation(h, name, layout), UNGATED[INNER_OF_GATED[name]](gate) * up)


def test_swiglu_oai_by_hand() -> None:
    h = torch.tensor([[2.0, 1.0], [9.0, -9.0], [-9.0, 9.0]], dtype=torch.float64)  # one gate and one up column

    def gated(gate: float, up: float) -> float:
        return gate * float(torch.sigmoid(torch.tensor(1.702 * gate, dtype=torch.float64))) * (up + 1.0)

    expected = torch.tensor([[gated(2, 1)], [gated(7, -7)], [gated(-9, 7)]], dtype=torch.float64)
    torch.testing.assert_close(activation(h, "swiglu_oai"), expected)


@pytest.mark.parametrize(("name", "layout", "parameters"), CASES)
def test_table_agrees_with_the_oracle(name: str, layout: str, parameters: dict[str, float]) -> None:
    h = pre_activation(name).requires_grad_()
    a = activation(h, name, layout, **parameters)
    da = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected_dh,) = torch.autograd.grad(a, h, da)

    spec = activation_spec(name, layout, parameters.get("limit"), parameters.get("alpha"))
    dh = torch.full_like(h, float("nan"))
    recomputed = activation_grad(h.detach(), da, spec, dh)

    assert float(a.detach().abs().max()) > 1.0
    torch.testing.assert_close(activation_value(h.detach(), spec), a.detach())
    torch.testing.assert_close(recomputed, a.detach())
    torch.testing.assert_close(dh, expected_dh)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_table_computes_low_precision_in_fp32(name: str, dtype: torch.dtype) -> None:
    h = pre_activation(name, dtype)
    spec = activation_spec(name, "concatenated", None, None)
    a = activation_value(h, spec)
    assert a.dtype == torch.float32
    torch.testing.assert_close(a.double(), activation(h.double(), name), rtol=1e-5, atol=1e-5)
    dh = torch.full_like(h, float("nan"))
    da = torch.ones_like(a)
    exact = h.double().requires_grad_()
    (expected,) = torch.autograd.grad(activation(exact, name).sum(), exact)
    activation_grad(h, da, spec, dh)
    assert dh.dtype == dtype
    torch.testing.assert_close(dh.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_unknown_name_and_stray_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="activation must be one of"):
        activation(torch.zeros(1, 2), "swish")
    with pytest.raises(ValueError, match="activation_limit is a parameter of activation='swiglu_oai'"):
        activation(torch.zeros(1, 2), "swiglu", limit=7.0)
    with pytest.raises(ValueError, match="gate_up must be one of concatenated, interleaved; got 'paired'"):
        activation(torch.zeros(1, 2), "swiglu", "paired")
