"""The Hopper kernels of both precisions compiled without a GPU: matrix units, TMA, copies, registers traded and none
spilled, and whether products wait for one another.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton_compile import (
    ANY_BARRIER,
    Cell,
    assert_items_carry_their_blocks,
    assert_threads_meet_after_tile_info,
    assert_threads_meet_before_tma_stores,
    bytes_of_copies,
    compile_launch,
    compile_launches,
    count_loads_of_two_bytes,
    count_spill_loads,
    in_order,
    launch_of_cell,
    machine_code,
    ptxas_messages,
    recorded_launches,
)

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.formats.fp8 import BLOCK
from tilemoe.kernels.experts.hopper.backend import HopperBackend
from tilemoe.kernels.experts.hopper.configs import (
    FP8_STATIONARY,
    GEMMS,
    MAX_CONTRACTION,
    MAX_CONTRACTION_OF_NARROW,
    MAX_WIDTH_OF_DH,
    NARROW,
    SHARED_BYTES,
    row_of,
    tile_of,
    why_slower,
    why_unsupported,
)
from tilemoe.kernels.experts.hopper.gemm_stationary import gemm_stationary_kernel
from tilemoe.kernels.experts.hopper.gemm_wgrad import gemm_transposed_kernel
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.configs import KERNELS, WEIGHT_GRADS, Kernel
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

H200, IS_3_6 = Device(90, SHARED_BYTES, 132), triton.__version__.startswith("3.6.")
OF_ROWS: tuple[Kernel, ...] = ("down_proj", "up_proj_dgrad")
LONG = 4096  # a contraction that no stationary weight has
GATHERED = {"up_proj_act", "down_proj_dgrad_dact", "down_proj_wgrad", "up_proj_wgrad"}
# Spill loads, once per tile of 128 x 256; 0 where none is named. Triton 3.9 spills some, and in the gathers, too.
SPILLS = {} if IS_3_6 else dict.fromkeys(GATHERED, 16) | {"down_proj_dgrad_dact": 28}


def assert_tma_and_memory(launch: Launch, compiled: Any) -> str:
    """What holds for each. Returns the PTX."""
    ptx = str(compiled.asm["ptx"])
    assert "cp.async.bulk.tensor" in ptx
    assert compiled.metadata.shared <= H200.shared_bytes
    assert_threads_meet_before_tma_stores(ptx)
    if launch.kernel is not gemm_stationary_kernel:  # whose consumers decode their tiles themselves
        assert_threads_meet_after_tile_info(ptx)
        return ptx
    for dimensions in (2, 4):  # all loads are TMA's: the rows', and the weight's, of (expert, part, k, column)
        assert re.search(rf"cp\.async\.bulk\.tensor\.{dimensions}d\.shared::\w+\.global", ptx), dimensions
    assert "cp.async.c" not in ptx
    return ptx


def launch_of(cell: Cell) -> Launch:
    launch = launch_of_cell(cell, HopperBackend(), H200)
    assert launch is not None, "a portable kernel serves it"
    return launch


FORMS_OF_WGRADS = ((True, False), (False, True), (True, True))  # beside the plain one: transposed, added
CELLS = [
    *(Cell(kernel) for kernel in KERNELS),
    Cell("down_proj", widths=(1536, 512)),  # a long contraction
    Cell("up_proj_act", keeps_h=False),
    *(Cell(kernel, transposed=turned, adds=adds) for kernel in WEIGHT_GRADS for turned, adds in FORMS_OF_WGRADS),
]
WGRADS_OF_EACH_RUN = (Cell("up_proj_wgrad"), Cell("up_proj_wgrad", transposed=True, adds=True))
SELDOM = [cell for cell in CELLS if cell.kernel in WEIGHT_GRADS and cell not in WGRADS_OF_EACH_RUN]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=cell.name, marks=pytest.mark.thorough if cell in SELDOM else ()) for cell in CELLS]
)
def test_kernel(cell: Cell, dtype: torch.dtype, tmp_path: Path) -> None:
    launch = launch_of(cell._replace(dtype=dtype))
    compiled = compile_launch(launch, 90)
    ptx = assert_tma_and_memory(launch, compiled)
    assert f"wgmma.mma_async.sync.aligned.m64n{launch.constants['BN']}k16" in ptx
    assert ("cp.reduce.async.bulk.tensor.3d.global" in ptx) == cell.adds
    assert ("cp.async.cg.shared.global" in ptx) == (cell.kernel in GATHERED), "gathers by 16 bytes, nothing else does"
    if cell.kernel in WEIGHT_GRADS:
        assert bytes_of_copies(ptx) == {16}
        assert "st.global" not in ptx
    assert count_spill_loads(compiled, tmp_path) <= SPILLS.get(cell.kernel, 0)


@pytest.mark.parametrize("kernel", OF_ROWS)
@pytest.mark.parametrize("d", [1000, pytest.param(64, marks=pytest.mark.thorough)])
def test_row_gemms_of_either_stride_order(kernel: Kernel, d: int, tmp_path: Path) -> None:
    """The first weight is contiguous in the other dimension than the second."""
    assert tile_of(kernel, 456).block_m == 192
    for transposed in (False, True):
        launch = launch_of(Cell(kernel, "relu2", "none", transposed, widths=(d, 456)))
        assert count_spill_loads(compile_launch(launch, 90), tmp_path) == 0


@pytest.mark.parametrize(
    ("n", "bias", "transposed"),
    [
        pytest.param(*cell, marks=() if cell[0] == 200 and cell[1] == cell[2] else pytest.mark.thorough)
        for cell in product((200, 64, 256), (False, True), (False, True))
    ],
)
def test_stationary_weight(n: int, bias: bool, transposed: bool, tmp_path: Path) -> None:
    launch = launch_of(Cell("down_proj", bias=bias, transposed=transposed, widths=(1000, n)))
    assert launch.kernel is gemm_stationary_kernel
    compiled = compile_launch(launch, 90)
    ptx = assert_tma_and_memory(launch, compiled)
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
    assert count_loads_of_two_bytes(ptx) <= (4 if bias else 0), "two columns of the bias for each thread of a consumer"
    assert count_spill_loads(compiled, tmp_path) == 0


def test_loops_over_work_items_carry_the_number_of_blocks() -> None:
    compiled = compile_launch(launch_of(Cell("down_proj", widths=(1000, 256))), 90)
    assert_items_carry_their_blocks(compiled, warp_groups=3)


def test_registers_of_three_warpgroups_fit() -> None:
    for tile in {row.tile for row in GEMMS}:
        assert 256 * tile.consumer_registers + 128 * tile.producer_registers <= 65536, tile
        assert tile.consumer_registers % 8 == 0, tile
        assert tile.producer_registers % 8 == 0, tile


@pytest.mark.parametrize(
    ("device", "version", "word"),
    [
        (Device(80, 163 * 1024, 108), "3.6.0", "capability"),
        (Device(100, 227 * 1024, 148), "3.6.0", "capability"),
        (Device(90, 99 * 1024, 132), "3.6.0", "shared memory"),
        (H200, "3.7.1", "Triton 3.6"),
        (H200, "3.6.0", "None"),
        (H200, "3.9.0", "None"),
    ],
)
def test_where_they_run_and_why_not_elsewhere(device: Device, version: str, word: str) -> None:
    assert word in str(why_unsupported(device, version))


def test_long_contractions_stay_portable() -> None:
    for width, longest in ((NARROW, MAX_CONTRACTION_OF_NARROW), (NARROW + 1, MAX_CONTRACTION)):
        assert why_slower("up_proj_dgrad", longest, width) is None
        assert why_slower("up_proj_dgrad", longest + 1, width) == f"the contraction is longer than {longest}"
    assert why_slower("up_proj_wgrad", 4096, MAX_WIDTH_OF_DH) is None
    assert why_slower("up_proj_wgrad", 4096, MAX_WIDTH_OF_DH + 1) == f"dh is wider than {MAX_WIDTH_OF_DH}"
    for name in ("up_proj_act", "down_proj", "down_proj_dgrad_dact"):
        assert why_slower(name, 7168, 2048) is None
    assert why_slower("down_proj", 512, 32) == "d or n is below 64"


@pytest.mark.parametrize("width", [200, 456])
def test_a_launch_is_of_the_kernel_and_the_tile_that_its_row_says(width: int) -> None:
    for kernel in KERNELS:
        launch = launch_of(Cell(kernel, widths=(width, width)))
        row = row_of(kernel, 2 * width if kernel == "up_proj_dgrad" else width)
        module, _, name = row.kernel.partition(":")
        assert (launch.kernel.fn.__module__.split(".")[-1], launch.kernel.fn.__name__) == (module, name)
        assert (launch.constants["BN"], launch.constants["STAGES"]) == (row.tile.block_n, row.tile.num_stages)


# FP8

T, D, N, E = 256, 1024, 768, 4

Case = tuple[str, str, bool]  # activation, gate_up, bias
# At most so many spill loads in all of a kernel and in a step of a mainloop; and where a case has others.
FP8_SPILLS = {
    "up_proj": (0, 0),
    "up_proj, inference": (0, 0),
    "down_proj": (17, 4),
    "down_proj_dgrad": (0, 0),
    "up_proj_dgrad": (0, 0),
}
OTHER_SPILLS: dict[Case, dict[str, tuple[int, int]]] = {
    ("swiglu", "concatenated", False): {"up_proj": (2, 0), "down_proj_dgrad": (4, 0)},
    ("swiglu", "concatenated", True): {"down_proj": (1, 0), "down_proj_dgrad": (4, 0)},
    ("swiglu", "interleaved", False): {},
    ("swiglu_oai", "concatenated", True): {"down_proj_dgrad": (2, 0)},
    ("geglu", "interleaved", False): {"up_proj": (1, 0)},
    ("gelu", "concatenated", True): {"up_proj": (1, 0), "up_proj, inference": (1, 0), "down_proj_dgrad": (4, 0)},
    ("relu2", "concatenated", True): {},
}
FP8_SPILLS_OF_39 = {
    "up_proj": (89, 0),
    "up_proj, inference": (80, 0),
    "down_proj": (40, 7),
    "down_proj_dgrad": (25, 0),
    "up_proj_dgrad": (0, 0),
}
STATIONARY_SPILLS_OF_39 = 14  # with a bias: scalars of a block, loaded outside of the mainloops
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.(\w+\.f32\.e4m3\.e4m3)"
# down_proj's, a half of the tile's columns, within one of the weight's blocks; the others', with scales by row.
HALVES, ROWS = "m64n128k32.f32.e4m3.e4m3", "m64n256k32.f32.e4m3.e4m3"
COPIES = {
    "down_proj": {16, 4},
    "down_proj_dgrad": {16, 4},
}  # bytes: down_proj's row scales and down_proj_dgrad's indices of pairs are copied one by one
# Instructions of a mainloop with scales by row, which waits, multiplies and arrives; and of B as well as of A.
LONGEST_STEP, LONGEST_STATIONARY_STEP = 59, 64 if IS_3_6 else 66


def gemm_launches(case: Case, dtype: torch.dtype) -> dict[str, Launch]:
    """Those of down_proj and up_proj_dgrad, which know nothing of activation and layout, beside swiglu's in two blocks
    alone."""
    activation, gate_up, bias = case
    names = (
        FP8_SPILLS
        if (activation, gate_up) == ("swiglu", "concatenated")
        else FP8_SPILLS.keys() - {"down_proj", "up_proj_dgrad"}
    )
    spec, kernels = activation_spec(activation, gate_up, None, None), backend_named("hopper_fp8")
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
    return {name: launch for name, launch in zip(FP8_SPILLS, gemms, strict=True) if name in names}


def assert_threads_meet_before_release(ptx: str) -> None:
    """One thread releases a stage for its warp group: each must have read its rows' scales."""
    order = in_order(
        ptx, {r"wgmma\.mma_async": "m", r"ld\.shared\.b32": "r", r"mbarrier\.arrive": "a", ANY_BARRIER: "|"}
    )
    assert re.findall("mmmm(r+)mmmm(.)", order) == [("rr", "|")] * 2, "a step of each consumer, two rows of a thread"


def assert_threads_meet_after_products(ptx: str) -> None:
    """One thread releases a stage for its warp group: the products of all must be done."""
    order = in_order(ptx, {r"wgmma\.wait_group": "w", r"mbarrier\.arrive": "a", ANY_BARRIER: "|"})
    assert order.count("w|a") >= 2, "of each consumer"
    assert "wa" not in order


def assert_threads_meet_around_column_scales(ptx: str) -> None:
    """Each thread stores two columns' scales once all have read the tile's before, and loads others' once all have."""
    order = in_order(ptx, {r"st\.shared\.v2\.b32": "s", r"ld\.shared\.v[24]\.b32": "r", ANY_BARRIER: "|"})
    assert re.findall("(.)s(.)r+", order) == [("|", "|")] * 2, "of each consumer"


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


def assert_multiplies_halves(loops: list[list[str]]) -> None:
    """A step with block scales: two products of four instructions each, which need no register filled with zeros."""
    for loop in loops:
        products = [text for text in loop if "QGMMA" in text]
        assert len(products) == 8
        assert sum(text.endswith("RZ, !UPT") for text in products) == 2
        assert not any("CS2R" in text for text in loop), "registers are filled with zeros"


def assert_only_multiplies(loops: list[list[str]], longest: int = LONGEST_STEP) -> None:
    """A step with scales by row: four instructions of one product, which add to the sum."""
    for loop in loops:
        products = [text for text in loop if "QGMMA" in text]
        assert len(products) == 4
        assert all(re.search(r"\b(R\d+), .*, \1(?:, gsb0)?$", text) for text in products)
        assert len(loop) <= longest
        assert not any("CS2R" in text for text in loop), "registers are filled with zeros"


def assert_tiles_begin_without_zeros(code: str) -> None:
    """The first instruction of a tile's first step, which is not in the loop, overwrites what registers hold."""
    assert len(re.findall("QGMMA", code)) == 16, "four of the first step and four of the others, by each consumer"
    assert len(re.findall("QGMMA.* RZ, !UPT ;", code)) == 2
    assert len(re.findall("CS2R", code)) < 64, "an accumulator is filled with zeros"


def assert_zeros_only_without_rows(code: str) -> None:
    """Where an expert may have no rows: the zeros that stand for its product lie past the instructions of a product."""
    order = "".join("m" if text == "QGMMA" else "z" for text in re.findall("QGMMA|CS2R", code))
    assert re.fullmatch("(m{8}z{1,64}){2}", order), "by each consumer; two of 128 registers at a time"
    assert len(re.findall("QGMMA.* RZ, !UPT ;", code)) == 2


def spill_loads(code: str) -> int:
    return len(re.findall(r"\bLDL", code))


def assert_multiplies_in_fp8(
    launch: Launch, compiled: Any, folder: Path, by_block: bool = False, longest: int = LONGEST_STEP
) -> tuple[str, str, list[list[str]]]:
    """What holds for each, whose scales are by row and column or, in down_proj, by block. Returns PTX, machine code and
    the mainloops of both consumers."""
    ptx, code = assert_tma_and_memory(launch, compiled), machine_code(compiled, folder)
    assert set(re.findall(WGMMA, ptx)) == {HALVES if by_block else ROWS}
    assert not re.search(r"\(C75\d\d\)", ptxas_messages(compiled, 90, folder)), "it waits for each wgmma"
    loops = mainloops(code)
    assert len(loops) == 2, "one for each consumer"
    if by_block:
        assert_threads_meet_before_release(ptx)
        assert_multiplies_halves(loops)
    else:
        assert_threads_meet_after_products(ptx)
        assert_only_multiplies(loops, longest)
    return ptx, code, loops


def assert_columns_are_scaled(ptx: str, code: str) -> None:
    assert_threads_meet_around_column_scales(ptx)
    assert_tiles_begin_without_zeros(code)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (("swiglu", "concatenated", True), torch.bfloat16),
        *(
            pytest.param(case, torch.bfloat16, marks=pytest.mark.thorough)
            for case in [*OTHER_SPILLS][:1] + [*OTHER_SPILLS][2:]
        ),
        pytest.param(("swiglu", "concatenated", False), torch.float16, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_fp8_kernels(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    launches = gemm_launches(case, dtype)
    spills = {}
    for name, (launch, compiled) in zip(launches, compile_launches(launches.values(), 90), strict=True):
        ptx, code, loops = assert_multiplies_in_fp8(launch, compiled, tmp_path, by_block=name == "down_proj")
        assert bytes_of_copies(ptx) == COPIES.get(name, {16}), name
        if name != "down_proj":
            assert_columns_are_scaled(ptx, code)
        spills[name] = spill_loads(code), max(spill_loads("\n".join(loop)) for loop in loops)
    bounds = {**FP8_SPILLS, **OTHER_SPILLS[case]} if IS_3_6 else FP8_SPILLS_OF_39
    for name, found in spills.items():
        assert all(count <= bound for count, bound in zip(found, bounds[name], strict=True)), f"{name}: {found}"


@pytest.mark.parametrize(
    "name", ["down_proj, bias", "up_proj_dgrad", pytest.param("down_proj", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("contraction", [256, *(pytest.param(each, marks=pytest.mark.thorough) for each in (128, 512))])
def test_stationary_weight_in_fp8(contraction: int, name: str, tmp_path: Path) -> None:
    by_row, longest = name == "up_proj_dgrad", LONGEST_STATIONARY_STEP
    launch = fp8_stationary_launch(contraction, name)
    compiled = compile_launch(launch, 90)
    ptx, code, _ = assert_multiplies_in_fp8(launch, compiled, tmp_path, not by_row, longest)
    assert spill_loads(code) <= (0 if IS_3_6 or name != "down_proj, bias" else STATIONARY_SPILLS_OF_39)
    # But for B's barriers, of whose arrivals, with the bytes to come, no consumer learns that tile_info is there.
    of_a, of_b = re.subn(rf".*mbarrier\.arrive\.expect_tx.*, {FP8_STATIONARY.block_n * BLOCK};\n", "", ptx)
    assert of_b == FP8_STATIONARY.b_stages
    assert_threads_meet_after_tile_info(of_a)
    assert_items_carry_their_blocks(compiled, warp_groups=1)
    if by_row:
        assert_columns_are_scaled(ptx, code)


def fp8_stationary_launch(contraction: int, name: str) -> Launch:
    kernels, plan = backend_named("hopper_fp8"), plan_topk(torch.arange(2 * T).view(T, 2) % E, E)
    rows, bias = torch.zeros(plan.capacity, contraction, dtype=torch.bfloat16), None
    if name == "down_proj, bias":
        bias = torch.zeros(E, D, dtype=torch.bfloat16)
    with recorded_launches(H200) as launches:
        if name == "up_proj_dgrad":
            kernels.up_proj_dgrad(rows, rows.new_zeros(E, contraction, D), plan)
        else:
            kernels.down_proj(rows, rows.new_zeros(E, D, contraction), bias, plan)
    (launch,) = (launch for launch in launches if launch.kernel is gemm_stationary_kernel)
    return launch


@pytest.mark.parametrize("adds", [False, True], ids=["", "added"])
@pytest.mark.parametrize(
    "column_major", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["", "column-major"]
)
def test_wide_weight_gradients(all_wgrads_in_fp8: None, column_major: bool, adds: bool, tmp_path: Path) -> None:
    launch = wgrad_launch(column_major, adds)
    ptx, code, _ = assert_multiplies_in_fp8(launch, compile_launch(launch, 90), tmp_path)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", ptx)
    assert ("cp.reduce.async.bulk.tensor.3d.global" in ptx) == adds
    assert "cp.async.c" not in ptx
    assert spill_loads(code) == 0
    assert_zeros_only_without_rows(code)


def wgrad_launch(column_major: bool, adds: bool) -> Launch:
    kernels, plan = backend_named("hopper_fp8"), plan_topk(torch.arange(2 * T).view(T, 2) % E, E)
    do, a_scaled = (torch.zeros(rows, width, dtype=torch.bfloat16) for rows, width in ((T, D), (plan.capacity, N)))
    total = torch.zeros(E, N, D).transpose(1, 2) if column_major else torch.zeros(E, D, N)
    with recorded_launches(H200) as launches:
        kernels.down_proj_wgrad(do, a_scaled, plan, column_major, total if adds else None)
    (launch,) = (launch for launch in launches if launch.kernel is gemm_transposed_kernel)
    assert (launch.constants["TRANSPOSED"], launch.constants["ADDS"]) == (column_major, adds)
    return launch
