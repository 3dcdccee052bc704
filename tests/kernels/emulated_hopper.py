"""The Hopper kernels in an emulator of Gluon, and all others in Triton's interpreter: run by another test.

The interpreter's bf16 is wrong, so fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from gluon_emulator import Edits, Emulator
from triton.runtime.jit import JITFunction
from triton_checks import Case, assert_inference_agrees, assert_kernels_agree

from tilemoe.activations import activation_spec
from tilemoe.kernels.base import KernelSet
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
WITHOUT_F1 = replace(
    KERNELS,
    up_proj_act=TORCH_KERNELS.up_proj_act,
    up_proj_act_inference=TORCH_KERNELS.up_proj_act_inference,
)
ROUTINGS = {routing.name: routing.plan for routing in hostile_routings(tile=128)}
CASES = (
    Case(FP16, "swiglu", hidden_size=136, intermediate_size=200),  # ragged in both
    Case(FP16, "geglu", hidden_size=320, intermediate_size=136),  # more steps than the ring has stages, all full
    Case(FP16, "reglu", turned=True, hidden_size=64, intermediate_size=64),  # one step, one slice
    Case(FP16, "swiglu", turned=True, hidden_size=192, intermediate_size=264),  # two tiles of columns
)


# Rows of the experts, and tokens without one: at the ends of blocks of 64, of tiles of 128, 192; with four blocks.
ENDS = [(63, 64, 65, 0, 7), (0, 129, 1, 191, 3), (0, 449, 0, 0), (192, 0, 193, 128, 2), (385, 320, 0)]
ENDS += [(256, 0, 640, 193, 2)]


def kernels_of(case: Case) -> KernelSet:
    """F1 takes w1 as it is stored, not turned."""
    return WITHOUT_F1 if case.turned else KERNELS


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
    # Every case meets many routings, and every routing one case: all pairs would take minutes.
    index = list(ROUTINGS).index(name)
    plan, case = ROUTINGS[name], CASES[index % len(CASES)]
    with emulated(programs=1 + index % 3, seed=index, late=(0.3, 0.9, 1.0)[index // 3 % 3]) as names:
        assert_kernels_agree(kernels_of(case), plan, case, TOLERANCE)
        assert_inference_agrees(kernels_of(case), plan, case, TOLERANCE)
    expected = ALL_KERNELS - {"up_proj_act_kernel"} if case.turned else ALL_KERNELS
    assert names == (expected if plan.capacity else set())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("counts", ENDS, ids=str)
def test_ends_of_blocks(counts: tuple[int, ...], case: Case) -> None:
    with emulated(programs=1 + len(counts) % 2, seed=sum(counts)):
        assert_kernels_agree(kernels_of(case), plan_of(*counts), case, TOLERANCE)


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


def test_up_proj_of_an_activation_with_constants() -> None:
    with emulated(programs=3) as names:
        case = Case(FP16, "swiglu_oai", hidden_size=136, intermediate_size=200)
        assert_inference_agrees(KERNELS, plan_of(65, 0, 130, 40), case, TOLERANCE)
    assert "up_proj_act_kernel" in names


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


PROTOCOL = "deadlock|more arrivals"
FENCE = "before a fence"
NUMBERS = "RMS-relative error|not finite"
UNFINISHED = "has not waited for"
SOONER = f"{PROTOCOL}|{FENCE}"
EITHER = f"{PROTOCOL}|{NUMBERS}"
GIVE = "mbarrier.arrive(turn_of_other, count=1)"
LEAVE = "leave_last(ring, step)"
PASS_BY = "mbarrier.arrive(empty.index(stage), count=1)"
AWAIT, TAKE = "await_full(ring, step)", "step % ring[2].shape[0]"
LEAVE_IN_LOOP, LEAVE_OWED = f"        {LEAVE}", "leave_last(ring, step, owes)"
WAIT = "warpgroup_mma_wait({}, deps=(acc,))\n"
WAIT_BLOCKS = f"acc2, COUNT, COUNT)\n{LEAVE_IN_LOOP}"
TILE = "announce(notes, stage, 1, row, end, col)"
NO_TILE = "announce(notes, acquire(ring, step), 0, 0, 0, 0)"
ASK = "ask_for_tile(num_tiles, next_index < total)"
FREE, TAKEN = "stage = acquire(ring, step)\n        ", f"stage = {TAKE}\n        "
WEIGHTS = "announce(notes, stage, expert"
ANOTHER = "stored twice|past the tensor|outside the tensor"
NOTE = f"{PROTOCOL}|{NUMBERS}|{ANOTHER}"
FAULTS = {
    "a stage is filled while it is read": ("acquire", "mbarrier.wait(empty.", "(empty.", PROTOCOL),
    "the producer's first phase": ("acquire", " & 1) ^ 1)", " & 1))", PROTOCOL),
    "a stage is read before it is full": ("start_product", AWAIT, TAKE, SOONER),
    "the consumer's phase": ("await_full", "(step // ready.shape[0]) & 1)", "step & 1)", SOONER),
    "a stage is left with its product in flight": (
        "multiply",
        WAIT.format(1) + LEAVE_IN_LOOP,
        WAIT.format(2) + LEAVE_IN_LOOP,
        NUMBERS,
    ),
    "a stage is left that nobody took": ("multiply", LEAVE_OWED, "leave_last(ring, step, True)", PROTOCOL),
    "a stage that is owed is not left": ("multiply", LEAVE_OWED, "leave_last(ring, step, False)", "deadlock"),
    "the last stage is not left": ("multiply", f"{WAIT.format(0)}    {LEAVE}", WAIT.format(0), "deadlock"),
    "a stage is left while a tile is stored from it": ("multiply", "tma.store_wait(0)", "pass", NUMBERS),
    "copies are announced before they arrive": ("publish_copies", "(LAG)", "(LAG + 1)", f"{FENCE}|{NUMBERS}|{ANOTHER}"),
    "copies without a fence": ("publish_copies", "fence_async_shared()", "pass", FENCE),
    "the last copies": ("publish_last_copies", "async_copy.wait_group(0)", "pass", UNFINISHED),
    "nobody passes by": ("pass_by", PASS_BY, "pass", "deadlock"),
    "stages are passed by twice": ("pass_by", PASS_BY, f"{PASS_BY}; {PASS_BY}", EITHER),
    "stages are passed by before they are full": ("pass_by", AWAIT, TAKE, SOONER),
    "passing by does not leave what is owed": ("pass_by", LEAVE, "pass", "deadlock"),
    "passing by leaves while a tile is stored": ("pass_by", "tma.store_wait(0)", "pass", NUMBERS),
    "a store without a fence": ("start_store", "fence_async_shared()", "pass", FENCE),
    "fewer bytes than come": ("load_blocks", "COUNT * rows", "1 * rows", "more bytes"),
    "more bytes than come": ("load_blocks", "COUNT * rows", "3 * rows", "deadlock"),
    "four blocks are three and one": ("block_tile", "(left == BLOCKS + 1)", "(left == 99)", "stored twice"),
    "nobody moves up": ("block_tile", "gl.where(takes_one, row - GROUP_M, row)", "row", NUMBERS),
    "F1 overwrites a slice": ("finish_act", "tma.store_wait(1)\n                place", "place", NUMBERS),
    "F1 ends before its stores": ("finish_act", "tma.store_wait(0)", "pass", UNFINISHED),
    "nobody waits for a turn": ("finish_rows", "mbarrier.wait(order.index(GROUP), ", "(", f"{PROTOCOL}|{ANOTHER}"),
    "nobody gives a turn": ("multiply_blocks", GIVE, "pass", PROTOCOL),
    "a turn is given at every step": (
        "multiply_blocks",
        "        step += 1",
        f"        step += 1; {GIVE}",
        f"{PROTOCOL}|{ANOTHER}",
    ),
    "nobody comes unasked": ("finish_rows", "phase = 1 - GROUP", "phase = 0", PROTOCOL),
    "all come unasked": ("finish_rows", "phase = 1 - GROUP", "phase = 1", PROTOCOL),
    "turns do not alternate": ("finish_rows", "phase ^= 1", "pass", PROTOCOL),
    "a consumer takes the other's stages": ("finish_rows", "step += steps", "pass", PROTOCOL),
    "a full stage is read early": ("start_products", AWAIT, TAKE, PROTOCOL),
    "a stage is left with its products in flight": (
        "multiply_blocks",
        WAIT_BLOCKS,
        WAIT_BLOCKS.replace("COUNT)", "COUNT + 1)"),
        NUMBERS,
    ),
    "F2 has no third block": ("finish_rows", "count > 2", "count > 3", NUMBERS),
    "F2 overwrites a slice": ("store_block", "tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)", NUMBERS),
    "F2 ends before its stores": ("finish_rows", "tma.store_wait(0)", "pass", UNFINISHED),
    "F2 stores past the expert's end": ("store_block", "end, last,", "end + 64, last - 64,", "stored twice"),
    "a note is left before the stage is free, F1": ("gather_rows", FREE + TILE, TAKEN + TILE, NOTE),
    "a note is left before the stage is free, F2": ("contiguous_blocks", "acquire(ring, step)", TAKE, NOTE),
    "a note is left before the stage is free, B2": ("gather_along_k", FREE + WEIGHTS, TAKEN + WEIGHTS, NOTE),
    "another tile is announced": ("gather_rows", TILE, TILE.replace("row", "next_row"), f"{NUMBERS}|{ANOTHER}"),
    "nobody says that no tile is left": ("gather_rows", NO_TILE, "acquire(ring, step)", "deadlock"),
    "a tile is taken twice": ("take_tile", "number + 2 * gl", "number + 1 * gl", "stored twice"),
    "nobody asks for a tile": ("gather_rows", ASK, "ask_for_tile(num_tiles, False)", f"{NUMBERS}|{ANOTHER}"),
    "another row's score": ("gather_rows", "gl.arange(0, TILE_M, EACH)", "0 * gl.arange(0, TILE_M, EACH)", NUMBERS),
    "no stage for an expert without rows": (
        "gather_along_k",
        "step += 1\n        upper",
        "pass\n        upper",
        PROTOCOL,
    ),
    "nobody loads h": ("gather_rows", "step = load_gate_up(ring, step, h, row, col, BN)", "pass", "deadlock"),
    "h of the next tile": ("gather_rows", "step, h, row, col, BN", "step, h, next_row, next_col, BN", NUMBERS),
    "h overwrites an operand": ("load_gate_up", "acquire(ring, step)", "step % ready.shape[0]", EITHER),
    "fewer bytes than come of h": ("load_gate_up", "GROUPS * h", "1 * h", "more bytes"),
    "more bytes than come of h": ("load_gate_up", "GROUPS * h", "3 * h", "deadlock"),
    "nobody announces h": ("load_gate_up", "publish_copies(ring, step)", "pass", "deadlock"),
    "all of h in one stage": ("load_gate_up", "        step += 1", "        pass", PROTOCOL),
    "h of the first consumer's rows": ("load_gate_up", "row + group * GROUP_M", "row", NUMBERS),
    "h of the first slice": ("load_gate_up", "col + i * SLICE", "col", NUMBERS),
    "B1 reads h before it is there": ("finish_slice", AWAIT, TAKE, f"{EITHER}|nobody waited for"),
    "B1's slice in the stage of another": ("finish_act_grad", "step + 1, GROUP, 1", "step, GROUP, 1", PROTOCOL),
    "B1's consumers in one place": ("finish_slice", "2 * GROUP_M).index(GROUP)", "2 * GROUP_M).index(0)", FENCE),
    "B1 leaves a stage twice": ("finish_slice", LEAVE, f"{LEAVE}; {LEAVE}", PROTOCOL),
    "B1 leaves no stage": ("finish_slice", LEAVE, "pass", "deadlock"),
    "B1 leaves a stage while it is stored": ("finish_slice", "tma.store_wait(0)", "pass", NUMBERS),
    "B1 waits for a_scaled only": ("finish_slice", "tma.store_wait(0)", "tma.store_wait(1)", NUMBERS),
    "B1 stores without a fence": ("finish_slice", "fence_async_shared()", "pass", FENCE),
    "B1 owes nothing": ("finish_act_grad", "owes = True", "pass", "deadlock"),
    "B1 pays twice": ("finish_act_grad", "            owes = False", "            pass", EITHER),
    "B1 passes no slices by": ("finish_act_grad", "steps + BN // SLICE", "steps", f"{SOONER}|{ANOTHER}"),
    "B1 counts one slice": ("finish_act_grad", "step += BN // SLICE", "step += 1", f"{SOONER}|{ANOTHER}"),
    "B1 ends before its stores": ("finish_act_grad", "tma.store_wait(0)", "pass", UNFINISHED),
    "B2 overwrites a slice": ("finish_weights", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
    "B2 ends before its stores": ("finish_weights", "tma.store_wait(0)", "pass", UNFINISHED),
}


def assert_agree_with_a_fault(function: str, text: str, fault: str) -> None:
    """With loads that come late, which shows a missing wait; then with sooner ones, which overwrite what is in use."""
    # As many columns as fill B1's slices: past them nothing is stored.
    case = replace(CASES[3], turned=function not in ("finish_act", "gather_rows"), intermediate_size=256)
    if function == "gather_rows":  # as many steps as stages: a tile begins where the one before did
        case = replace(case, hidden_size=256)
    for late in (0.9, 0.3):
        # One program, that a buffer is used again.
        with emulated(programs=1, late=late, edits={function: (text, fault)}):
            assert_kernels_agree(kernels_of(case), plan_of(130, 0, 64, 194, 5), case, TOLERANCE)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str) -> None:
    function, text, fault, message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        assert_agree_with_a_fault(function, text, fault)
