"""RMSNorm against its formula in fp64."""

import pytest
import torch
from torch import Tensor

from tilemoe.layers.norm import RMSNorm
from tilemoe.testing import relative_error


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


def test_gradients() -> None:
    norm = RMSNorm(6, 1e-5, dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))
