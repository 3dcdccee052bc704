"""The Blackwell kernels' numbers and protocols without a GPU: their sources in an emulator of Gluon (README.md).

T tokens · d hidden_size · n intermediate_size
"""

from itertools import product

import pytest
import torch
from emulated_layer import TOLERANCE, emulated, gluon_kernels, plan_of
from triton_checks import Case, assert_added_exactly, assert_kernels_agree, every_third

from tilemoe.config import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.kernels.experts.blackwell.backend import BlackwellBackend
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.plan import RoutingPlan
from tilemoe.testing import hostile_routings

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

FP16 = torch.float16  # the emulator's, for both types of 16 bits
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=128)}
KERNELS_OF_A_LAYER = {"up_proj_act_kernel", "gemm_wgrad_kernel"}
# Ragged in both; more steps than the ring has stages, all full; one step, one slice; two tiles of columns.
SIZES = ((136, 200), (320, 136), (64, 64), (192, 264))


class WithoutBiasGrads(BlackwellBackend):
    """The bias gradients are the portable kernels', which other tests have."""

    down_proj_bias_grad = TorchBackend.down_proj_bias_grad
    up_proj_bias_grad = TorchBackend.up_proj_bias_grad
    down_proj = TorchBackend.down_proj
    down_proj_dgrad_dact = TorchBackend.down_proj_dgrad_dact
    up_proj_dgrad = TorchBackend.up_proj_dgrad


KERNELS = WithoutBiasGrads()


def cases() -> list[Case]:
    names = [(name, layout) for name in sorted(GATED_ACTIVATIONS) for layout in ("concatenated", "interleaved")]
    names += [(name, "concatenated") for name in sorted(UNGATED_ACTIVATIONS)]
    flags = list(product((False, True), repeat=2))
    return [
        Case(FP16, *layout, bias, transposed, *SIZES[(i + j) % 4])
        for i, layout in enumerate(names)
        for j, (bias, transposed) in enumerate(flags)
    ]


CASES = cases()


def agree(plan: RoutingPlan, case: Case, ctas: int, seed: int, late: float = 0.9) -> None:
    with emulated(ctas, seed, late, capability=100) as launches:
        assert_kernels_agree(KERNELS, plan, case, TOLERANCE)
    assert gluon_kernels(launches) == (KERNELS_OF_A_LAYER if plan.capacity else set())


@pytest.mark.parametrize("name", every_third(ROUTINGS))
def test_hostile_routings(name: str) -> None:
    index = list(ROUTINGS).index(name)
    agree(ROUTINGS[name], CASES[7 * index % len(CASES)], 1 + index % 3, index, (0.3, 0.9, 1.0)[index // 3 % 3])


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_weight_gradients_are_added_exactly(transposed: bool) -> None:
    case = Case(FP16, transposed=transposed, hidden_size=136, intermediate_size=264)
    with emulated(ctas=3, capability=100) as launches:
        assert_added_exactly(KERNELS, plan_of(65, 0, 130, 40), case)
    assert gluon_kernels(launches) == {"gemm_wgrad_kernel"}


@pytest.mark.parametrize("column_major", [False, True])
def test_rows_that_tma_cannot_describe_come_by_cp_async(column_major: bool) -> None:
    plan = plan_of(130, 0, 64, 194, 1, 5)
    do, a = torch.randn(136).half().expand(plan.num_tokens, 136), torch.randn(plan.capacity, 264).half()
    with emulated(seed=1, capability=100) as launches:
        found = KERNELS.down_proj_wgrad(do, a, plan, column_major)
    assert launches[0].constants["ACCESS"] == "copy"
    exact = TorchBackend().down_proj_wgrad(do.double(), a.double(), plan)
    assert float((found.double() - exact).norm()) <= TOLERANCE * float(exact.norm())
