"""The Hopper kernels on a GPU: against fp64 on hostile routings, bit-equal runs, and what the portable kernels get."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from gpu_layers import never_repeated
from triton_checks import (
    ADDED,
    Case,
    assert_added_exactly,
    assert_kernels_agree,
    random_ids,
    random_plan,
    run_kernels,
)

from tilemoe.config import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS, MoEConfig
from tilemoe.kernels.choose import select_kernels
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.hopper.configs import MAX_CONTRACTION_OF_NARROW, is_faster
from tilemoe.kernels.experts.torch.backend import TorchBackend
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.configs import ROW_MAJOR_TILES_OF_B1
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.launch import Launch
from tilemoe.testing import assert_equal, assert_moe_matches_reference, forward_and_grads, hostile_routings, make_inputs

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 4e-3, FP16: 6e-4}
OTHERS = {"up_proj_act_kernel", "gemm_dgrad_dact_kernel", "gemm_wgrad_kernel"}  # than down_proj and up_proj_dgrad


def kernels_of(n: int, w: int) -> set[str]:
    return OTHERS | {"gemm_stationary_kernel" if p <= 256 else "gemm_rows_kernel" for p in (n, w)}


CASES = {
    "bf16, ragged widths": Case(BF16, hidden_size=320, intermediate_size=264),
    "bf16, wide": Case(BF16, hidden_size=256, intermediate_size=512),
    "fp16, odd contraction": Case(FP16, "geglu", hidden_size=328, intermediate_size=136),
    "fp16, narrow": Case(FP16, "reglu", hidden_size=128, intermediate_size=64),
    "bf16, w2 transposed": Case(BF16, transposed=True, hidden_size=192, intermediate_size=128),
    "bf16, bias": Case(BF16, "swiglu_oai", bias=True, hidden_size=192, intermediate_size=128),
    "bf16, interleaved": Case(BF16, gate_up="interleaved", hidden_size=136, intermediate_size=128),
    "fp16, ungated": Case(FP16, "relu2", hidden_size=128, intermediate_size=512),
}


# An ungated activation has no gate to interleave.
LAYOUTS = [(name, "concatenated") for name in sorted(GATED_ACTIVATIONS | UNGATED_ACTIVATIONS)]
LAYOUTS += [(name, "interleaved") for name in sorted(GATED_ACTIVATIONS)]


@pytest.fixture(autouse=True)
def on_hopper(poisoned_memory: None) -> None:
    """The kernels of this file run on one architecture; elsewhere `select_kernels` is tested not to choose them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")


pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_on_hostile_routings(name: str) -> None:
    case = CASES[name]
    for routing in hostile_routings(tile=128, device="cuda"):
        assert_kernels_agree(HopperBackend(), routing.plan, case, TOLERANCE[case.dtype])


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


def test_b3_in_bands_of_its_own_kernel() -> None:
    """Eleven column tiles, six and five at a time. Longer contractions, and wider dx, are the portable
    up_proj_dgrad's."""
    case = Case(BF16, hidden_size=1400, intermediate_size=520)
    with launches_of_row_gemms() as launches:
        assert_kernels_agree(HopperBackend(), random_plan(1500, 5, 2), case, TOLERANCE[BF16])
    assert [launch.constants["BAND"] for launch in launches] == [0, 0, 0, 0, 6]
    assert launches[-1].max_registers is not None


@pytest.mark.parametrize("name", ["bf16, ragged widths", "bf16, w2 transposed"])
def test_ends_of_blocks_and_tiles(name: str) -> None:
    """Experts with as many rows as blocks of 64 and tiles of 128 and 192 have, one less and one more, by themselves."""
    ends = [rows + offset for rows in (64, 128, 192, 256, 384, 448, 576) for offset in (-1, 0, 1)]
    for counts in (ends, ends[::-1], [0, 640, 0, 1]):  # rounded to tiles of 128, too
        ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
        plan = plan_topk(shuffled[:, None].cuda(), len(counts))
        assert_kernels_agree(HopperBackend(), plan, CASES[name], TOLERANCE[BF16])
    for routing in hostile_routings(tile=192, device="cuda"):  # as down_proj and up_proj_dgrad have
        assert_kernels_agree(HopperBackend(), routing.plan, CASES[name], TOLERANCE[BF16])


def test_every_kernel_takes_part(launched: set[str]) -> None:
    assert_kernels_agree(
        HopperBackend(), random_plan(700, 8, 2), Case(BF16, hidden_size=256, intermediate_size=264), 4e-3
    )
    assert launched == kernels_of(264, 528)
    launched.clear()
    assert_kernels_agree(
        HopperBackend(), random_plan(700, 8, 2), Case(BF16, hidden_size=256, intermediate_size=128), 4e-3
    )
    assert launched == kernels_of(128, 256)


def test_long_contractions_are_left_to_the_portable_kernels(launched: set[str]) -> None:
    plan, n = random_plan(300, 4, 2), MAX_CONTRACTION_OF_NARROW // 2 + 8
    given = make_inputs(plan, 256, n, dtype=BF16)
    rows = torch.zeros(plan.capacity, 2 * n, dtype=BF16, device="cuda")
    HopperBackend().up_proj_dgrad(rows, given["w1"], plan)
    assert not launched
    HopperBackend().down_proj(rows[:, :n].contiguous(), given["w2"], None, plan)
    assert launched == {"gemm_rows_kernel"}


def test_many_experts() -> None:
    case = Case(BF16, hidden_size=64, intermediate_size=64)
    assert_kernels_agree(HopperBackend(), random_plan(2000, 4096, 4), case, 4e-3)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("name", CASES)
def test_weight_gradients_are_added_exactly(name: str, transposed: bool) -> None:
    case = replace(CASES[name], transposed=transposed)
    for routing in hostile_routings(tile=128, device="cuda"):
        assert_added_exactly(HopperBackend(), routing.plan, case)


# With dh as wide as gpt-oss's up_proj_wgrad is the portable kernel.
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("d", "w"), [(2880, 5760), (2880, 1536), (2048, 1536), (2048, 5760)], ids=lambda width: str(width)
)
def test_bias_gradient_beside_the_weight_gradient(
    d: int, w: int, dtype: torch.dtype, transposed: bool, launched: set[str]
) -> None:
    """Against fp64, with the same dw1, and the same bits in twenty runs. The last expert is empty."""
    plan, generator = plan_topk(random_ids(4000, 16, 4), 17), torch.Generator("cuda").manual_seed(0)
    x, dh = (
        torch.randn(rows, width, generator=generator, device="cuda").to(dtype)
        for rows, width in ((plan.num_tokens, d), (plan.capacity, w))
    )
    exact = TorchBackend().up_proj_bias_grad(dh.double(), plan)
    dw1, db1 = HopperBackend().up_proj_wgrad_bias_grad(x, dh, plan, transposed)
    assert launched == ({"gemm_wgrad_kernel"} if is_faster("up_proj_wgrad", d, w) else set())
    assert db1.dtype == torch.float32
    assert float((db1.double() - exact).norm()) <= ADDED * float(exact.norm())
    assert not bool(db1[16].any())
    assert not bool(dw1[16].any())
    assert torch.equal(dw1, HopperBackend().up_proj_wgrad(x, dh, plan, transposed))
    for _ in range(19):
        again = HopperBackend().up_proj_wgrad_bias_grad(x, dh, plan, transposed)
        assert torch.equal(again[0], dw1)
        assert torch.equal(again[1], db1)
    total = torch.zeros_like(dw1, dtype=torch.float32)
    assert torch.equal(HopperBackend().up_proj_wgrad_bias_grad(x, dh, plan, transposed, total)[1], db1)
    x[plan.token_of_row[0]], dh[0, 5] = torch.nan, torch.nan
    of_nan = HopperBackend().up_proj_wgrad_bias_grad(x, dh, plan, transposed)[1]
    assert of_nan.isnan().nonzero().tolist() == [[0, 5]]


def test_twenty_runs_are_bit_equal() -> None:
    plan, case = random_plan(3000, 8, 2), Case(BF16, bias=True, hidden_size=512, intermediate_size=256)
    first = {name: pair[0] for name, pair in run_kernels(HopperBackend(), plan, case).items()}
    for _ in range(19):
        for name, pair in run_kernels(HopperBackend(), plan, case).items():
            assert torch.equal(pair[0], first[name]), name


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_whole_layer_against_the_reference(dtype: torch.dtype, launched: set[str]) -> None:
    for routing in hostile_routings(tile=128, device="cuda"):
        inputs = make_inputs(routing.plan, 256, 128, "swiglu", dtype=dtype)
        assert_moe_matches_reference(inputs, routing.plan)
    assert launched == kernels_of(128, 256)


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


def test_graph_replay_with_another_routing() -> None:
    plans = [random_plan(700, 8, 2, seed) for seed in (0, 1)]
    inputs = make_inputs(plans[0], 256, 128, dtype=BF16)
    ids = torch.zeros(700, 2, dtype=torch.int64, device="cuda")

    def run() -> torch.Tensor:
        return moe(plan=plan_topk(ids, 8), **inputs)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for seed in (0, 1):
        ids.copy_(random_ids(700, 8, 2, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, run())


def test_compiled_is_equal_to_eager(launched: set[str]) -> None:
    plan = random_plan(300, 4, 2)
    inputs = make_inputs(plan, 128, 64, dtype=BF16)
    eager = forward_and_grads(moe, inputs, plan)
    compiled = forward_and_grads(torch.compile(moe, fullgraph=True), inputs, plan)
    assert_equal(eager, compiled)
    assert launched


def test_selected_for_16_bit_types_only() -> None:
    cfg = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, num_experts_per_tok=2)
    assert select_kernels("cuda", BF16, cfg).name == "hopper"
    assert select_kernels("cuda", torch.float32, cfg).name != "hopper"
