"""Triton's products with weights in 4 bits, in its interpreter and on a GPU, against their decoded values in fp64.

T tokens · d hidden_size · n intermediate_size · E experts
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE, DTYPES, INTERPRETED, every_third

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.mxfp4 import Mxfp4Weight, quantize_mxfp4
from tilemoe.kernels.experts.formats.nf4 import quantize_nf4, quantize_nf4_double
from tilemoe.kernels.experts.formats.packed import PackedWeight, Weight
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing import assert_equal, hostile_routings, relative_error

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

ROUTINGS = [routing.name for routing in hostile_routings(tile=16)]
SPEC = activation_spec("swiglu", "concatenated", None, None)
# RMS-relative; each sum has at most 192 terms.
LIMITS = {torch.float32: 1e-6 if INTERPRETED else 4e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def nf4_of_narrow_scales(weight: Tensor) -> PackedWeight:
    """Scales of 16 bits are what FSDP's mixed precision gathers."""
    found = quantize_nf4(weight)
    return replace(found, absmax=found.absmax.to(DTYPES[-1]))


class Format(NamedTuple):
    quantize: Callable[[Tensor], PackedWeight]
    d: int
    n: int


# Widths are not whole column tiles; of MXFP4 they are not whole k-blocks either, or they are.
FORMATS = {
    "nf4": Format(quantize_nf4, 192, 64),
    "nf4, narrow scales": Format(nf4_of_narrow_scales, 192, 64),
    "mxfp4": Format(quantize_mxfp4, 192, 64),
    "mxfp4, narrow": Format(quantize_mxfp4, 160, 96),
}


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def frozen(*shape: int, quantize: Callable[[Tensor], PackedWeight], transposed: bool) -> PackedWeight:
    """(E, p, q) with blocks along q, or along p."""
    experts, p, q = shape
    if transposed:
        return quantize(normal(experts, q, p, dtype=torch.float32)).transpose(1, 2)
    return quantize(normal(*shape, dtype=torch.float32))


def decoded(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """As a kernel for ``dtype`` multiplies it, in fp64."""
    return torch.stack([weight.expert(index, dtype).double() for index in range(weight.shape[0])])


def products(
    kernels: Backend, weights: Sequence[Weight], rows: dict[str, Tensor], biases: Sequence[Tensor | None],
    plan: RoutingPlan,
) -> dict[str, Tensor]:  # fmt: skip
    """up_proj, down_proj, down_proj_dgrad and up_proj_dgrad alone, down_proj and up_proj_dgrad of a part of d too;
    rows that are in use."""
    (w1, w2), (b1, b2), part = weights, biases, slice(64, rows["x"].shape[1])
    found = {
        "h": kernels.up_proj(rows["x"], w1, b1, plan, SPEC),
        "y": kernels.down_proj(rows["a"], w2, b2, plan),
        "part of y": kernels.down_proj(rows["a"], w2[:, part], None if b2 is None else b2[:, part], plan),
        "da": kernels.up_proj(rows["x"], w2.transpose(1, 2), None, plan, SPEC),
        "dx": kernels.up_proj_dgrad(rows["dh"], w1, plan),
        "part of dx": kernels.up_proj_dgrad(rows["dh"], w1[:, :, part], plan),
    }
    in_use = int(plan.row_start_of_expert[-1])
    return {name: each[:in_use] for name, each in found.items()}


def assert_agree(plan: RoutingPlan, form: Format, dtype: torch.dtype, transposed: bool, bias: bool) -> None:
    experts, capacity, d, n = plan.num_experts, plan.capacity, form.d, form.n
    shapes, kernels = ((experts, 2 * n, d), (experts, d, n)), TritonBackend()
    weights = [frozen(*shape, quantize=form.quantize, transposed=transposed) for shape in shapes]
    sizes = {"x": (plan.num_tokens, d), "a": (capacity, n), "dh": (capacity, 2 * n)}
    rows = {name: normal(*shape, dtype=dtype) for name, shape in sizes.items()}
    biases = [normal(experts, width, dtype=dtype) if bias else None for width in (2 * n, d)]
    found = products(kernels, [kernels.whole_scales(weight) for weight in weights], rows, biases, plan)
    exact_weights = [decoded(weight, dtype) for weight in weights]
    exact_biases = [None if each is None else each.double() for each in biases]
    wide = {name: each.double() for name, each in rows.items()}
    for name, exact in products(TorchBackend(), exact_weights, wide, exact_biases, plan).items():
        assert found[name].dtype == dtype, name
        assert found[name].shape == exact.shape, name
        if exact.numel():
            assert relative_error(found[name], exact) < LIMITS[dtype], name


@pytest.mark.parametrize("routing", every_third(ROUTINGS))
def test_hostile_routings(routing: str) -> None:
    number = ROUTINGS.index(routing)
    torch.manual_seed(number)
    plan = next(each.plan for each in hostile_routings(tile=16, device=DEVICE) if each.name == routing)
    dtype, transposed, bias = DTYPES[number % len(DTYPES)], bool(number // 2 % 2), bool(number // 4 % 2)
    assert_agree(plan, FORMATS["mxfp4" if number % 2 else "nf4"], dtype, transposed, bias)


EACH_DTYPE = [(form, dtype) for form in ("nf4", "mxfp4") for dtype in DTYPES]
EACH_FORM = [*EACH_DTYPE, ("nf4, narrow scales", DTYPES[0]), ("mxfp4, narrow", DTYPES[-1])]


@pytest.mark.parametrize(
    ("form", "dtype", "transposed"),
    [
        pytest.param(*form, transposed, marks=pytest.mark.thorough if (i + transposed) % 2 else ())
        for i, form in enumerate(EACH_FORM)
        for transposed in (False, True)
    ],
    ids=str,
)
def test_each_layout(form: str, dtype: torch.dtype, transposed: bool) -> None:
    torch.manual_seed(0)
    plan = next(each.plan for each in hostile_routings(tile=16, device=DEVICE) if each.name == "random")
    assert_agree(plan, FORMATS[form], dtype, transposed, bias=transposed)


def test_exponents_of_mxfp4_to_the_smallest_and_largest() -> None:
    """In fp32, where the smallest are subnormal: of each expert a row, and a weight of one block in each row."""
    exponents = torch.tensor([0, 1, 2, 126, 127, 128, 253, 254], dtype=torch.uint8, device=DEVICE)
    experts = len(exponents)
    blocks = torch.full((experts, 32, 1, 16), 0x21, dtype=torch.uint8, device=DEVICE)  # 0.5 and 1
    weight = Mxfp4Weight.from_checkpoint(blocks, exponents.view(-1, 1, 1).expand(-1, 32, 1).contiguous())
    plan = plan_topk(torch.arange(experts, device=DEVICE).view(-1, 1), experts)
    found = TritonBackend().up_proj_dgrad(torch.eye(experts, 32, device=DEVICE), weight, plan)
    assert_equal(found, torch.stack([weight.expert(index, torch.float32)[index] for index in range(experts)]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(2, 96, 192), (1, 64, 64 * 257), (3, 1, 64)])
def test_doubly_quantised_scales_are_the_formats(shape: tuple[int, int, int], transposed: bool) -> None:
    """To the bit: blocks of 256 that end inside a row, in a tail, and before the first ends."""
    found = frozen(*shape, quantize=quantize_nf4_double, transposed=False)
    found = found.transpose(1, 2) if transposed else found
    whole, expected = TritonBackend().whole_scales(found), found.with_whole_scales()
    assert_equal(whole.scales, expected.scales)
    assert whole.shape == found.shape
