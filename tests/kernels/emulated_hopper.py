"""The Hopper kernels in an emulator of Gluon, and all others in Triton's interpreter: run by another test.

The interpreter's bf16 is wrong, so fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from gluon_emulator import Edits, Emulator
from hopper_faults import FAULTS, OF_LAYOUTS, SWIGLU, Fault
from triton.runtime.jit import JITFunction
from triton_checks import Case, assert_inference_agrees, assert_kernels_agree

from tilemoe.activations import activation_spec
from tilemoe.config import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from tilemoe.kernels.hopper import kernel_set as hopper_kernel_set
from tilemoe.kernels.hopper.choose import SHARED_BYTES
from tilemoe.kernels.hopper.kernel_set import HOPPER_KERNELS
from tilemoe.kernels.tiling import Device
from tilemoe.kernels.torch.mlp import TORCH_KERNELS
from tilemoe.kernels.triton import kernel_set as triton_kernel_set
from tilemoe.kernels.triton.launch import Launch
from tilemoe.kernels.triton.tiles import tile_lists_kernel
from tilemoe.routing.build import plan_topk
from tilemoe.routing.plan import RoutingPlan
from tilemoe.testing import hostile_routings, make_inputs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP16 = torch.float16
TOLERANCE = 6e-4  # as on a GPU
ALL_KERNELS = {"up_proj_act_kernel", "gemm_rows_kernel", "act_grad_kernel", "gemm_weights_kernel"}
# What else there is would take most of the time in the interpreter, where others test it.
KERNELS = replace(
    HOPPER_KERNELS,
    down_proj_bias_grad=TORCH_KERNELS.down_proj_bias_grad,
    up_proj_bias_grad=TORCH_KERNELS.up_proj_bias_grad,
)
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=128)}
# Widths: ragged in both; more steps than the ring has stages, all full; one step, one slice; two tiles of columns.
SIZES = ((136, 200), (320, 136), (64, 64), (192, 264))
LAYOUTS = [(name, layout) for name in sorted(GATED_ACTIVATIONS) for layout in ("concatenated", "interleaved")]
LAYOUTS += [(name, "concatenated") for name in sorted(UNGATED_ACTIVATIONS)]
CASES = [
    Case(FP16, name, gate_up, bias, turned, *SIZES[(i + j) % len(SIZES)])
    for i, (name, gate_up) in enumerate(LAYOUTS)
    for j, (bias, turned) in enumerate(product((False, True), (False, True)))
]
# Rows of the experts, and tokens without one: at the ends of blocks of 64, of tiles of 128, 192; with four blocks.
ENDS = [(63, 64, 65, 0, 7), (0, 129, 1, 191, 3), (0, 449, 0, 0), (192, 0, 193, 128, 2), (385, 320, 0)]
ENDS += [(256, 0, 640, 193, 2)]


def plan_of(*rows_per_expert: int) -> RoutingPlan:
    """One expert for each token, in no order; the last of these numbers counts tokens without an expert."""
    ids = torch.arange(len(rows_per_expert)).repeat_interleave(torch.tensor(rows_per_expert))
    shuffled = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    return plan_topk(shuffled[:, None], len(rows_per_expert) - 1)


@contextmanager
def emulated(
    programs: int = 2, seed: int = 0, late: float = 0.9, edits: Edits | None = None, emulator: Emulator | None = None
) -> Iterator[set[str]]:
    """Kernels in Gluon are emulated, on ``programs`` multiprocessors; gives the names of those that were."""
    device = Device(90, SHARED_BYTES, programs)
    emulator, run, names = emulator or Emulator(seed, late, edits), Launch.run, set[str]()

    def run_or_emulate(launch: Launch) -> None:
        if isinstance(launch.kernel, JITFunction):  # the others are the interpreter's
            emulator.run(launch)
            names.add(launch.kernel.__name__)
        else:
            run(launch)

    with pytest.MonkeyPatch.context() as patch:
        for module in (hopper_kernel_set, triton_kernel_set):
            patch.setattr(module, "device_of", lambda t: device)
            patch.setattr(module, "few_rows", lambda num_rows, num_experts: None)
        patch.setattr(Launch, "run", run_or_emulate)
        yield names


@pytest.mark.parametrize("name", ROUTINGS)
def test_hostile_routings(name: str) -> None:
    # Every case meets a few of all these plans, and every plan a few cases: all pairs would take an hour.
    index = list(ROUTINGS).index(name)
    plan, case = ROUTINGS[name], CASES[7 * index % len(CASES)]
    with emulated(programs=1 + index % 3, seed=index, late=(0.3, 0.9, 1.0)[index // 3 % 3]) as names:
        assert_kernels_agree(KERNELS, plan, case, TOLERANCE)
        assert_inference_agrees(KERNELS, plan, case, TOLERANCE)
    assert names == (ALL_KERNELS if plan.capacity else set())


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_every_layout_bias_and_activation(index: int) -> None:
    counts = ENDS[(index + index // 12) % len(ENDS)]
    with emulated(programs=1 + index % 3, seed=index) as names:
        assert_kernels_agree(KERNELS, plan_of(*counts), CASES[index], TOLERANCE)
    assert names == ALL_KERNELS


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_clamped_gates(gate_up: str) -> None:
    """With a limit that half of them pass."""
    case = Case(FP16, "swiglu_oai", gate_up, True, hidden_size=136, intermediate_size=200, limit=0.3)
    with emulated(programs=3):
        assert_kernels_agree(KERNELS, plan_of(65, 0, 130, 40), case, TOLERANCE)


def test_rows_past_the_last_are_not_written() -> None:
    plan, spec = plan_of(65, 0, 130, 40), activation_spec("swiglu", "concatenated", None, None)
    given = make_inputs(plan, 136, 200, dtype=FP16)
    with emulated():
        a, h = HOPPER_KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        y = HOPPER_KERNELS.down_proj(a, given["w2"], None, plan)
        s = given["scores"].reshape(-1)
        dh, _, a_scaled = HOPPER_KERNELS.down_proj_act_grad(given["x"], given["w2"], None, h, s, plan, spec)
        dx_rows = HOPPER_KERNELS.up_proj_act_grad(dh, given["w1"], plan)
    for rows in (a, h, y, dh, a_scaled, dx_rows):
        assert not bool(rows[:195].isnan().any())
        assert bool(rows[195:].isnan().all())


def test_the_forward_lists_tiles_of_both_heights_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each operator of the backward, which has a plan of its own, those that it needs."""
    spec, listed = activation_spec("swiglu", "concatenated", None, None), list[tuple[int, int]]()
    plans = [plan_of(65, 0, 130, 40) for _ in range(3)]
    given = make_inputs(plans[0], 136, 200, dtype=FP16)
    with emulated():
        emulate = Launch.run

        def note(launch: Launch) -> None:
            if launch.kernel is tile_lists_kernel:
                listed.append((launch.args["tile_m"], launch.args["second_tile_m"]))
            emulate(launch)

        monkeypatch.setattr(Launch, "run", note)
        a, h = KERNELS.up_proj_act(given["x"], given["w1"], None, plans[0], spec)
        KERNELS.down_proj(a, given["w2"], None, plans[0])
        assert listed == [(128, 192)]
        KERNELS.down_proj_act_grad(given["x"], given["w2"], None, h, given["scores"].reshape(-1), plans[1], spec)
        KERNELS.up_proj_act_grad(h, given["w1"], plans[2])
    assert listed[1:] == [(128, 0), (192, 0)]


@pytest.mark.parametrize("programs", [1, 2, 3, 4, 5, 12])
def test_the_counter_of_tiles_is_zero_again(programs: int) -> None:
    """However many programs there are for three tiles (F1: six): some ask in vain, some have none to ask after."""
    plan, spec = plan_of(65, 0, 130, 40), activation_spec("swiglu", "concatenated", None, None)
    given, counts = make_inputs(plan, 136, 200, dtype=FP16), list[int]()
    with emulated(programs):
        a, h = HOPPER_KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        counts += plan.derived[128].num_tiles.tolist()
        again, _ = HOPPER_KERNELS.up_proj_act(given["x"], given["w1"], None, plan, spec)
        HOPPER_KERNELS.down_proj_act_grad(given["x"], given["w2"], None, h, given["scores"].reshape(-1), plan, spec)
        counts += plan.derived[128].num_tiles.tolist()
    assert counts == [3, 0, 3, 0]
    assert torch.equal(a[:195], again[:195])
    other = plan_of(65, 0, 130, 40)
    with emulated(programs, edits={"take_tile": ("mask=wanted & is_last", "mask=False")}):
        HOPPER_KERNELS.up_proj_act(given["x"], given["w1"], None, other, spec)
    assert (int(other.derived[128].num_tiles[1]) == 0) == (programs >= 6), "without what puts it back"


def test_a_seed_gives_the_same_order_again() -> None:
    emulators = Emulator(seed=5), Emulator(seed=5)
    for emulator in emulators:
        with emulated(emulator=emulator):
            assert_inference_agrees(KERNELS, plan_of(65, 0, 130, 40), CASES[0], TOLERANCE)
    assert emulators[0].random.getstate() == emulators[1].random.getstate()


def assert_agree_with_a_fault(case: Case, fault: Fault) -> None:
    """With loads that come late, which shows a missing wait; then with sooner ones, which overwrite what is in use."""
    function, text, instead, _ = fault
    if function == "gather_rows":  # as many steps as stages: a tile begins where the one before did
        case = replace(case, hidden_size=256)
    for late in (0.9, 0.3):
        # One program, that a buffer is used again.
        with emulated(programs=1, late=late, edits={function: (text, instead)}):
            assert_kernels_agree(KERNELS, plan_of(130, 0, 64, 194, 5), case, TOLERANCE)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str) -> None:
    with pytest.raises(AssertionError, match=FAULTS[name][-1]):
        assert_agree_with_a_fault(SWIGLU, FAULTS[name])


@pytest.mark.parametrize("name", OF_LAYOUTS)
def test_faults_of_layouts_are_caught(name: str) -> None:
    case, fault = OF_LAYOUTS[name]
    with pytest.raises(AssertionError, match=fault[-1]):
        assert_agree_with_a_fault(case, fault)
