"""The Blackwell kernels' protocols without a GPU, and their numbers for drawn routings: their sources in an emulator of
Gluon (README.md). Their numbers otherwise: test_hopper_emulated.py.

T tokens · d hidden_size · n intermediate_size
"""

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from blackwell_emulator import BlackwellEmulator
from blackwell_faults import GROUPS
from emulated_layer import (
    PRECISIONS,
    TOLERANCE,
    Recorded,
    emulated,
    errors_with,
    gluon_kernels,
    name_of,
    plan_of,
    with_outputs,
)
from gluon_emulator import Edits
from triton_checks import Case

from tilemoe.kernels.experts.blackwell import host
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

BLACKWELL = PRECISIONS["blackwell"]
CASES = BLACKWELL.cases


WIDTHS = (64, 72, 120, 128, 136, 184, 256, 264, 328)
ROWS = (0, 0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 257)  # of an expert


def draw_routing(draw: random.Random) -> RoutingPlan:
    """Some rows for each of up to five experts, all of them for one, or none; of few tokens or of many, in no order."""
    experts = draw.randint(1, 5)
    counts = [draw.choice(ROWS) for _ in range(experts)]
    if draw.random() < 0.2:
        only = draw.randrange(experts + 1)  # the last: no expert
        counts = [sum(counts) * (expert == only) for expert in range(experts)]
    tokens = draw.choice((1, 5, 130, max(sum(counts), 1)))
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
    expert = torch.arange(experts).repeat_interleave(torch.tensor(counts))[order]
    return plan_pairs(torch.tensor(draw.choices(range(tokens), k=len(order))).long(), expert, tokens, experts)


THOUSAND = [pytest.param(part, 50, marks=pytest.mark.thorough) for part in range(1, 21)]


@pytest.mark.parametrize(("part", "count"), [(0, 10), *THOUSAND])
def test_drawn_routings(part: int, count: int) -> None:
    """Of each GEMM, against PyTorch in fp64."""
    draw = random.Random(part)
    for _ in range(count):
        case = replace(draw.choice(CASES), hidden_size=draw.choice(WIDTHS), intermediate_size=draw.choice(WIDTHS))
        plan, ctas, seed = draw_routing(draw), draw.randint(1, 4), draw.randrange(1 << 30)
        with emulated(ctas, seed, draw.choice((0.3, 0.9, 1.0)), capability=100) as launches:
            BLACKWELL.agree(plan, case)
        assert gluon_kernels(launches) == (BLACKWELL.kernels_of(case) if plan.capacity else set())


@pytest.mark.parametrize("column_major", [False, True])
def test_rows_that_tma_cannot_describe_come_by_cp_async(column_major: bool) -> None:
    plan = plan_of(130, 0, 64, 194, 1, 5)
    do, a = torch.randn(136).half().expand(plan.num_tokens, 136), torch.randn(plan.capacity, 264).half()
    with emulated(seed=1, capability=100) as launches:
        found = BLACKWELL.kernels.down_proj_wgrad(do, a, plan, column_major)
    assert launches[0].constants["ACCESS"] == "copy"
    exact = TorchBackend().down_proj_wgrad(do.double(), a.double(), plan)
    assert float((found.double() - exact).norm()) <= TOLERANCE * float(exact.norm())


# Faults


@cache
def recorded(case: Case, copies: bool) -> dict[str, Recorded]:
    """The first launch of each kernel of a layer on one CTA, and what it wrote, which is right. copies: by cp.async."""
    with pytest.MonkeyPatch.context() as patch, emulated(ctas=1, capability=100) as launches:
        if copies:
            patch.setattr(host, "gathered", lambda source, device: (source, "copy"))
        BLACKWELL.agree(plan_of(130, 0, 64, 194, 5), case)
    return {name_of(launch): (launch, outputs) for launch, outputs in reversed(with_outputs(launches))}


def assert_agrees_with_a_fault(edits: Edits, found: Recorded) -> None:
    """Each warp group the slow one, with work in flight that is late, which shows a missing wait, and with sooner."""
    for seed, late in product(range(4), (0.9, 0.3)):
        errors = errors_with(BlackwellEmulator(seed, late, edits), *found)
        assert not errors, errors


PLANTED = [
    pytest.param(group, name, marks=pytest.mark.thorough if i % 4 and not group.startswith("limits") else ())
    for group, (*_, faults) in GROUPS.items()
    for i, name in enumerate(faults)
]


@pytest.mark.parametrize(("group", "name"), PLANTED)
def test_planted_faults_are_caught(group: str, name: str) -> None:
    case, kernel, copies, faults = GROUPS[group]
    function, text, instead, message = faults[name]
    with pytest.raises(AssertionError, match=message):
        assert_agrees_with_a_fault({function: (text, instead)}, recorded(case, copies)[kernel])


@pytest.mark.parametrize("group", GROUPS)
def test_without_a_fault_nothing_is_caught(group: str) -> None:
    case, kernel, copies, _ = GROUPS[group]
    assert_agrees_with_a_fault({}, recorded(case, copies)[kernel])
