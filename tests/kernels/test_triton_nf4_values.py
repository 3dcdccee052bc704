"""Triton's products with weights in NF4, in its interpreter and on a GPU, against their decoded values in fp64.

T tokens · d hidden_size · n intermediate_size · E experts
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE, DTYPES, INTERPRETED, every_third

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.base import Backend
from tilemoe.kernels.experts.formats.nf4 import Nf4Weight, Weight, quantize_nf4
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.plan import RoutingPlan
from tilemoe.testing import hostile_routings, relative_error

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

D, N = 192, 64  # not whole column tiles
ROUTINGS = [routing.name for routing in hostile_routings(tile=16)]
SPEC = activation_spec("swiglu", "concatenated", None, None)
# RMS-relative; each sum has at most 192 terms.
LIMITS = {torch.float32: 1e-6 if INTERPRETED else 4e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def frozen(*shape: int, transposed: bool, scales: torch.dtype) -> Nf4Weight:
    """(E, p, q) with blocks along q, or along p, and scales of this dtype."""
    experts, p, q = shape
    weight = normal(experts, q, p, dtype=torch.float32) if transposed else normal(*shape, dtype=torch.float32)
    found = quantize_nf4(weight)
    found = replace(found, absmax=found.absmax.to(scales))
    return found.transpose(1, 2) if transposed else found


def decoded(weight: Nf4Weight, dtype: torch.dtype) -> Tensor:
    """As a kernel for ``dtype`` multiplies it, in fp64."""
    return torch.stack([weight.expert(index, dtype).double() for index in range(weight.shape[0])])


def products(
    kernels: Backend, weights: Sequence[Weight], rows: dict[str, Tensor], biases: Sequence[Tensor | None],
    plan: RoutingPlan,
) -> dict[str, Tensor]:  # fmt: skip
    """up_proj, down_proj, down_proj_dgrad and up_proj_dgrad alone, down_proj and up_proj_dgrad of a part of d too;
    rows that are in use."""
    (w1, w2), (b1, b2), part = weights, biases, slice(64, D)
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


def assert_agree(
    plan: RoutingPlan, dtype: torch.dtype, transposed: bool, bias: bool, scales: torch.dtype = torch.float32
) -> None:
    experts, capacity = plan.num_experts, plan.capacity
    shapes = ((experts, 2 * N, D), (experts, D, N))
    weights = [frozen(*shape, transposed=transposed, scales=scales) for shape in shapes]
    sizes = {"x": (plan.num_tokens, D), "a": (capacity, N), "dh": (capacity, 2 * N)}
    rows = {name: normal(*shape, dtype=dtype) for name, shape in sizes.items()}
    biases = [normal(experts, width, dtype=dtype) if bias else None for width in (2 * N, D)]
    found = products(TritonBackend(), weights, rows, biases, plan)
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
    assert_agree(plan, DTYPES[number % len(DTYPES)], transposed=bool(number // 2 % 2), bias=bool(number // 4 % 2))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_layout(dtype: torch.dtype, transposed: bool) -> None:
    """Scales of 16 bits are what FSDP's mixed precision gathers."""
    for scales in (torch.float32, DTYPES[-1]):
        torch.manual_seed(0)
        plan = next(each.plan for each in hostile_routings(tile=16, device=DEVICE) if each.name == "random")
        assert_agree(plan, dtype, transposed, bias=transposed, scales=scales)
