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


def test_a_seed_gives_the_same_order_again() -> None:
    emulators = Emulator(seed=5), Emulator(seed=5)
    for emulator in emulators:
        with emulated(emulator=emulator):
            assert_inference_agrees(KERNELS, plan_of(65, 0, 130, 40), CASES[0], TOLERANCE)
    assert emulators[0].random.getstate() == emulators[1].random.getstate()


PROTOCOL = "deadlock|more arrivals"
FENCE = "before a fence"
NUMBERS = "RMS-relative error|not finite"
SOONER = f"{PROTOCOL}|{FENCE}"
STAGE_BEFORE = "empty.index((step + STAGES - 1) % STAGES)"
GIVE = "mbarrier.arrive(turn_of_other, count=1)"
FAULTS = {
    "a stage is filled while it is read": ("acquire", "mbarrier.wait(empty.", "(empty.", PROTOCOL),
    "the producer's first phase": ("acquire", " & 1) ^ 1)", " & 1))", PROTOCOL),
    "a stage is read before it is full": ("multiply", "mbarrier.wait(ready.index(stage), (", "((", SOONER),
    "the consumer's phase": ("multiply", "(step // STAGES) & 1)", "step & 1)", SOONER),
    "a stage is left twice": ("multiply", "pred=(k > 0) | owes", "pred=True", PROTOCOL),
    "a stage is left with its product in flight": ("multiply", "mma_wait(1,", "mma_wait(2,", NUMBERS),
    "copies are announced before they arrive": ("publish_copies", "(LAG)", "(LAG + 1)", f"{FENCE}|{NUMBERS}"),
    "copies without a fence": ("publish_copies", "fence_async_shared()", "pass", FENCE),
    "the last copies": ("publish_last_copies", "async_copy.wait_group(0)", "pass", "has not waited for"),
    "nobody passes by": ("pass_by", "mbarrier.arrive(empty.index(stage), count=1)", "pass", PROTOCOL),
    "a store without a fence": ("start_store", "fence_async_shared()", "pass", FENCE),
    "fewer bytes than come": ("load_blocks", "COUNT * rows", "1 * rows", "more bytes"),
    "more bytes than come": ("load_blocks", "COUNT * rows", "3 * rows", PROTOCOL),
    "four blocks are three and one": ("blocks_of_tile", "(left == BLOCKS + 1)", "(left == 99)", "stored twice"),
    "nobody moves up": ("blocks_of_tile", "gl.where(takes_one, row - GROUP_M, row)", "row", NUMBERS),
    "F1 overwrites a slice": ("finish_act", "tma.store_wait(1)\n                place", "place", NUMBERS),
    "nobody waits for a turn": ("finish_rows", "mbarrier.wait(order.index(GROUP), ", "(", f"{PROTOCOL}|{NUMBERS}"),
    "nobody gives a turn": ("multiply_blocks", "mbarrier.arrive(turn_of_other, count=1)", "pass", PROTOCOL),
    "a turn is given at every step": ("multiply_blocks", "        step += 1", f"        step += 1; {GIVE}", PROTOCOL),
    "nobody comes unasked": ("finish_rows", "phase = 1 - GROUP", "phase = 0", PROTOCOL),
    "all come unasked": ("finish_rows", "phase = 1 - GROUP", "phase = 1", f"{PROTOCOL}|{NUMBERS}"),
    "turns do not alternate": ("finish_rows", "phase ^= 1", "pass", PROTOCOL),
    "a consumer takes the other's stages": ("finish_rows", "step += steps", "pass", PROTOCOL),
    "a full stage is read early": ("multiply_blocks", "mbarrier.wait(ready.index(stage), (", "((", PROTOCOL),
    "a stage is left with its products in flight": ("multiply_blocks", "COUNT, COUNT)", "COUNT, COUNT + 1)", NUMBERS),
    "F2 has no third block": ("finish_rows", "count > 2", "count > 3", NUMBERS),
    "F2 overwrites a slice": ("store_block", "tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)", NUMBERS),
    "F2 ends before its stores": ("finish_rows", "tma.store_wait(0)", "pass", "has not waited for"),
    "F2 stores past the expert's end": ("store_block", "end, last,", "end + 64, last - 64,", "stored twice"),
    "B1 reads h before it is there": (
        "finish_slice",
        "mbarrier.wait(ready.index(stage), (",
        "((",
        SOONER + "|" + NUMBERS,
    ),
    "B1's phase": ("finish_slice", "(step // STAGES) & 1)", "step & 1)", PROTOCOL),
    "B1 leaves a slice before its stores": ("finish_slice", "tma.store_wait(0)", "pass", NUMBERS),
    "B1 leaves no slice": ("finish_slice", f"mbarrier.arrive({STAGE_BEFORE}, count=1)", "pass", "deadlock"),
    "B1 leaves a tile before its stores": ("multiply", "tma.store_wait(0)", "pass", NUMBERS),
    "B1 leaves no tile": ("finish_act_grad", "owes = True", "owes = False", "deadlock"),
    "B1 passes by all but h": ("finish_act_grad", "steps + BN // SLICE, owes)", "steps, owes)", SOONER),
    "B1 passes by and owes": ("finish_act_grad", "SLICE, owes)\n            owes = False", "SLICE, owes)", NUMBERS),
    "B1 passes by what it owes": ("pass_by", "if owes:", "if False:", PROTOCOL),
    "B1 passes by before its stores": ("pass_by", "tma.store_wait(0)", "pass", NUMBERS),
    "B1 expects one consumer's h": ("load_gate_up", "GROUPS * h.", "1 * h.", "more bytes"),
    "B1 expects more h": ("load_gate_up", "GROUPS * h.", "3 * h.", "deadlock"),
    "B1 has the other consumer's h": ("load_gate_up", "pairs.index(group)", "pairs.index(1 - group)", NUMBERS),
    "B1 has h of the first slice": ("load_gate_up", "col + i * SLICE", "col", NUMBERS),
    "B1 does not announce h": ("load_gate_up", "publish_copies(ring, step)", "pass", "deadlock"),
    "B1 stores without a fence": ("finish_slice", "fence_async_shared()", "pass", FENCE),
    "B2 overwrites a slice": ("finish_weights", "tma.store_wait(1)", "tma.store_wait(2)", NUMBERS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name: str) -> None:
    function, text, fault, message = FAULTS[name]
    # Two tiles of columns, of the second one all four slices.
    case = replace(CASES[3], turned=function != "finish_act", intermediate_size=456)
    # Loads late, that a missing wait shows; one program, that a buffer is used again.
    with emulated(programs=1, edits={function: (text, fault)}), pytest.raises(AssertionError, match=message):
        assert_kernels_agree(kernels_of(case), plan_of(130, 0, 70, 200, 5), case, TOLERANCE)
