"""The Hopper kernels' numbers and protocols without a GPU, of 16-bit and FP8 operands: their sources in an emulator of
Gluon (README.md). The Blackwell kernels' numbers, too; what else is said of these: test_blackwell_emulated.py.

T tokens · d hidden_size · n intermediate_size · E experts · R_max row capacity · w = 2n gated, n ungated
"""

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from emulated_layer import (
    KERNELS,
    KERNELS_OF_FP8,
    LIMIT,
    PRECISIONS,
    TOLERANCE,
    Recorded,
    emulated,
    errors_with,
    functions_of,
    gluon_kernels,
    name_of,
    plan_of,
    recorded,
    with_outputs,
)
from fp8_checks import assert_close, assert_columns_agree, assert_wgrads_agree
from gluon_emulator import Edits, Emulator
from gluon_values import Buffer, Int, Pointer, Product
from hopper_faults import FAULTS, OF_ADDING, OF_LAYOUTS, OF_STATIONARY, STATIONARY, SWIGLU, Fault
from hopper_fp8_faults import FAULTS as FP8_FAULTS
from hopper_fp8_faults import OF_STATIONARY as FP8_OF_STATIONARY
from hopper_fp8_faults import OF_WGRAD
from hopper_fp8_faults import SWIGLU as FP8_SWIGLU
from torch import Tensor
from triton_checks import (
    Case,
    assert_added_exactly,
    assert_inference_agrees,
    assert_kernels_agree,
    choose_bands,
    every_third,
)

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.hopper import gemm_stationary, host
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.testing import hostile_routings, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory", "one_thread")

FP16, FP8 = torch.float16, PRECISIONS["fp8"]
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=128)}
BOTH = pytest.mark.parametrize("precision", ["16 bits", "fp8"])
OF_FAULTS, OF_FP8_FAULTS = (130, 0, 64, 194, 5), (130, 0, 66, 2, 5)
OF_STATIONARY_FAULTS = (1100, 0, 64, 194, 1, 130, 5)  # two work items of one expert
OF_FP8_STATIONARY_FAULTS = (66, 0, 1100, 194, 130, 2, 0)  # no row past the last, too
OF_WGRAD_FAULTS = (130, 0, 580, 66, 5)  # of one expert, more steps than stages
HOST_CHUNK = "tilemoe.kernels.experts.hopper.configs.CHUNK"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", every_third(ROUTINGS))
def test_hostile_routings(name: str, precision: str) -> None:
    # Every case meets a few of all these plans, and every plan a few cases: all pairs would take an hour.
    of, index, plan = PRECISIONS[precision], list(ROUTINGS).index(name), ROUTINGS[name]
    case = of.cases[(5 if precision == "fp8" else 7) * index % len(of.cases)]
    late = (0.3, 0.9, 1.0)[index // 3 % 3]
    with emulated(1 + index % 3, index, late, capability=of.capability) as launches:
        of.agree(plan, case)
        if precision == "16 bits":
            assert_inference_agrees(KERNELS, plan, case, TOLERANCE)
    assert gluon_kernels(launches) == (of.kernels_of(case) if plan.capacity else set())


def each_layout_once() -> list[Any]:
    """Precisions and indices of cases: one of each layout, the others for `make thorough`."""
    found = []
    for name, of in PRECISIONS.items():
        of_layout = len(of.layouts(0))
        for index, case in enumerate(of.cases):
            is_first = index % of_layout == index // of_layout % of_layout
            marks = () if is_first else pytest.mark.thorough
            found.append(pytest.param(name, index, id=f"{name}-{case}", marks=marks))
    return found


@pytest.mark.parametrize(("precision", "index"), each_layout_once())
def test_every_layout_bias_and_activation(precision: str, index: int) -> None:
    of = PRECISIONS[precision]
    ends = of.ends[(index + index // (4 if precision == "fp8" else 12)) % len(of.ends)]
    with emulated(ctas=1 + index % 3, seed=index, capability=of.capability) as launches:
        of.agree(plan_of(*ends), of.cases[index])
    assert gluon_kernels(launches) == of.kernels_of(of.cases[index])


IN_BANDS = {  # of 16 bits, three column tiles are walked two and one at a time, up_proj's five two, two and one
    "16 bits": (
        (264, 520),
        {"up_proj_act": (5, 264), "down_proj": (3, 520), "down_proj_dgrad_dact": (3, 264), "up_proj_dgrad": (3, 1040)},
        {"up_proj_act_kernel", "gemm_rows_kernel", "gemm_dgrad_dact_kernel"},
    ),
    "fp8": (
        (128, 640),
        {"up_proj_act": (5, 128), "down_proj_dgrad_dact": (3, 128)},
        {"up_proj_act_kernel", "gemm_dgrad_dact_kernel"},
    ),
}


@pytest.mark.parametrize(
    ("precision", "counts"),
    [
        ("fp8", (130, 65, 3)),
        *(
            pytest.param("16 bits", counts, marks=pytest.mark.thorough if i else ())
            for i, counts in enumerate(PRECISIONS["16 bits"].ends)
        ),
    ],
)
def test_tiles_in_bands(precision: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = choose_bands(monkeypatch, host, {3: 2, 5: 2})
    (d, n), expected, kernels = IN_BANDS[precision]
    with emulated(ctas=2) as launches:
        PRECISIONS[precision].agree(plan_of(*counts), Case(FP16, hidden_size=d, intermediate_size=n))
    in_bands = [launch for launch in launches if launch.constants.get("BAND")]
    assert {name_of(launch) for launch in in_bands} == kernels
    assert asked == expected
    assert {launch.constants["BAND"] for launch in in_bands} == {2}


@BOTH
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_clamped_gates(gate_up: str, precision: str) -> None:
    """With a limit that half of them pass."""
    d, n = {"16 bits": (136, 200), "fp8": (128, 256)}[precision]
    case = Case(FP16, "swiglu_oai", gate_up, True, hidden_size=d, intermediate_size=n, limit=0.3)
    with emulated(ctas=3):
        PRECISIONS[precision].agree(plan_of(65, 0, 130, 40), case)


@BOTH
def test_rows_past_the_last_are_not_written(precision: str) -> None:
    plan, spec = plan_of(65, 0, 130, 40), activation_spec("swiglu", "concatenated", None, None)
    kernels, given = PRECISIONS[precision].kernels, make_inputs(plan, *PRECISIONS[precision].sizes[0], dtype=FP16)
    with emulated():
        a, h = kernels.up_proj_act(given["x"], given["w1"], None, plan, spec)
        y = kernels.down_proj(a, given["w2"], None, plan)
        s = given["scores"].reshape(-1)
        dh, _, a_scaled = kernels.down_proj_dgrad_dact(given["x"], given["w2"], None, h, s, plan, spec)
        dx_rows = kernels.up_proj_dgrad(dh, given["w1"], plan)
    of_a = (a,) if isinstance(a, Tensor) else (a.data.float(), a.scale)
    for rows in (*of_a, h, y, dh, a_scaled, dx_rows):
        assert not bool(rows[:195].isnan().any())
        assert bool(rows[195:].isnan().all())


# Of 16 bits alone.


@pytest.mark.parametrize("precision", ["16 bits", "blackwell"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_weight_gradients_are_added_exactly(transposed: bool, precision: str) -> None:
    case, of = Case(FP16, transposed=transposed, hidden_size=136, intermediate_size=264), PRECISIONS[precision]
    with emulated(ctas=3, capability=of.capability) as launches:
        assert_added_exactly(of.kernels, plan_of(65, 0, 130, 40), case)
    assert gluon_kernels(launches) == {"gemm_wgrad_kernel"}


@pytest.mark.parametrize("name", OF_ADDING)
def test_faults_of_adding_are_caught(name: str) -> None:
    function, text, instead, message = OF_ADDING[name]
    with emulated(ctas=1, edits={function: (text, instead)}), pytest.raises(AssertionError, match=message):
        assert_kernels_agree(KERNELS, plan_of(*OF_FAULTS), SWIGLU, TOLERANCE)


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
        counts += [int(plan.tiles[128].num_tiles), int(plan.tile_counter)]
        again, _ = KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        KERNELS.down_proj_dgrad_dact(given["x"], given["w2"], None, h, given["scores"].reshape(-1), plan, spec)
        counts += [int(plan.tiles[128].num_tiles), int(plan.tile_counter)]
    assert counts == [3, 0, 3, 0]
    assert torch.equal(a[:195], again[:195])
    other = plan_of(65, 0, 130, 40)
    with emulated(ctas, edits={"scheduler_next": ("mask=wanted & is_last", "mask=False")}):
        KERNELS.up_proj_act(given["x"], given["w1"], None, other, spec)
    assert (int(other.tile_counter) == 0) == (ctas >= 6), "without what puts it back"


# Of FP8 alone.


@pytest.mark.parametrize("columns", [slice(128, 512), slice(256, 384)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_columns_of_a_quantised_weight(transposed: bool, columns: slice) -> None:
    case = Case(FP16, transposed=transposed, hidden_size=640, intermediate_size=256)
    with emulated() as launches:
        assert_columns_agree(KERNELS_OF_FP8, plan_of(65, 0, 130, 40), case, columns, LIMIT)
    assert gluon_kernels(launches) == {"gemm_stationary_kernel"}


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("index", range(4))
def test_wide_weight_gradients(all_wgrads_in_fp8: None, index: int, column_major: bool) -> None:
    with emulated(ctas=1 + index % 3, seed=index) as launches:
        assert_wgrads_agree(
            KERNELS_OF_FP8, plan_of(*FP8.ends[index]), *FP8.sizes[index], column_major, torch.float16, LIMIT
        )
    assert gluon_kernels(launches) == {"gemm_transposed_kernel"}


@pytest.mark.parametrize("name", every_third(ROUTINGS))
def test_wide_weight_gradients_of_hostile_routings(all_wgrads_in_fp8: None, name: str) -> None:
    with emulated(seed=1):
        assert_wgrads_agree(KERNELS_OF_FP8, ROUTINGS[name], 128, 384, False, torch.float16, LIMIT)


def test_wide_weight_gradients_in_slices(all_wgrads_in_fp8: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilemoe.kernels.experts.triton.formats.transpose.SLICE", 256)
    with emulated() as launches:
        assert_wgrads_agree(KERNELS_OF_FP8, plan_of(65, 0, 130, 40), 640, 128, False, torch.float16, LIMIT)
    of_gemms = [launch.args["first_of_slice"] for launch in launches if launch.kernel.is_gluon()]
    assert of_gemms == 3 * [0, 256, 512]


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_wide_weight_gradients_in_chunks(all_wgrads_in_fp8: None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts with one to five k-blocks; each CTA sums on its own, and tensor cores sum no more than a chunk."""
    monkeypatch.setattr(HOST_CHUNK, chunk)
    lengths, add = [], Product.add

    def counted(acc: Product, left: Buffer, right: Buffer) -> None:
        add(acc, left, right)
        lengths.append(acc.length)

    monkeypatch.setattr(Product, "add", counted)
    with emulated(ctas=3, seed=chunk):
        assert_wgrads_agree(KERNELS_OF_FP8, plan_of(*OF_WGRAD_FAULTS), 384, 640, chunk == 2, torch.float16, LIMIT)
    assert max(lengths) == min(chunk, 3)  # of five k-blocks, three and two


def test_a_gradient_that_tma_cannot_describe_takes_the_portable_kernel(all_wgrads_in_fp8: None) -> None:
    """One launch, of operands that are not quantised, which adds: nothing is compiled once a slice was added."""
    plan, by_token = plan_of(65, 0, 130, 40), torch.randn(235, 128).half()
    total = torch.zeros(3 * 128 * 128 + 1)[1:].view(3, 128, 128)
    with emulated() as launches, pytest.raises(KeyError, match="gemm_wgrad_kernel"):  # not emulated
        KERNELS_OF_FP8.down_proj_wgrad(by_token, torch.randn(235, 128).half(), plan, False, total)
    (launch,) = launches
    assert launch.constants["ADDS"]
    assert not launch.kernel.is_gluon()


@cache
def recorded_wgrad() -> list[Recorded]:
    """down_proj_wgrad's launch for the last slice on two CTAs, in up to three chunks, and what it wrote; else NaN."""
    plan, width = plan_of(*OF_WGRAD_FAULTS), 640
    torch.manual_seed(0)
    by_token, by_row = torch.randn(plan.num_tokens, width).half(), torch.randn(plan.capacity, width).half()
    exact = backend_named("torch_fp8").down_proj_wgrad(by_token.float(), by_row.float(), plan)
    with pytest.MonkeyPatch.context() as patch, emulated(ctas=2) as launches:
        patch.setattr("tilemoe.kernels.experts.triton.formats.transpose.SLICE", 384)
        patch.setattr(HOST_CHUNK, 2)
        assert_close("dw2", KERNELS_OF_FP8.down_proj_wgrad(by_token, by_row, plan).float(), exact, LIMIT)
    last, outputs = with_outputs(launches)[-1]  # the launch before it would now read this one's slice of A
    outputs["out"][:, : last.args["first_of_slice"]] = torch.nan
    return [(last, outputs)]


# Faults


def reached(case: Case, fault: Fault) -> Case:
    """A case of 16 bits that shows it."""
    function = fault[0]
    if function == "gather_producer":  # as many steps as stages: a tile begins where the one before did
        return replace(case, hidden_size=256)
    if function.startswith("pingpong"):  # down_proj too, and not as many steps as fill the stages once or twice
        return replace(case, intermediate_size=max(case.intermediate_size, 264))
    return case


# Of each group: the precision, rows of experts, and for each name a case and a fault.
GROUPS: dict[str, tuple[str, tuple[int, ...], dict[str, tuple[Case, Fault]]]] = {
    "": ("16 bits", OF_FAULTS, {name: (reached(SWIGLU, fault), fault) for name, fault in FAULTS.items()}),
    "stationary": (
        "16 bits",
        OF_STATIONARY_FAULTS,
        {name: (STATIONARY, fault) for name, fault in OF_STATIONARY.items()},
    ),
    "layouts": ("16 bits", OF_FAULTS, {name: (reached(*found), found[1]) for name, found in OF_LAYOUTS.items()}),
    "fp8": ("fp8", OF_FP8_FAULTS, FP8_FAULTS),
    "fp8 stationary": ("fp8", OF_FP8_STATIONARY_FAULTS, FP8_OF_STATIONARY),
    "wgrad": ("fp8", OF_WGRAD_FAULTS, {name: (FP8_SWIGLU, fault) for name, fault in OF_WGRAD.items()}),
}


def is_quick(group: str, index: int, message: str) -> bool:
    """In `make test`: one message of the emulator's alone shows it; of deadlocks, and of the others, every eighth."""
    shows_alone = not re.search(r"\||deadlock", message)
    return group not in ("layouts", "fp8 stationary") and (shows_alone or index % 8 == 0)


PLANTED = [
    pytest.param(group, name, marks=() if is_quick(group, i, fault[-1]) else pytest.mark.thorough)
    for group, (*_, faults) in GROUPS.items()
    for i, (name, (_, fault)) in enumerate(faults.items())
]


@pytest.mark.parametrize(("group", "name"), PLANTED)
def test_planted_faults_are_caught(all_wgrads_in_fp8: None, group: str, name: str) -> None:
    precision, counts, faults = GROUPS[group]
    case, (function, text, instead, message) = faults[name]
    found = recorded_wgrad() if group == "wgrad" else recorded(precision, case, counts)
    found = [each for each in found if function in functions_of(each[0].kernel)]
    assert found, f"no kernel calls {function}"
    with pytest.raises(AssertionError, match=message):
        assert_agree_with_a_fault({function: (text, instead)}, found)


def assert_agree_with_a_fault(edits: Edits, found: list[Recorded]) -> None:
    """With loads that come late, which shows a missing wait; then with sooner ones, which overwrite what is in use.

    One CTA, so that buffers are used again; each kernel that the fault is in, alone.
    """
    for late in (0.9, 0.3):
        errors = [errors_with(Emulator(late=late, edits=edits), *each) for each in found]
        assert not any(errors), errors


def test_without_a_fault_nothing_is_caught(all_wgrads_in_fp8: None) -> None:
    of_layers = recorded("16 bits", SWIGLU, OF_FAULTS) + recorded("fp8", FP8_SWIGLU, OF_FP8_FAULTS)
    for late, found in product((0.9, 0.3), of_layers + recorded_wgrad()):
        assert not errors_with(Emulator(late=late), *found)
