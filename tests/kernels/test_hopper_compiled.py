"""The Hopper kernels compiled without a GPU: matrix units, TMA, copies, registers traded and none spilled.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
from triton_compile import compile_launch, count_spill_loads

from tilemoe.activations import activation_spec
from tilemoe.kernels.hopper import launches
from tilemoe.kernels.hopper.choose import (
    ACT_GRAD_ACTIVATIONS,
    MAX_CONTRACTION,
    MAX_CONTRACTION_OF_NARROW,
    MAX_WIDTH_OF_DH,
    NARROW,
    SHAPES,
    is_faster,
    problem_of_gpu,
)
from tilemoe.kernels.hopper.ping_pong import BLOCKS
from tilemoe.kernels.hopper.pipeline import GROUP_M, GROUPS
from tilemoe.kernels.tiling import KERNELS, Device, Kernel, tile_rows
from tilemoe.kernels.triton.launch import Launch
from tilemoe.kernels.triton.tiles import tile_lists_launch
from tilemoe.routing.build import plan_topk

H200 = Device(90, 227 * 1024, 132)
D, N, E, T, K = 1536, 256, 2, 64, 2
GATHERED = {"up_proj_act", "down_proj_act_grad", "down_proj_weight_grad", "up_proj_weight_grad"}
# Spill loads of down_proj_act_grad, once per tile of 128 x 256. Triton 3.9 spills some, and in the gathers, too.
ON_36 = triton.__version__.startswith("3.6.")
SPILLS = {"swiglu": 0, "reglu": 2, "geglu": 0} if ON_36 else {"swiglu": 28, "reglu": 12, "geglu": 17}
SPILLS_OF_GATHER = 0 if ON_36 else 16


def all_launches(dtype: torch.dtype, activation: str = "swiglu", d: int = D, n: int = N) -> dict[str, Launch]:
    spec = activation_spec(activation, "concatenated", None, None)
    plan = plan_topk(torch.arange(T * K).view(T, K) % E, E)
    _, (tiles, tall_tiles) = tile_lists_launch(plan, 128, 192)
    x, w1, w2 = (torch.zeros(*shape, dtype=dtype) for shape in [(T, d), (E, 2 * n, d), (E, d, n)])
    s = torch.zeros(T * K)
    up, a, h = launches.up_proj_act_launch(x, w1, plan, tiles, spec, True, H200)
    grad, dh, a_scaled, _ = launches.act_grad_launch(x, w2, h, s, plan, tiles, spec, H200)
    return {
        "up_proj_act": up,
        "up_proj_act, inference": launches.up_proj_act_launch(x, w1, plan, tiles, spec, False, H200)[0],
        "down_proj": launches.rows_launch("down_proj", a, w2.transpose(1, 2), plan, tall_tiles, H200)[0],
        "down_proj_act_grad": grad,
        "down_proj_weight_grad": launches.weights_launch("down_proj_weight_grad", x, a_scaled, plan, False, H200)[0],
        "up_proj_act_grad": launches.rows_launch("up_proj_act_grad", dh, w1, plan, tall_tiles, H200)[0],
        "up_proj_weight_grad": launches.weights_launch("up_proj_weight_grad", x, dh, plan, True, H200)[0],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", all_launches(torch.bfloat16))
def test_kernel(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    compiled = compile_launch(all_launches(dtype)[name], 90)
    ptx = compiled.asm["ptx"]
    kernel = name.partition(",")[0]
    assert f"wgmma.mma_async.sync.aligned.m64n{SHAPES[kernel].columns}k16" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert ("cp.async.cg.shared.global" in ptx) == (kernel in GATHERED), "gathers by 16 bytes, and nothing else does"
    assert compiled.metadata.shared <= H200.shared_bytes
    bound = SPILLS["swiglu"] if name == "down_proj_act_grad" else SPILLS_OF_GATHER if kernel in GATHERED else 0
    assert count_spill_loads(compiled, tmp_path) <= bound


@pytest.mark.parametrize("name", all_launches(torch.bfloat16))
def test_threads_meet_between_a_fence_and_the_tma_stores_after_it(name: str) -> None:
    """One thread starts a store of what all have written: each of them must have passed its fence before."""
    ptx = str(compile_launch(all_launches(torch.bfloat16)[name], 90).asm["ptx"])
    found = re.findall(r"^.*?(fence\.proxy\.async|bar(?:rier)?\.sync|cp\.async\.bulk\.tensor\.\w+\.global)", ptx, re.M)
    stores = 0
    fenced = met = False
    for instruction in found:
        if instruction.startswith("fence"):
            fenced, met = True, False
        elif instruction.startswith("bar"):
            met = True
        else:
            assert fenced, "a store before any fence"
            assert met, "a store that the threads do not meet before"
            stores += 1
    assert stores >= 2


@pytest.mark.parametrize("name", all_launches(torch.bfloat16))
def test_threads_meet_between_a_note_and_the_arrival_behind_it(name: str) -> None:
    """One thread arrives at a barrier for all: what they have written for the other partitions, or read, is before.

    In the order of the text, where branches that follow a note lie one after the other.
    """
    ptx = str(compile_launch(all_launches(torch.bfloat16)[name], 90).asm["ptx"])
    letters = {"st.shared.b32": "w", "ld.shared.b32": "r", "mbarrier.arrive": "a"}
    found = re.findall(r"^.*?((?:st|ld)\.shared\.b32|bar(?:rier)?(?:\.warp)?\.sync|mbarrier\.arrive)", ptx, re.M)
    order = "".join(letters.get(instruction, "|") for instruction in found)
    assert "wwww" in order
    assert "rrrr" in order, "the four numbers of a note, by each consumer"
    assert re.search("w[wr]*a", order) is None
    assert re.search("rrrrr*a", order) is None


@pytest.mark.parametrize("activation", ACT_GRAD_ACTIVATIONS)
def test_act_grad_of_every_activation(activation: str, tmp_path: Path) -> None:
    launch = all_launches(torch.bfloat16, activation, d=1000, n=200)["down_proj_act_grad"]
    assert count_spill_loads(compile_launch(launch, 90), tmp_path) <= SPILLS[activation]


@pytest.mark.parametrize("activation", ["swiglu_oai", "geglu", "reglu"])
def test_up_proj_of_every_activation(activation: str, tmp_path: Path) -> None:
    launch = all_launches(torch.bfloat16, activation, d=1000, n=200)["up_proj_act"]
    assert count_spill_loads(compile_launch(launch, 90), tmp_path) <= SPILLS_OF_GATHER


@pytest.mark.parametrize("kernel", ["down_proj", "up_proj_act_grad"])
@pytest.mark.parametrize("d", [64, 1000])
def test_row_gemms_of_either_stride_order(kernel: Kernel, d: int, tmp_path: Path) -> None:
    """The first weight is contiguous in the other dimension than the second."""
    plan = plan_topk(torch.arange(T * K).view(T, K) % E, E)
    _, (tiles,) = tile_lists_launch(plan, SHAPES[kernel].rows)
    rows = torch.zeros(T * K, 200, dtype=torch.bfloat16)
    for weight in (torch.zeros(E, 200, d), torch.zeros(E, d, 200).transpose(1, 2)):
        launch, _ = launches.rows_launch(kernel, rows, weight.to(torch.bfloat16), plan, tiles, H200)
        assert count_spill_loads(compile_launch(launch, 90), tmp_path) == 0


def test_tiles_are_as_tall_as_the_kernels_have_blocks() -> None:
    for kernel in KERNELS:
        blocks = BLOCKS if kernel in ("down_proj", "up_proj_act_grad") else GROUPS
        assert SHAPES[kernel].rows == GROUP_M * blocks, kernel
    for kernel in ("up_proj_act", "down_proj_act_grad"):
        assert SHAPES[kernel].rows == tile_rows(2, H200), "it shares the portable kernels' list"


def test_registers_of_three_warpgroups_fit() -> None:
    for name in KERNELS:
        shape = SHAPES[name]
        assert 256 * shape.consumer_registers + 128 * shape.producer_registers <= 65536, name
        assert shape.consumer_registers % 8 == 0, name
        assert shape.producer_registers % 8 == 0, name


@pytest.mark.parametrize(
    ("device", "version", "word"),
    [
        (Device(80, 163 * 1024, 108), "3.6.0", "capability"),
        (Device(100, 227 * 1024, 148), "3.6.0", "capability"),
        (Device(90, 99 * 1024, 132), "3.6.0", "shared memory"),
        (H200, "3.7.1", "Triton 3.6"),
    ],
)
def test_elsewhere_the_reason_is_given(device: Device, version: str, word: str) -> None:
    problem = problem_of_gpu(device, version)
    assert problem is not None
    assert word in problem


def test_here_they_run() -> None:
    assert problem_of_gpu(H200, "3.6.0") is None
    assert problem_of_gpu(H200, "3.9.0") is None


def test_long_contractions_stay_portable() -> None:
    for width, longest in ((NARROW, MAX_CONTRACTION_OF_NARROW), (NARROW + 1, MAX_CONTRACTION)):
        assert is_faster("up_proj_act_grad", longest, width)
        assert not is_faster("up_proj_act_grad", longest + 1, width)
    assert is_faster("up_proj_weight_grad", 4096, MAX_WIDTH_OF_DH)
    assert not is_faster("up_proj_weight_grad", 4096, MAX_WIDTH_OF_DH + 1)
    for name in ("up_proj_act", "down_proj", "down_proj_act_grad"):
        assert is_faster(name, 7168, 2048)
    assert not is_faster("down_proj", 512, 32), "narrow"
