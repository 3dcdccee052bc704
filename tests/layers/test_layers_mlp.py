"""The MLP of dense blocks and shared experts against the reference, and what it saves; RMSNorm against its formula."""

import pytest
import torch
from helpers import saved_tensors
from torch import Tensor

from tilemoe import reference
from tilemoe.activations import ActivationSpec, activation_spec
from tilemoe.config import ACTIVATIONS
from tilemoe.layers.attention import RMSNorm
from tilemoe.layers.mlp import MLP, activate
from tilemoe.testing import relative_error

CASES = [(name, layout) for name in sorted(ACTIVATIONS) for layout in ("concatenated", "interleaved")]


def make(name: str, layout: str, dtype: torch.dtype) -> MLP:
    torch.manual_seed(0)
    return MLP(16, 12, activation_spec(name, layout), 0.3, dtype=dtype)


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_matches_the_reference(name: str, layout: str, dtype: torch.dtype, tolerance: float) -> None:
    mlp = make(name, layout, dtype)
    x = torch.randn(3, 11, 16).to(dtype).requires_grad_()
    do = torch.randn(3, 11, 16).to(dtype)
    out = mlp(x)
    grads = torch.autograd.grad(out, (x, mlp.w1, mlp.w2), do)

    inputs = [t.detach().double().requires_grad_() for t in (x, mlp.w1, mlp.w2)]
    exact = reference.shared_expert(inputs[0].flatten(0, 1), *inputs[1:], name, layout).view(x.shape)
    exact_grads = torch.autograd.grad(exact, inputs, do.double())
    assert out.dtype == dtype
    assert relative_error(out.detach(), exact.detach()) < tolerance
    for got, expected in zip(grads, exact_grads, strict=True):
        assert got.dtype == dtype
        assert relative_error(got, expected) < tolerance


def test_saves_the_pre_activation_alone() -> None:
    h = torch.randn(64, 24, dtype=torch.bfloat16, requires_grad=True)
    with saved_tensors() as saved:
        activate(h, ActivationSpec("swiglu"))
    assert [t.data_ptr() for t in saved] == [h.data_ptr()]


def test_many_rows_are_worked_on_in_blocks_with_the_same_result() -> None:
    h = torch.randn(5000, 512, requires_grad=True)
    a = activate(h, ActivationSpec("swiglu"))
    (dh,) = torch.autograd.grad(a, h, torch.ones_like(a))
    for rows in (slice(0, 100), slice(2450, 2600), slice(4900, 5000)):
        part = h.detach()[rows].requires_grad_()
        a_part = activate(part, ActivationSpec("swiglu"))
        torch.testing.assert_close(a[rows], a_part)
        torch.testing.assert_close(dh[rows], torch.autograd.grad(a_part, part, torch.ones_like(a_part))[0])


def test_second_derivative_is_refused() -> None:
    mlp = make("swiglu", "concatenated", torch.float64)
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(mlp(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 3e-3)]
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_matches_the_formula(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(96, 1e-6, dtype=dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.5)
    x = (torch.randn(7, 5, 96) * scale).to(dtype)
    out = norm(x)
    assert out.dtype == dtype
    assert relative_error(out.detach(), exact(x, norm.weight.detach(), 1e-6)) < tolerance


def test_squares_do_not_overflow_in_half_precision() -> None:
    norm = RMSNorm(64, 1e-6, dtype=torch.float16)
    out = norm(torch.full((2, 64), 3e4, dtype=torch.float16))
    assert torch.allclose(out, torch.ones_like(out), atol=1e-3)


def test_wider_weight_widens_the_output() -> None:
    x = torch.randn(3, 64).bfloat16()
    norm = RMSNorm(64, 1e-6)
    out = norm(x)
    assert out.dtype == torch.float32
    assert relative_error(out.detach(), exact(x, norm.weight.detach(), 1e-6)) < 1e-6
