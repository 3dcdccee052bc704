"""The activations inside kernels: their own formulas in fp32, from their very source, and the instructions they take.

The GEMMs' tests compare whole tensors; here every value counts.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from gluon_emulator import Emulator
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_compile import machine_code

from tilemoe import reference
from tilemoe.activations import activation_spec
from tilemoe.config import ACTIVATIONS, GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.kernels.experts.torch.activations import activation_grad
from tilemoe.kernels.experts.triton import activations
from tilemoe.kernels.experts.triton.activations import gated_grad, gated_value, inner

NAN, INF = float("nan"), float("inf")
LIMITS = (7.0, 10.0)  # of the clamped ones, by default
ELEMENTS, THREADS = 1024, 128


def of_kernels(function: Any) -> Any:
    """The kernels' function, on CPU tensors."""
    return Emulator().function(function)


def parameters(name: str) -> tuple[float, float]:
    spec = activation_spec(name)
    return spec.limit, spec.alpha


def run_grad(h: Tensor, da: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """(a, dh) of ``h`` (R, 2 or 1) and ``da`` (R, 1), as the kernels compute them for 16-bit types."""
    if name in GATED_ACTIVATIONS:
        a, dgate, dup = of_kernels(gated_grad)(h[:, :1], h[:, 1:], da, *parameters(name), name, False)
        return a, torch.cat([dgate, dup], 1)
    a, slope = of_kernels(inner)(h, name, False)
    return a, da * slope


def grid(name: str) -> Tensor:
    """(R, 2 or 1) fp32: every gate, and with it several ups, the clamps' bounds among both."""
    ends = torch.tensor([0.0, *LIMITS, 20.0, 300.0])
    gate = torch.cat([torch.linspace(-14, 14, 28001), ends, -ends])
    if name in UNGATED_ACTIVATIONS:
        return gate[:, None]
    return torch.cartesian_prod(gate, torch.tensor([-11.0, -10.0, -7.0, -0.3, 1.0, 7.0, 7.5, 10.0]))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_value_and_gradient(name: str) -> None:
    h = grid(name)
    da = torch.linspace(-2, 2, len(h))[:, None]
    exact_h = h.double().requires_grad_()
    exact_a = reference.activation(exact_h, name)
    (exact_dh,) = torch.autograd.grad(exact_a, exact_h, da.double())
    a, dh = run_grad(h, da, name)
    # Absolute: 1 - sigmoid has the error of 1, which tanh GELU multiplies by up to 13, an up by 9 and da by 2.
    torch.testing.assert_close(a.double(), exact_a.detach(), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(dh.double(), exact_dh, rtol=2e-6, atol=5e-5)
    if name in GATED_ACTIVATIONS:
        value = of_kernels(gated_value)(h[:, :1], h[:, 1:], *parameters(name), name, False)
        torch.testing.assert_close(value, a, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("form", [inner, gated_value])
def test_a_name_without_a_branch_is_refused(form: Any) -> None:
    """So the cases above, one for each registered name, fail for a name that has no Triton form."""
    z = torch.ones(4, 1)
    arguments = (z,) if form is inner else (z, z, 7.0, 1.0)
    with pytest.raises(AssertionError, match="an activation without a kernel"):
        of_kernels(form)(*arguments, "softplus", False)


def exact_cdf(z: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-(0.5**0.5) * z)


def test_error_of_the_normal_distribution_is_as_stated() -> None:
    z = torch.linspace(-13.2, 0, 1_320_001, dtype=torch.float64)
    cdf, density = of_kernels(activations.normal)(z, False)
    assert float((cdf / exact_cdf(z) - 1).abs().max()) < 7e-7
    torch.testing.assert_close(density, torch.exp(-0.5 * z * z) / (2 * torch.pi) ** 0.5, rtol=1e-13, atol=0.0)
    assert torch.equal(of_kernels(activations.normal)(-z[:-1], False)[0], 1 - cdf[:-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_as_exact_as_pytorchs(approximate: str, dtype: torch.dtype) -> None:
    z = torch.linspace(-6, 6, 120_001).to(dtype).unique().requires_grad_()
    exact_z = z.detach().double().requires_grad_()
    value, slope = of_kernels(inner)(z.detach().float(), {"none": "gelu", "tanh": "gelu_tanh"}[approximate], False)
    theirs, exact = (torch.nn.functional.gelu(of, approximate=approximate) for of in (z, exact_z))
    their_slope, exact_slope = (torch.autograd.grad(f.sum(), of)[0] for f, of in ((theirs, z), (exact, exact_z)))
    for mine, other, true in ((value, theirs.detach(), exact.detach()), (slope, their_slope, exact_slope)):
        errors = [float((found.to(dtype).double() - true).norm()) for found in (mine, other)]
        assert errors[0] <= 1.001 * errors[1]


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_what_is_not_finite(name: str) -> None:
    """NaN stays, in the gradient where the table has it, too; infinities give what the table gives in fp32."""
    z = torch.tensor([[NAN], [INF], [-INF], [1.0]])
    h = torch.cat([torch.cat([z, torch.full_like(z, 2.0)], 1), torch.tensor([[1.0, NAN], [1.0, INF], [1.0, -INF]])])
    h = h if name in GATED_ACTIVATIONS else z
    da = torch.ones(len(h), 1)
    expected_dh = torch.empty_like(h)
    expected_a = activation_grad(h, da, activation_spec(name), expected_dh)
    a, dh = run_grad(h, da, name)
    torch.testing.assert_close(a, expected_a, equal_nan=True)
    assert bool(a[0].isnan())
    assert bool((dh.isnan() | ~expected_dh.isnan() | ~expected_a.isfinite()).all())


# Arithmetic instructions for each element of a gated gradient: the sigmoid's exponential and reciprocal root and ten
# more make swiglu's. There is no branch in any.
INSTRUCTIONS = {"swiglu": 12, "geglu": 21, "geglu_tanh": 15, "reglu": 6, "swiglu_oai": 20, "swiglu_clamped": 20}
_ARITHMETIC = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?(F[A-Z0-9]+|MUFU)\b"


@triton.jit
def grad_kernel(gate, up, da, out, limit, alpha, NAME: tl.constexpr, ELEMENTS: tl.constexpr):
    """out (3, ELEMENTS) of gate, up and da (ELEMENTS), fp32."""
    element = tl.arange(0, ELEMENTS)
    a, dgate, dup = gated_grad(
        tl.load(gate + element), tl.load(up + element), tl.load(da + element), limit, alpha, NAME, False
    )
    tl.store(out + element, a)
    tl.store(out + ELEMENTS + element, dgate)
    tl.store(out + 2 * ELEMENTS + element, dup)


@pytest.mark.parametrize("name", sorted(GATED_ACTIVATIONS))
def test_instructions_of_an_element(name: str, tmp_path: Path) -> None:
    pointers = ("gate", "up", "da", "out")
    signature = {**dict.fromkeys(pointers, "*fp32"), "limit": "fp32", "alpha": "fp32"}
    constants = {"NAME": name, "ELEMENTS": ELEMENTS}
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(pointers))}
    source = ASTSource(grad_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": THREADS // 32})
    code = machine_code(compiled, tmp_path)
    per_element = len(re.findall(_ARITHMETIC, code, re.M)) * THREADS / ELEMENTS
    assert 0.5 * INSTRUCTIONS[name] < per_element <= INSTRUCTIONS[name] + 0.5
    assert len(re.findall(r"\bBRA\b", code)) == 1, "the machine code ends with one that nothing reaches"
