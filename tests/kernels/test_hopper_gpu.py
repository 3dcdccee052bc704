"""The Hopper kernels on a GPU: against fp64 on hostile routings, bit-equal runs, and what the portable kernels get."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from gpu_layers import never_repeated
from triton_checks import CASES, LAYOUTS, TOLERANCE, Case, assert_kernels_agree, random_plan

from tilemoe.config import GATED_ACTIVATIONS
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.hopper.configs import MAX_CONTRACTION_OF_NARROW
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.configs import ROW_MAJOR_TILES_OF_B1
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.launch import Launch
from tilemoe.testing import hostile_routings, make_inputs

BF16, FP16 = torch.bfloat16, torch.float16
OTHERS = {"up_proj_act_kernel", "gemm_dgrad_dact_kernel", "gemm_wgrad_kernel"}  # than down_proj and up_proj_dgrad


def kernels_of(n: int, w: int) -> set[str]:
    return OTHERS | {"gemm_stationary_kernel" if p <= 256 else "gemm_rows_kernel" for p in (n, w)}


pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory", "on_hopper")]


@contextmanager
def each_launch(note: Callable[[Launch], None]) -> Iterator[None]:
    """Within the block ``note`` is called before each launch; none is replayed, as replays launch by themselves."""
    run = Launch.run

    def noted(launch: Launch) -> None:
        note(launch)
        run(launch)

    with never_repeated(), mock.patch.object(Launch, "run", noted):
        yield


@contextmanager
def launches_of_row_gemms() -> Iterator[list[Launch]]:
    """Launches within the block of kernels whose tiles may be walked in bands, in their order: up_proj twice,
    down_proj, down_proj_dgrad, up_proj_dgrad."""
    launches: list[Launch] = []

    def note(launch: Launch) -> None:
        if "BAND" in launch.constants:
            launches.append(launch)

    with each_launch(note):
        yield launches


@pytest.fixture
def launched() -> Iterator[set[str]]:
    """Names of the Hopper kernels that are launched during the test."""
    names: set[str] = set()

    def note(launch: Launch) -> None:
        if launch.max_registers is not None:
            names.add(launch.kernel.__name__)

    with each_launch(note):
        yield names


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("activation", "gate_up"), LAYOUTS)
def test_every_layout(activation: str, bias: bool, transposed: bool, gate_up: str, launched: set[str]) -> None:
    sizes = {"hidden_size": 136, "intermediate_size": 200}
    plan = random_plan(777, 7, 3)
    for dtype in (BF16, FP16):
        case = Case(dtype, activation, gate_up=gate_up, bias=bias, transposed=transposed, **sizes)
        assert_kernels_agree(HopperBackend(), plan, case, TOLERANCE[dtype])
    assert launched == kernels_of(200, 400 if activation in GATED_ACTIVATIONS else 200)


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize("backend", [HopperBackend(), TritonBackend()], ids=["hopper", "triton"])
def test_tiles_in_bands(backend: TritonBackend, gate_up: str) -> None:
    """All four row GEMMs, of contractions so long and outputs so wide that columns are walked in bands."""
    case = Case(BF16, gate_up=gate_up, hidden_size=2600, intermediate_size=256 * ROW_MAJOR_TILES_OF_B1 + 264)
    three_rows = plan_topk(torch.tensor([[0], [2], [2]]).cuda(), 4)
    for plan, count in ((random_plan(1500, 5, 2), 5), (three_rows, 4)):  # inference has a kernel for so few rows
        with launches_of_row_gemms() as launches:
            assert_kernels_agree(backend, plan, case, TOLERANCE[BF16])
        assert len(launches) == count
        assert all(launch.constants["BAND"] for launch in launches)


@pytest.mark.parametrize("case", [CASES["hopper"][0], CASES["hopper"][4]], ids=str)
def test_ends_of_blocks_and_tiles(case: Case) -> None:
    """Experts with as many rows as blocks of 64 and tiles of 128 and 192 have, one less and one more, by themselves."""
    ends = [rows + offset for rows in (64, 128, 192, 256, 384, 448, 576) for offset in (-1, 0, 1)]
    for counts in (ends, ends[::-1], [0, 640, 0, 1]):  # rounded to tiles of 128, too
        ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
        plan = plan_topk(shuffled[:, None].cuda(), len(counts))
        assert_kernels_agree(HopperBackend(), plan, case, TOLERANCE[BF16])
    for routing in hostile_routings(tile=192, device="cuda"):  # as down_proj and up_proj_dgrad have
        assert_kernels_agree(HopperBackend(), routing.plan, case, TOLERANCE[BF16])


def test_long_contractions_are_left_to_the_portable_kernels(launched: set[str]) -> None:
    plan, n = random_plan(300, 4, 2), MAX_CONTRACTION_OF_NARROW // 2 + 8
    given = make_inputs(plan, 256, n, dtype=BF16)
    rows = torch.zeros(plan.capacity, 2 * n, dtype=BF16, device="cuda")
    HopperBackend().up_proj_dgrad(rows, given["w1"], plan)
    assert not launched
    HopperBackend().down_proj(rows[:, :n].contiguous(), given["w2"], None, plan)
    assert launched == {"gemm_rows_kernel"}


def test_an_address_that_cp_async_cannot_take_goes_elsewhere(launched: set[str]) -> None:
    plan = random_plan(300, 4, 2)
    inputs = make_inputs(plan, 256, 128, dtype=BF16)
    shifted = torch.empty(inputs["x"].numel() + 4, dtype=BF16, device="cuda")[4:].view_as(inputs["x"])
    shifted.copy_(inputs["x"])
    expected = moe(plan=plan, **inputs, kernels="triton")
    assert not launched
    inputs["x"] = shifted
    assert torch.equal(moe(plan=plan, **inputs), expected)
    assert "up_proj_act_kernel" not in launched
