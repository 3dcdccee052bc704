"""The Hopper kernels' numbers and protocols without a GPU: their sources in an emulator of Gluon (README.md)."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from emulated_layer import (
    KERNELS,
    TOLERANCE,
    each_layout_once,
    emulated,
    errors_with,
    functions_of,
    gluon_kernels,
    name_of,
    plan_of,
    recorded,
)
from gluon_emulator import Emulator
from gluon_values import Int, Pointer
from hopper_faults import FAULTS, OF_ADDING, OF_LAYOUTS, OF_STATIONARY, STATIONARY, SWIGLU, Fault
from triton_checks import Case, assert_added_exactly, assert_inference_agrees, assert_kernels_agree, choose_bands

from tilemoe.activations import activation_spec
from tilemoe.config import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.kernels.experts.hopper import gemm_stationary, host
from tilemoe.testing import hostile_routings, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

FP16 = torch.float16
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=128)}
# Widths: ragged in both; more steps than the ring has stages, all full; one step, one slice; two tiles of columns.
SIZES = ((136, 200), (320, 136), (64, 64), (192, 264))
LAYOUTS = [(name, layout) for name in sorted(GATED_ACTIVATIONS) for layout in ("concatenated", "interleaved")]
LAYOUTS += [(name, "concatenated") for name in sorted(UNGATED_ACTIVATIONS)]
CASES = [
    Case(FP16, name, gate_up, bias, transposed, *SIZES[(i + j) % len(SIZES)])
    for i, (name, gate_up) in enumerate(LAYOUTS)
    for j, (bias, transposed) in enumerate(product((False, True), (False, True)))
]
# Rows of the experts, and tokens without one: at the ends of blocks of 64, of tiles of 128, 192; with four blocks.
ENDS = [(63, 64, 65, 0, 7), (0, 129, 1, 191, 3), (0, 449, 0, 0), (192, 0, 193, 128, 2), (385, 1, 0)]
ENDS += [(256, 0, 320, 193, 2)]
OF_FAULTS = (130, 0, 64, 194, 5)
OF_STATIONARY_FAULTS = (1100, 0, 64, 194, 1, 130, 5)  # two work items of one expert


def kernels_of(case: Case) -> set[str]:
    n = case.intermediate_size
    contractions = (n, 2 * n if case.activation in GATED_ACTIVATIONS else n)
    rows = {"gemm_stationary_kernel" if p <= 256 else "gemm_rows_kernel" for p in contractions}
    return {"up_proj_act_kernel", "gemm_dgrad_dact_kernel", "gemm_wgrad_kernel"} | rows


@pytest.mark.parametrize("name", ROUTINGS)
def test_hostile_routings(name: str) -> None:
    # Every case meets a few of all these plans, and every plan a few cases: all pairs would take an hour.
    index = list(ROUTINGS).index(name)
    plan, case = ROUTINGS[name], CASES[7 * index % len(CASES)]
    with emulated(ctas=1 + index % 3, seed=index, late=(0.3, 0.9, 1.0)[index // 3 % 3]) as launches:
        assert_kernels_agree(KERNELS, plan, case, TOLERANCE)
        assert_inference_agrees(KERNELS, plan, case, TOLERANCE)
    assert gluon_kernels(launches) == (kernels_of(case) if plan.capacity else set())


@pytest.mark.parametrize("index", each_layout_once(CASES, 4))
def test_every_layout_bias_and_activation(index: int) -> None:
    counts = ENDS[(index + index // 12) % len(ENDS)]
    with emulated(ctas=1 + index % 3, seed=index) as launches:
        assert_kernels_agree(KERNELS, plan_of(*counts), CASES[index], TOLERANCE)
    assert gluon_kernels(launches) == kernels_of(CASES[index])


@pytest.mark.parametrize(
    "counts", [ENDS[0], *(pytest.param(counts, marks=pytest.mark.thorough) for counts in ENDS[1:])]
)
def test_tiles_in_bands(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three column tiles are walked two and one at a time, up_proj's five two, two and one."""
    asked = choose_bands(monkeypatch, host, {3: 2, 5: 2})
    case = Case(FP16, hidden_size=264, intermediate_size=520)
    with emulated(ctas=2) as launches:
        assert_kernels_agree(KERNELS, plan_of(*counts), case, TOLERANCE)
    names = {name_of(launch) for launch in launches if "BAND" in launch.constants}
    assert names == {"up_proj_act_kernel", "gemm_rows_kernel", "gemm_dgrad_dact_kernel"}
    assert asked == {
        "up_proj_act": (5, 264), "down_proj": (3, 520), "down_proj_dgrad_dact": (3, 264), "up_proj_dgrad": (3, 1040)
    }  # fmt: skip
    assert {launch.constants["BAND"] for launch in launches if "BAND" in launch.constants} == {2}


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_clamped_gates(gate_up: str) -> None:
    """With a limit that half of them pass."""
    case = Case(FP16, "swiglu_oai", gate_up, True, hidden_size=136, intermediate_size=200, limit=0.3)
    with emulated(ctas=3):
        assert_kernels_agree(KERNELS, plan_of(65, 0, 130, 40), case, TOLERANCE)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_weight_gradients_are_added_exactly(transposed: bool) -> None:
    case = Case(FP16, transposed=transposed, hidden_size=136, intermediate_size=264)
    with emulated(ctas=3) as launches:
        assert_added_exactly(KERNELS, plan_of(65, 0, 130, 40), case)
    assert gluon_kernels(launches) == {"gemm_wgrad_kernel"}


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("d", [120, 128, 256, 64, 184])
def test_bias_gradient_beside_the_weight_gradient(d: int, transposed: bool) -> None:
    """db1's row the last of a tile, the first of one more tile or of a consumer's rows, or among others."""
    plan = plan_of(65, 0, 130, 40)
    given = make_inputs(plan, d, 132, dtype=FP16)
    x, dh, rows = given["x"], torch.randn(plan.capacity, 264).to(FP16), int(plan.row_start_of_expert[-1])
    dh[rows:] = torch.nan
    sums = [dh[start:end].double().sum(0) for start, end in pairwise(plan.row_start_of_expert.tolist())]
    with emulated(ctas=2) as launches:
        dw1, db1 = KERNELS.up_proj_wgrad_bias_grad(x, dh, plan, transposed)
        assert torch.equal(dw1, KERNELS.up_proj_wgrad(x, dh, plan, transposed))
        total = torch.ones_like(dw1, dtype=torch.float32)
        assert torch.equal(KERNELS.up_proj_wgrad_bias_grad(x, dh, plan, transposed, total)[1], db1)
        assert torch.equal(total, KERNELS.up_proj_wgrad(x, dh, plan, transposed, torch.ones_like(total)))
        x[plan.token_of_row[0]], dh[0, 5] = torch.nan, torch.nan
        _, of_nan = KERNELS.up_proj_wgrad_bias_grad(x, dh, plan, transposed)
    assert {name_of(launch) for launch in launches} == {"gemm_wgrad_kernel"}
    assert db1.dtype == torch.float32
    assert torch.allclose(db1.double(), torch.stack(sums), rtol=1e-6, atol=1e-5)
    assert not bool(db1[1].any())
    expected = db1.clone()
    expected[0, 5] = torch.nan
    assert torch.equal(of_nan.nan_to_num(7), expected.nan_to_num(7)), "a NaN of dh stays in its column; x's do not come"


@pytest.mark.parametrize("name", OF_ADDING)
def test_faults_of_adding_are_caught(name: str) -> None:
    function, text, instead, message = OF_ADDING[name]
    with emulated(ctas=1, edits={function: (text, instead)}), pytest.raises(AssertionError, match=message):
        assert_kernels_agree(KERNELS, plan_of(*OF_FAULTS), SWIGLU, TOLERANCE)


def test_rows_past_the_last_are_not_written() -> None:
    plan, spec = plan_of(65, 0, 130, 40), activation_spec("swiglu", "concatenated", None, None)
    given = make_inputs(plan, 136, 200, dtype=FP16)
    with emulated():
        a, h = KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        y = KERNELS.down_proj(a, given["w2"], None, plan)
        s = given["scores"].reshape(-1)
        dh, _, a_scaled = KERNELS.down_proj_dgrad_dact(given["x"], given["w2"], None, h, s, plan, spec)
        dx_rows = KERNELS.up_proj_dgrad(dh, given["w1"], plan)
    for rows in (a, h, y, dh, a_scaled, dx_rows):
        assert not bool(rows[:195].isnan().any())
        assert bool(rows[195:].isnan().all())


def test_the_forward_lists_tiles_of_both_heights_at_once() -> None:
    """And each operator of the backward, which has a plan of its own, those that it needs."""
    spec = activation_spec("swiglu", "concatenated", None, None)
    plans = [plan_of(65, 0, 130, 40) for _ in range(3)]
    given = make_inputs(plans[0], 136, 200, dtype=FP16)
    with emulated() as launches:
        a, h = KERNELS.up_proj_act(given["x"], given["w1"], None, plans[0], spec)
        KERNELS.down_proj(a, given["w2"], None, plans[0])
        of_forward = len(launches)
        KERNELS.down_proj_dgrad_dact(given["x"], given["w2"], None, h, given["scores"].reshape(-1), plans[1], spec)
        KERNELS.up_proj_dgrad(h, given["w1"], plans[2])
    listed = [
        (i < of_forward, launch.args["tile_m"], launch.args["second_tile_m"])
        for i, launch in enumerate(launches)
        if name_of(launch) == "tile_lists_kernel"
    ]
    assert listed == [(True, 128, 1024), (False, 128, 0), (False, 192, 0)]


def test_work_items_of_a_stationary_weight_share_an_expert_s_blocks_evenly() -> None:
    rows_of, column_tiles = (1, 64, 0, 1024, 1025, 2049), 2
    start = torch.tensor((0, *rows_of)).cumsum(0).int()
    tiles = [(e, row, int(start[e + 1])) for e, n in enumerate(rows_of) for row in range(start[e], start[e] + n, 1024)]
    columns = tuple(Pointer(column.contiguous()) for column in torch.tensor(tiles).int().T)
    item_coords, found = Emulator().function(gemm_stationary.item_coords), list[tuple[int, ...]]()
    total = Int(len(tiles) * column_tiles)
    for index in range(total):
        coords = item_coords(Int(index), total, Int(column_tiles), columns, Pointer(start), 256)
        found.append(tuple(map(int, coords)))
    assert {(expert, end, col) for expert, _, end, col, _ in found} == {
        (expert, int(start[expert + 1]), col) for expert, n in enumerate(rows_of) if n for col in (0, 256)
    }
    for expert, n in enumerate(rows_of):
        for col in (0, 256):
            items = [(row, count) for e, row, _, c, count in found if (e, c) == (expert, col)]
            blocks = [row + 64 * block for row, count in items for block in range(count)]
            assert blocks == list(range(start[expert], start[expert] + n, 64))
            counts = [count for _, count in items]
            assert not counts or max(counts) - min(counts) <= 1


@pytest.mark.parametrize("ctas", [1, 2, 3, 4, 5, 12])
def test_the_scheduler_leaves_its_counter_at_zero(ctas: int) -> None:
    """However many CTAs there are for three tiles (up_proj: six): some prefetch in vain, some have nothing to
    prefetch."""
    plan, spec = plan_of(65, 0, 130, 40), activation_spec("swiglu", "concatenated", None, None)
    given, counts = make_inputs(plan, 136, 200, dtype=FP16), list[int]()
    with emulated(ctas):
        a, h = KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        counts += [int(plan.derived.tiles[128].num_tiles), int(plan.derived.tile_counter)]
        again, _ = KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        KERNELS.down_proj_dgrad_dact(given["x"], given["w2"], None, h, given["scores"].reshape(-1), plan, spec)
        counts += [int(plan.derived.tiles[128].num_tiles), int(plan.derived.tile_counter)]
    assert counts == [3, 0, 3, 0]
    assert torch.equal(a[:195], again[:195])
    other = plan_of(65, 0, 130, 40)
    with emulated(ctas, edits={"scheduler_next": ("mask=wanted & is_last", "mask=False")}):
        KERNELS.up_proj_act(given["x"], given["w1"], None, other, spec)
    assert (int(other.derived.tile_counter) == 0) == (ctas >= 6), "without what puts it back"


def test_a_seed_gives_the_same_order_again() -> None:
    emulators = Emulator(seed=5), Emulator(seed=5)
    for emulator in emulators:
        with emulated(emulator=emulator):
            assert_inference_agrees(KERNELS, plan_of(65, 0, 130, 40), CASES[0], TOLERANCE)
    assert emulators[0].random.getstate() == emulators[1].random.getstate()


def assert_agree_with_a_fault(case: Case, fault: Fault, counts: tuple[int, ...] = OF_FAULTS) -> None:
    """With loads that come late, which shows a missing wait; then with sooner ones, which overwrite what is in use.

    One CTA, so that buffers are used again; each kernel that the fault is in, alone.
    """
    function, text, instead, _ = fault
    if function == "gather_producer":  # as many steps as stages: a tile begins where the one before did
        case = replace(case, hidden_size=256)
    if function.startswith("pingpong"):  # down_proj too, and not as many steps as fill the stages once or twice
        case = replace(case, intermediate_size=max(case.intermediate_size, 264))
    launches = [found for found in recorded(case, counts) if function in functions_of(found[0].kernel)]
    assert launches, f"no kernel calls {function}"
    for late in (0.9, 0.3):
        errors = [errors_with({function: (text, instead)}, late, *found) for found in launches]
        assert not any(errors), errors


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str) -> None:
    with pytest.raises(AssertionError, match=FAULTS[name][-1]):
        assert_agree_with_a_fault(SWIGLU, FAULTS[name])


@pytest.mark.parametrize("name", OF_STATIONARY)
def test_faults_of_a_stationary_weight_are_caught(name: str) -> None:
    fault = OF_STATIONARY[name]
    with pytest.raises(AssertionError, match=fault[-1]):
        assert_agree_with_a_fault(STATIONARY, fault, OF_STATIONARY_FAULTS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_LAYOUTS)
def test_faults_of_layouts_are_caught(name: str) -> None:
    case, fault = OF_LAYOUTS[name]
    with pytest.raises(AssertionError, match=fault[-1]):
        assert_agree_with_a_fault(case, fault)


def test_without_a_fault_nothing_is_caught() -> None:
    for late, found in product((0.9, 0.3), recorded(SWIGLU, OF_FAULTS)):
        assert not errors_with({}, late, *found)
