"""The rotation in one kernel, on a GPU and in Triton's interpreter.

B sequences · S tokens · H heads · D head width
"""

import pytest
import torch
from triton_checks import DEVICE, DTYPES, INTERPRETED

from tilemoe.kernels.lm.triton_rotary import rotate
from tilemoe.layers import attention
from tilemoe.layers.attention import rotary_angles

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

LIMIT = {torch.float32: 2e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "width"), [(3, 16), (1, 2), (12, 128), (5, 80), (2, 256)])
def test_as_a_complex_product_in_fp64(heads: int, width: int, dtype: torch.dtype, back: bool) -> None:
    torch.manual_seed(0)
    cos, sin = rotary_angles(torch.arange(5, 12, device=DEVICE), width, 10000.0)
    turn = torch.complex(cos.double(), -sin.double() if back else sin.double())
    whole = torch.randn(2, 7, heads, 3 * width, device=DEVICE).to(dtype)
    by_head = torch.randn(2, heads, 7, width, device=DEVICE).to(dtype).transpose(1, 2)
    by_column = torch.randn(2, 7, width, heads, device=DEVICE).to(dtype).transpose(2, 3)
    for x in (whole[..., width : 2 * width], by_head, by_column):
        first, second = x.double().chunk(2, dim=-1)
        product = torch.complex(first, second) * turn
        exact = torch.cat((product.real, product.imag), dim=-1)
        out = rotate(x, cos, sin, dtype, back=back)
        assert out.is_contiguous()
        assert out.dtype == dtype
        error = float((out.double() - exact).norm() / exact.norm())
        assert error < LIMIT[dtype], f"error {error:.2e}, limit {LIMIT[dtype]:.2e}"


def test_rounds_once_to_the_dtype_asked_for() -> None:
    torch.manual_seed(0)
    cos, sin = rotary_angles(torch.arange(9, device=DEVICE), 32, 10000.0)
    x = torch.randn(1, 9, 4, 32, device=DEVICE)
    exact = rotate(x, cos, sin, torch.float32, back=False)
    assert torch.equal(rotate(x, cos, sin, torch.float16, back=False), exact.half())


def test_nothing_to_turn() -> None:
    for shape in ((0, 4, 2, 8), (3, 0, 2, 8)):
        cos, sin = rotary_angles(torch.arange(shape[1], device=DEVICE), 8, 10000.0)
        x = torch.empty(shape, device=DEVICE, dtype=torch.float16)
        assert rotate(x, cos, sin, torch.float16, back=True).shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attentions_rotation_and_its_gradient_take_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cos, sin = rotary_angles(torch.arange(2, 11, device=DEVICE), 32, 10000.0)
    x, d_out = torch.randn(2, 2, 9, 3, 32, device=DEVICE).to(dtype)
    x.requires_grad_()
    if not INTERPRETED:
        assert attention._is_one_kernel(x.detach(), cos)
        assert not attention._is_one_kernel(x.detach().double(), cos.double())
    results = []
    for is_one_kernel in (True, False):
        monkeypatch.setattr(attention, "_is_one_kernel", lambda *_, it=is_one_kernel: it)
        out = attention.rotate(x, cos, sin, dtype)
        results.append((out.detach(), *torch.autograd.grad(out, x, d_out)))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype == dtype
        error = float((got.double() - want.double()).norm() / want.double().norm())
        assert error < LIMIT[dtype], f"error {error:.2e}, limit {LIMIT[dtype]:.2e}"
