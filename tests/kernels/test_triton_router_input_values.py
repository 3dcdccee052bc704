"""Checks of the router's share of dx, on a GPU and in Triton's interpreter.

T tokens · d hidden_size · E experts
"""

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE, INTERPRETED

from tilemoe.kernels.router.triton_input_grad import input_grad, why_unsupported
from tilemoe.ops import router as ops
from tilemoe.testing import relative_error

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # whose arithmetic is right there

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def operands(tokens: int, d: int, experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + d + experts)
    shapes = ((tokens, experts), (experts, d), (tokens, d))
    d_logits, weight, dx = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return d_logits, weight, dx


def assert_sum(d_logits: Tensor, weight: Tensor, dx: Tensor) -> None:
    """To one rounding of the sum, which fp64 takes exactly; what was given stays as it is."""
    before = dx.clone()
    got = input_grad(d_logits, weight, dx)
    want = dx.double() + d_logits.double() @ weight.double()
    assert got.dtype == dx.dtype
    assert got.is_contiguous()
    assert torch.equal(dx, before)
    assert relative_error(got, want) < torch.finfo(dx.dtype).eps / 2
    assert float((got.double() - want).abs().max()) <= torch.finfo(dx.dtype).eps * float(want.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "d", "experts"),
    [(1, 8, 8), (129, 136, 16), (130, 264, 64), (64, 128, 128), (257, 72, 136), (5, 1000, 512)],
)
def test_it_is_the_sum(tokens: int, d: int, experts: int, dtype: torch.dtype) -> None:
    assert_sum(*operands(tokens, d, experts, dtype))


def test_rows_apart() -> None:
    d_logits, weight, dx = operands(100, 144, 24, DTYPES[0])
    assert_sum(d_logits[:, :16], weight[8:, 72:][:16], dx[:, :72])


@pytest.mark.parametrize("case", ["narrow", "uneven", "transposed", "expanded", "no tokens", "served"])
def test_what_it_serves(case: str) -> None:
    tokens, d, experts = {"no tokens": (0, 72, 24), "narrow": (100, 6, 24), "uneven": (100, 72, 60)}.get(
        case, (100, 72, 24)
    )
    d_logits, weight, dx = operands(tokens, d, experts, DTYPES[0])
    weight = weight.t().contiguous().t() if case == "transposed" else weight
    dx = dx[:1].expand(100, 72) if case == "expanded" else dx
    assert (why_unsupported(d_logits, weight, dx) is None) == (case == "served" and not INTERPRETED)  # which has no TMA
    got, want = ops.input_grad(d_logits, weight, dx), dx.double() + d_logits.double() @ weight.double()
    assert got.shape == dx.shape
    assert tokens == 0 or relative_error(got, want) < torch.finfo(DTYPES[0]).eps


def test_the_operator_is_what_it_says_and_differentiable_once() -> None:
    d_logits, weight, dx = operands(5, 3, 4, torch.float32)
    torch.library.opcheck(ops.input_grad.registered, (d_logits, weight, dx))
    out = ops.input_grad(d_logits, weight, dx.requires_grad_())
    with pytest.raises(RuntimeError, match=r"tilemoe\.MoE in 16 bits .* differentiable once.*tilemoe\.reference"):
        out.sum().backward()


@pytest.mark.skipif(INTERPRETED, reason="takes 9 GB")
def test_offsets_beyond_int32() -> None:
    tokens = 2**31 // 4096 + 300
    d_logits = torch.zeros(tokens, 8, dtype=torch.bfloat16, device=DEVICE)
    d_logits[-1] = 1.0
    weight = torch.full((8, 4096), 0.5, dtype=torch.bfloat16, device=DEVICE)
    got = input_grad(d_logits, weight, torch.ones(tokens, 4096, dtype=torch.bfloat16, device=DEVICE))
    assert bool((got[-1] == 5.0).all())
    assert bool((got[:-1] == 1.0).all())
