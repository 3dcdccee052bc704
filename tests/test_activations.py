"""The table of activations: values, gradients, kinks, large values and what it must leave alone.

R rows · n expert width
"""

import pytest
import torch
from torch import Tensor

from tilemoe import reference
from tilemoe.activations import REGISTRY, activation_spec
from tilemoe.config import ACTIVATIONS, GATE_UP_LAYOUTS, GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.kernels.experts.torch.activations import activation_grad, activation_rows

R, N = 61, 7
ALL = sorted(ACTIVATIONS)


def cases() -> list[tuple[str, str, float | None, float | None]]:
    """(activation, layout, limit, alpha)."""
    plain = [
        (name, layout, None, None)
        for name in ALL
        for layout in (GATE_UP_LAYOUTS if name in GATED_ACTIVATIONS else GATE_UP_LAYOUTS[:1])
    ]
    parameters = [(1.5, 0.7), (0.8, 2.5)]
    found = plain + [("swiglu_oai", layout, *each) for layout in GATE_UP_LAYOUTS for each in parameters]
    return found + [("swiglu_clamped", layout, 1.5, None) for layout in GATE_UP_LAYOUTS]


def width(name: str, n: int = N) -> int:
    return 2 * n if name in GATED_ACTIVATIONS else n


def random_h(name: str, dtype: torch.dtype, scale: float = 3.0) -> Tensor:
    """(R, w), zeros (a kink of relu) in one row."""
    h = scale * torch.randn(R, width(name), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    h[3] = 0.0
    return h.to(dtype)


def random_da(dtype: torch.dtype) -> Tensor:
    return torch.randn(R, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def run_table(
    h: Tensor,
    da: Tensor,
    name: str,
    layout: str = "concatenated",
    limit: float | None = None,
    alpha: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(value, value recomputed by the gradient, dh); checks that the inputs were left alone."""
    spec = activation_spec(name, layout, limit, alpha)
    h_before, da_before = h.clone(), da.clone()
    value = activation_rows(h.to(torch.promote_types(h.dtype, torch.float32)), spec)  # unrounded
    dh = torch.full_like(h, float("nan"))
    again = activation_grad(h, da, spec, dh)
    assert torch.equal(h.nan_to_num(), h_before.nan_to_num())
    assert torch.equal(da, da_before)
    return value, again, dh


def autograd(h: Tensor, da: Tensor, *case: object) -> tuple[Tensor, Tensor]:
    """(value, dh) of the oracle in fp64."""
    h = h.detach().double().clone().requires_grad_()
    a = reference.activation(h, *case)  # type: ignore[arg-type]
    return a.detach(), torch.autograd.grad(a, h, da.double())[0]


def test_table_is_the_configs() -> None:
    assert set(REGISTRY) == ACTIVATIONS
    assert {name for name in ALL if activation_spec(name).is_gated} == GATED_ACTIVATIONS
    assert {name for name in ALL if activation_spec(name).width_factor == 1} == (UNGATED_ACTIVATIONS)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_fp64_value_and_gradient(case: tuple[str, str, float | None, float | None]) -> None:
    h, da = random_h(case[0], torch.float64), random_da(torch.float64)
    a, dh = autograd(h, da, *case)
    value, again, actual_dh = run_table(h, da, *case)
    for actual, exact in ((value, a), (again, a), (actual_dh, dh)):
        assert float(exact.abs().max()) > 1
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("name", ["relu", "relu2", "reglu"])
def test_gradient_at_the_kink_of_relu_is_zero(name: str, zero: float) -> None:
    h = torch.tensor([[zero, 2.0]] if name == "reglu" else [[zero]])
    value, _, dh = run_table(h, torch.ones(1, 1), name)
    assert not value.any()
    assert not dh.any()


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize(("name", "default"), [("swiglu_oai", 7.0), ("swiglu_clamped", 10.0)])
def test_gradient_at_the_clamps_is_that_of_torch(name: str, default: float, limit: float | None) -> None:
    bound = default if limit is None else limit
    ends = torch.tensor([-bound, bound], dtype=torch.float64)
    inf = torch.full_like(ends, float("inf"))
    around = torch.cat([ends, torch.nextafter(ends, inf), torch.nextafter(ends, -inf), torch.tensor([0.5, -0.5])])
    h = torch.cartesian_prod(around, around)
    da = torch.ones(h.shape[0], 1, dtype=torch.float64)
    _, expected = autograd(h, da, name, "concatenated", limit, None)
    _, _, dh = run_table(h, da, name, "concatenated", limit, None)
    torch.testing.assert_close(dh, expected, rtol=1e-12, atol=1e-15)
    at_bound = (h[:, 0] == bound) & (h[:, 1] == bound)
    assert dh[at_bound].all(), "the bound itself lets the gradient through"
    assert torch.equal(dh[:, 0] == 0, h[:, 0] > bound)
    assert torch.equal(dh[:, 1] == 0, h[:, 1].abs() > bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_large_values_stay_finite_and_reach_their_limits(name: str, dtype: torch.dtype) -> None:
    sizes = torch.tensor([1e4, 300.0, 60.0, 0.0], dtype=torch.float64).to(dtype)
    ends = torch.cat([sizes, -sizes])
    h = torch.cartesian_prod(ends, ends) if name in GATED_ACTIVATIONS else ends[:, None]
    value, again, dh = run_table(h, torch.ones(h.shape[0], 1, dtype=torch.promote_types(dtype, torch.float32)), name)
    for t in (value, again, dh):
        assert t.isfinite().all()
    for t in (value, again):
        torch.testing.assert_close(t.double(), reference.activation(h.double(), name), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_nan_is_not_hidden(name: str) -> None:
    h = torch.zeros(2, width(name, 1))
    h[0, 0] = float("nan")
    value, again, _ = run_table(h, torch.ones(2, 1), name)
    assert value[0].isnan()
    assert again[0].isnan()
    assert value[1].isfinite()
