"""Checks of plan building and combine in Triton, on a GPU and in Triton's interpreter.

T tokens · d hidden_size · K experts per token · E experts · P pairs
"""

import pytest
import torch
from torch import Tensor
from triton_checks import DEVICE, DTYPES, INTERPRETED

from tilemoe.kernels.choose import PlanTopK
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton.combine import combine
from tilemoe.kernels.plan import torch as torch_plan
from tilemoe.kernels.plan import triton as triton_plan
from tilemoe.kernels.plan import triton_small as plan_small
from tilemoe.plan import RoutingPlan
from tilemoe.routing.build import plan_topk
from tilemoe.testing import hostile_routings

BUILDERS: tuple[PlanTopK, ...] = (
    triton_plan.count_sort,
    plan_small.count_sort_small,
    plan_small.count_sort_small_in_one,
)
NAMES = ("token_of_row", "pair_of_row", "row_of_pair", "row_start_of_expert", "rows_per_expert", "error_bits")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 1e-6, FP16: 5e-4, BF16: 4e-3}  # RMS-relative, of sums rounded once

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def rows_of(plan: RoutingPlan, width: int, dtype: torch.dtype) -> Tensor:
    """(R_max, width) random rows; NaN where no row is."""
    rows = torch.randn(plan.capacity, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[int(plan.row_start_of_expert[-1]) :] = float("nan")
    return rows.to(DEVICE)


def scores_of(plan: RoutingPlan, dtype: torch.dtype = FP32) -> Tensor:
    """(P,) random scores; NaN for a pair that is skipped."""
    scores = torch.full((plan.num_pairs,), float("nan"), dtype=dtype)
    used = plan.pair_of_row[: int(plan.row_start_of_expert[-1])].cpu().long()
    scores[used] = torch.randn(used.shape[0], generator=torch.Generator().manual_seed(2), dtype=dtype)
    return scores.to(DEVICE)


def random_ids(tokens: int, experts_per_token: int, experts: int, seed: int = 0) -> Tensor:
    """(T, K) int64, some of them sentinels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, experts + 1 + experts // 8, (tokens, experts_per_token), generator=generator).to(DEVICE)


def assert_close(actual: Tensor, exact: Tensor, tolerance: float) -> None:
    assert actual.shape == exact.shape
    assert bool(actual.isfinite().all()), "not finite"
    assert float((actual.double() - exact).norm()) <= tolerance * float(exact.norm())


def combined(rows: Tensor, s: Tensor | None, plan: RoutingPlan) -> Tensor:
    """Each token's sum of rows (R_max, width), times their scores where there are any."""
    out = rows.new_empty(plan.num_tokens, rows.shape[1])
    combine(rows, s, plan, out)
    return out


def exactly_combined(rows: Tensor, s: Tensor | None, plan: RoutingPlan) -> Tensor:
    """The same by the torch kernels in fp64."""
    out = rows.new_empty(plan.num_tokens, rows.shape[1], dtype=torch.float64)
    if s is None:
        TorchBackend().combine_grad(rows.double(), plan, out)
    else:
        TorchBackend().combine(rows.double(), s.double(), plan, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [72] if INTERPRETED else [1, 24, 1032, 4096])
def test_combine_agrees_on_hostile_routings(width: int, dtype: torch.dtype) -> None:
    """In the interpreter each in one dtype."""
    for index, routing in enumerate(hostile_routings(tile=12, device=DEVICE)):
        if INTERPRETED and DTYPES[index % len(DTYPES)] != dtype:
            continue
        plan, width = routing.plan, 1 if INTERPRETED and index % 4 == 0 else width
        rows, s = rows_of(plan, width, dtype), scores_of(plan)
        o, dx = combined(rows, s, plan), combined(rows, None, plan)
        assert_close(o, exactly_combined(rows, s, plan), TOLERANCE[dtype])
        assert_close(dx, exactly_combined(rows, None, plan), TOLERANCE[dtype])


@pytest.mark.parametrize("experts_per_token", [1, 8, 17, 33])
def test_combine_of_many_rows(experts_per_token: int) -> None:
    plan = plan_topk(random_ids(13, experts_per_token, 40), 40)
    rows, s = rows_of(plan, 24, FP32), scores_of(plan)
    assert_close(combined(rows, s, plan), exactly_combined(rows, s, plan), TOLERANCE[FP32])


def test_fp64_scores_are_not_rounded() -> None:
    plan = plan_topk(torch.tensor([[0, 1]], device=DEVICE), 2)
    rows = torch.tensor([[2.0**12], [2.0**12]], device=DEVICE)
    s = torch.tensor([1.0 + 2.0**-40, -1.0], dtype=torch.float64, device=DEVICE)
    assert float(combined(rows, s, plan)) == 2.0**-28


@pytest.mark.parametrize("dtype", DTYPES)
def test_coarse_scores_are_read_as_they_are(dtype: torch.dtype) -> None:
    """To the bit what they give as fp32, by either set of kernels: sums are never taken in less."""
    plan = plan_topk(random_ids(13, 8, 40), 40)
    for score_dtype in (FP16,) if INTERPRETED else (FP16, BF16):
        rows, s = rows_of(plan, 24, dtype), scores_of(plan).to(score_dtype)
        assert torch.equal(combined(rows, s, plan), combined(rows, s.float(), plan))
        out, expected = rows.new_empty(13, 24), rows.new_empty(13, 24)
        TorchBackend().combine(rows.nan_to_num(), s.nan_to_num(), plan, out)
        TorchBackend().combine(rows.nan_to_num(), s.float().nan_to_num(), plan, expected)
        assert torch.equal(out, expected)


def test_slices_of_the_width_make_the_whole() -> None:
    plan = plan_topk(random_ids(11, 4, 6), 6)
    rows, s = rows_of(plan, 80, FP16), scores_of(plan)
    for scores in (s, None):
        whole, out = combined(rows, scores, plan), rows.new_empty(11, 80)
        for start in range(0, 80, 32):
            span = slice(start, start + 32)
            combine(rows[:, span], scores, plan, out[:, span])
        assert torch.equal(out, whole)


SIZES = [(1, 1, 1), (7, 3, 5), (300, 8, 64), (129, 32, 40), (513, 1, 1000), (260, 2, 4096)]


@pytest.mark.parametrize(
    ("tokens", "experts_per_token", "experts", "dtype"),
    [
        pytest.param(*size, dtype, marks=pytest.mark.thorough if (i + j) % 2 else ())
        for i, size in enumerate(SIZES)
        for j, dtype in enumerate((torch.int32, torch.int64))
    ],
)
def test_plan_is_the_torch_plan(tokens: int, experts_per_token: int, experts: int, dtype: torch.dtype) -> None:
    assert_same_plan(random_ids(tokens, experts_per_token, experts).to(dtype), experts)


def test_plan_of_hostile_ids() -> None:
    assert_same_plan(torch.zeros(600, 2, dtype=torch.int32, device=DEVICE), 3)
    assert_same_plan(torch.full((600, 2), 2, dtype=torch.int32, device=DEVICE), 3)
    assert_same_plan(torch.full((600, 2), 3, dtype=torch.int32, device=DEVICE), 3)
    assert_same_plan(torch.tensor([[2**40, 1], [2**32, 2**31 - 1]], device=DEVICE), 3)
    assert_same_plan(random_ids(8, 60, 5).t(), 5)
    assert_same_plan(random_ids(300, 3, 5)[:, 1:2], 5)
    assert_same_plan(random_ids(1, 1, 5).expand(300, 1), 5)
    assert_same_plan(random_ids(512, 8, 64), 64)


@pytest.mark.parametrize("builder", BUILDERS)
def test_negative_ids_are_recorded(builder: PlanTopK) -> None:
    ids = random_ids(700, 2, 5)
    ids[650, 1] = -1
    ids[3, 0] = -(2**32)
    *arrays, error_bits = builder(ids, 5)
    assert int(error_bits) == 1
    skipped = torch.where(ids < 0, 5, ids)
    for name, actual, expected in zip(NAMES, arrays, torch_plan.sort_by_expert(skipped, 5), strict=False):
        assert torch.equal(actual, expected), name


def assert_same_plan(ids: Tensor, experts: int) -> None:
    expected = torch_plan.sort_by_expert(ids, experts)
    builders = BUILDERS[: 1 if plan_small.why_unsupported(ids.numel(), experts) else 2]
    for builder in builders:
        for name, actual, wanted in zip(NAMES, builder(ids, experts), expected, strict=True):
            where = f"{name} for {tuple(ids.shape)} ids of {experts} experts by {builder.__module__}"
            assert actual.dtype == wanted.dtype, where
            assert torch.equal(actual, wanted), where
