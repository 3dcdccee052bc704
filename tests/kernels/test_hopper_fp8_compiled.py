"""The FP8 Hopper kernels compiled without a GPU: 8-bit wgmma, whether they wait for one another, copies, spills.

T tokens · d hidden_size · n intermediate_size · E experts
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
from triton_compile import (
    assert_items_carry_their_blocks,
    assert_threads_meet_after_tile_info,
    assert_threads_meet_before_tma_stores,
    bytes_of_copies,
    compile_launch,
    compile_launches,
    machine_code,
    ptxas_messages,
    recorded_launches,
)

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.hopper.configs import SHARED_BYTES
from tilemoe.kernels.experts.hopper_fp8.backend import HopperFp8Backend
from tilemoe.kernels.experts.hopper_fp8.gemm_stationary import gemm_stationary_kernel
from tilemoe.kernels.experts.hopper_fp8.host import STATIONARY, TILE
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

H200 = Device(90, SHARED_BYTES, 132)
T, D, N, E = 256, 1024, 768, 4
IS_3_6 = triton.__version__.startswith("3.6.")

Case = tuple[str, str, bool]  # activation, gate_up, bias
# At most so many spill loads in all of a kernel and in a step of a mainloop; and where a case has others.
SPILLS = {"F1": (1, 0), "F1, inference": (1, 0), "F2": (17, 4), "B1": (3, 0), "B3": (17, 4)}
OTHER_SPILLS: dict[Case, dict[str, tuple[int, int]]] = {
    ("swiglu", "concatenated", False): {},
    ("swiglu", "concatenated", True): {"F1": (2, 0), "F2": (1, 0)},
    ("swiglu", "interleaved", False): {"F1, inference": (36, 6), "B1": (1, 1)},
    ("swiglu_oai", "concatenated", True): {"F1": (3, 0), "B1": (4, 0)},
    ("geglu", "interleaved", False): {"F1": (169, 40), "F1, inference": (177, 40)},
    ("gelu", "concatenated", True): {"F1": (121, 0), "F1, inference": (2, 0)},
    ("relu2", "concatenated", True): {},
}
SPILLS_OF_39 = {"F1": (283, 50), "F1, inference": (233, 50), "F2": (40, 7), "B1": (42, 0), "B3": (40, 7)}
STATIONARY_SPILLS_OF_39 = 14  # with a bias: scalars of a block, loaded outside of the mainloops
# Where ptxas has too few registers, and waits for each wgmma.
SERIALISED = {("geglu", "interleaved", False): {"F1", "F1, inference"}} if IS_3_6 else {}


def gemm_launches(case: Case, dtype: torch.dtype) -> dict[str, Launch]:
    """Those of F2 and B3, which know nothing of activation and layout, beside swiglu's in two blocks alone."""
    activation, gate_up, bias = case
    names = SPILLS if (activation, gate_up) == ("swiglu", "concatenated") else SPILLS.keys() - {"F2", "B3"}
    spec, kernels = activation_spec(activation, gate_up, None, None), HopperFp8Backend()
    plan, w = plan_topk(torch.arange(2 * T).view(T, 2) % E, E), spec.width_factor * N

    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    x, w1, w2, h = made(T, D), made(E, w, D), made(E, D, N), made(plan.capacity, w)
    b1, b2 = (made(E, w), made(E, D)) if bias else (None, None)
    with recorded_launches(H200) as launches:
        a, _ = kernels.up_proj_act(x, w1, b1, plan, spec)
        kernels.up_proj_act_inference(x, w1, b1, plan, spec)
        kernels.down_proj(a, w2, b2, plan)
        kernels.down_proj_dgrad_dact(x, w2, None, h, torch.zeros(plan.num_pairs), plan, spec)
        kernels.up_proj_dgrad(h, w1, plan)
    gemms = [launch for launch in launches if launch.kernel.is_gluon()]
    return {name: launch for name, launch in zip(SPILLS, gemms, strict=True) if name in names}


def assert_threads_meet_before_release(ptx: str) -> None:
    """One thread releases a stage for its warp group: each must have read its rows' scales."""
    letters = {"wgmma.mma_async": "m", "ld.shared.b32": "r", "mbarrier.arrive": "a"}
    found = re.findall(r"^.*?(wgmma\.mma_async|ld\.shared\.b32|bar(?:rier)?\.sync|mbarrier\.arrive)", ptx, re.M)
    order = "".join(letters.get(instruction, "|") for instruction in found)
    assert re.findall("mmmm(r+)mmmm(.)", order) == [("rr", "|")] * 2, "a step of each consumer, two rows of a thread"


def mainloops(code: str) -> list[list[str]]:
    """The instructions of each innermost loop that multiplies: the shortest stretches that a branch back ends."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?) *;", code)
    position = {int(address, 16): i for i, (address, _) in enumerate(found)}
    branches = [(i, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)) for i, (_, text) in enumerate(found)]
    stretches = [range(position[int(target[1], 16)], i + 1) for i, target in branches if target]
    loops = list[range]()
    for stretch in sorted(filter(None, stretches), key=len):
        multiplies = any("QGMMA" in found[i][1] for i in stretch)
        if multiplies and all(stretch.stop <= loop.start or loop.stop <= stretch.start for loop in loops):
            loops.append(stretch)
    return [[found[i][1] for i in loop] for loop in loops]


def assert_only_multiplies(mainloop: list[str]) -> None:
    """A step: two products of four instructions each, which begin at zero without a register being filled."""
    products = [text for text in mainloop if "QGMMA" in text]
    assert len(products) == 8
    assert sum(text.endswith("RZ, !UPT") for text in products) == 2
    assert not any("CS2R" in text for text in mainloop), "registers are filled with zeros"


def spill_loads(code: str) -> int:
    return len(re.findall(r"\bLDL", code))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, torch.bfloat16) for case in OTHER_SPILLS] + [(("swiglu", "concatenated", False), torch.float16)],
    ids=str,
)
def test_kernels(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    launches = gemm_launches(case, dtype)
    spills, serialised = {}, set()
    for name, (_, compiled) in zip(launches, compile_launches(launches.values(), 90), strict=True):
        ptx, code = str(compiled.asm["ptx"]), machine_code(compiled, tmp_path)
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx, name
        assert "cp.async.bulk.tensor" in ptx, name
        assert bytes_of_copies(ptx) == {16, 4}, f"{name}: rows by 16 bytes, their scales one by one"
        assert compiled.metadata.shared <= H200.shared_bytes, name
        assert_threads_meet_before_tma_stores(ptx)
        assert_threads_meet_after_tile_info(ptx)
        assert_threads_meet_before_release(ptx)
        loops = mainloops(code)
        assert len(loops) == 2, "one for each consumer"
        spills[name] = spill_loads(code), max(spill_loads("\n".join(loop)) for loop in loops)
        if re.search(r"\(C75\d\d\)", ptxas_messages(compiled, 90, tmp_path)):
            serialised.add(name)
        else:
            for loop in loops:
                assert_only_multiplies(loop)
    bounds = {**SPILLS, **OTHER_SPILLS[case]} if IS_3_6 else SPILLS_OF_39
    for name, found in spills.items():
        assert all(count <= bound for count, bound in zip(found, bounds[name], strict=True)), f"{name}: {found}"
    assert serialised == SERIALISED.get(case, set())


def test_registers_of_three_warpgroups_fit() -> None:
    for tile in (TILE, STATIONARY):
        assert 256 * tile.consumer_registers + 128 * tile.producer_registers <= 65536
        assert tile.consumer_registers % 8 == tile.producer_registers % 8 == 0


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("contraction", [128, 256, 512])
def test_stationary_weight(contraction: int, bias: bool, tmp_path: Path) -> None:
    kernels, plan = HopperFp8Backend(), plan_topk(torch.arange(2 * T).view(T, 2) % E, E)
    a, w2 = (torch.zeros(*rows, contraction, dtype=torch.bfloat16) for rows in ((plan.capacity,), (E, D)))
    with recorded_launches(H200) as launches:
        kernels.down_proj(a, w2, torch.zeros(E, D, dtype=torch.bfloat16) if bias else None, plan)
    (launch,) = (launch for launch in launches if launch.kernel is gemm_stationary_kernel)
    compiled = compile_launch(launch, 90)
    ptx, code = str(compiled.asm["ptx"]), machine_code(compiled, tmp_path)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx
    for dimensions in (2, 4):
        assert re.search(rf"cp\.async\.bulk\.tensor\.{dimensions}d\.shared::\w+\.global", ptx), dimensions
    assert "cp.async.c" not in ptx
    assert compiled.metadata.shared <= H200.shared_bytes
    assert spill_loads(code) <= (0 if IS_3_6 or not bias else STATIONARY_SPILLS_OF_39)
    assert_threads_meet_before_tma_stores(ptx)
    assert_threads_meet_after_tile_info(ptx)
    assert_threads_meet_before_release(ptx)
    assert_items_carry_their_blocks(compiled, warp_groups=1)
    assert not re.search(r"\(C75\d\d\)", ptxas_messages(compiled, 90, tmp_path)), "it waits for each wgmma"
    loops = mainloops(code)
    assert len(loops) == 2, "one for each consumer"
    for loop in loops:
        assert_only_multiplies(loop)
