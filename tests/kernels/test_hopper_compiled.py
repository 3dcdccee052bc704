"""The Hopper kernels compiled without a GPU: matrix units, TMA, copies, registers traded and none spilled.

T tokens · d hidden_size · n intermediate_size · E experts · K experts per token
"""

from __future__ import annotations

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
    MAX_WIDTH_OF_DH,
    SHAPES,
    is_faster,
    problem_of_gpu,
)
from tilemoe.kernels.tiling import KERNELS, Device
from tilemoe.kernels.triton.launch import Launch
from tilemoe.kernels.triton.tiles import tile_list_launch
from tilemoe.routing.build import plan_topk

H200 = Device(90, 227 * 1024, 132)
D, N, E, T, K = 1536, 256, 2, 64, 2
GATHERED = {"up_proj_act", "down_proj_act_grad", "down_proj_weight_grad", "up_proj_weight_grad"}
# Spill loads of down_proj_act_grad, once per tile of 128 x 256; the error function takes registers. Newer releases of
# Triton, by which these kernels are compiled but not chosen, spill some more, and in the gathers, too.
ON_36 = triton.__version__.startswith("3.6.")
SPILLS = {"swiglu": 2, "reglu": 2, "geglu": 16} if ON_36 else {"swiglu": 32, "reglu": 64, "geglu": 192}
SPILLS_OF_GATHER = 0 if ON_36 else 16


def all_launches(dtype: torch.dtype, activation: str = "swiglu", d: int = D, n: int = N) -> dict[str, Launch]:
    spec = activation_spec(activation, "concatenated", None, None)
    plan = plan_topk(torch.arange(T * K).view(T, K) % E, E)
    _, tiles = tile_list_launch(plan, 128)
    x, w1, w2 = (torch.zeros(*shape, dtype=dtype) for shape in [(T, d), (E, 2 * n, d), (E, d, n)])
    s = torch.zeros(T * K)
    up, a, h = launches.up_proj_act_launch(x, w1, plan, tiles, spec, True, H200)
    grad, dh, a_scaled, _ = launches.act_grad_launch(x, w2, h, s, plan, tiles, spec, H200)
    return {
        "up_proj_act": up,
        "up_proj_act, inference": launches.up_proj_act_launch(x, w1, plan, tiles, spec, False, H200)[0],
        "down_proj": launches.rows_launch("down_proj", a, w2.transpose(1, 2), plan, tiles, H200)[0],
        "down_proj_act_grad": grad,
        "down_proj_weight_grad": launches.weights_launch("down_proj_weight_grad", x, a_scaled, plan, False, H200)[0],
        "up_proj_act_grad": launches.rows_launch("up_proj_act_grad", dh, w1, plan, tiles, H200)[0],
        "up_proj_weight_grad": launches.weights_launch("up_proj_weight_grad", x, dh, plan, True, H200)[0],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", all_launches(torch.bfloat16))
def test_kernel(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    compiled = compile_launch(all_launches(dtype)[name], 90)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
    assert "cp.async.bulk.tensor" in ptx
    kernel = name.partition(",")[0]
    assert ("cp.async.cg.shared.global" in ptx) == (kernel in GATHERED), "gathers by 16 bytes, and nothing else does"
    assert compiled.metadata.shared <= H200.shared_bytes
    bound = SPILLS["swiglu"] if name == "down_proj_act_grad" else SPILLS_OF_GATHER if kernel in GATHERED else 0
    assert count_spill_loads(compiled, tmp_path) <= bound


@pytest.mark.parametrize("activation", ACT_GRAD_ACTIVATIONS)
def test_act_grad_of_every_activation(activation: str, tmp_path: Path) -> None:
    launch = all_launches(torch.bfloat16, activation, d=1000, n=200)["down_proj_act_grad"]
    assert count_spill_loads(compile_launch(launch, 90), tmp_path) <= SPILLS[activation]


@pytest.mark.parametrize("activation", ["swiglu_oai", "geglu", "reglu"])
def test_up_proj_of_every_activation(activation: str, tmp_path: Path) -> None:
    launch = all_launches(torch.bfloat16, activation, d=1000, n=200)["up_proj_act"]
    assert count_spill_loads(compile_launch(launch, 90), tmp_path) <= SPILLS_OF_GATHER


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
        (H200, "3.9.0", "Triton 3.6"),
    ],
)
def test_elsewhere_the_reason_is_given(device: Device, version: str, word: str) -> None:
    problem = problem_of_gpu(device, version)
    assert problem is not None
    assert word in problem


def test_here_they_run() -> None:
    assert problem_of_gpu(H200, "3.6.0") is None


def test_long_contractions_stay_portable() -> None:
    for name, longest in MAX_CONTRACTION.items():
        assert is_faster(name, longest, 4096)
        assert not is_faster(name, longest + 1, 4096)
    assert is_faster("up_proj_weight_grad", 4096, MAX_WIDTH_OF_DH)
    assert not is_faster("up_proj_weight_grad", 4096, MAX_WIDTH_OF_DH + 1)
    assert is_faster("down_proj_act_grad", 7168, 2048), "its epilogue is never small"
    assert not is_faster("down_proj", 512, 32), "narrow"
