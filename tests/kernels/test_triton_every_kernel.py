"""Every Triton kernel in every dtype, compiled for GPUs that are not here: four of NVIDIA's and one of AMD's. And the
GEMMs for weights and gradients of either stride order, gate and up in both layouts, with biases and sums.

What is compiled is what a forward and a backward launch, as recorded. T tokens · d hidden_size · n intermediate_size ·
E experts · K experts per token
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compiled_rows import ROWS, layer_launches, name_of
from ptx_fences import TRITON_FENCES, mmas_without_fence
from triton.runtime.jit import JITFunction
from triton_compile import (
    CAPABILITIES,
    GFX942,
    MATRIX_UNIT,
    MI300,
    NVIDIA,
    amd_spills,
    bytes_of_copies,
    compile_launch,
    compile_launches,
    count_loads_of_two_bytes,
    count_spill_loads,
    make_operands,
    row_gemm_launch,
    stack_bytes,
)

from tilemoe.kernels.experts.formats.dense import empty_weight_grad
from tilemoe.kernels.experts.triton import bias_grad, combine, tiles
from tilemoe.kernels.experts.triton import host as mlp
from tilemoe.kernels.experts.triton.configs import WEIGHT_GRADS, Kernel
from tilemoe.kernels.plan import triton as plan_module
from tilemoe.kernels.rounding import triton as rounding
from tilemoe.kernels.router import triton as router
from tilemoe.kernels.router import triton_input_grad as router_input
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.launch import Launch

D, N, E, T, K = 1536, 256, 2, 64, 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
# The operands' type in the matrix unit's instruction; fp32 by IEEE uses none.
OPERANDS = {"bf16": r"\.bf16\.bf16", "fp16": r"\.f16\.f16", "tf32": r"\.tf32\.tf32"}
KIND = {"bf16": r"::f16", "fp16": r"::f16", "tf32": r"::tf32"}  # how tcgen05 calls them
# Bytes of a thread's stack, all of it used in epilogues, once per tile; 16 are no spill.
NO_SPILL = 16
STACK = {"gemm_dgrad_dact_kernel": 256}


@pytest.fixture(params=["bf16", *(pytest.param(name, marks=pytest.mark.thorough) for name in DTYPES if name != "bf16")])
def dtype_name(request: pytest.FixtureRequest) -> Iterator[str]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = allowed


def is_gemm(launch: Launch) -> bool:
    return "PRECISION" in launch.constants


def one_of_each(launches: list[Launch]) -> list[Launch]:
    """The first launch of each kernel: what the others differ in is no matter of the dtype."""
    return list({name_of(launch): launch for launch in reversed(launches)}.values())


def test_no_kernel_is_left_out() -> None:
    modules = (bias_grad, combine, mlp, plan_module, rounding, router, router_input, tiles)
    kernels = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    assert len(kernels) >= 10
    launches = [launch for row in ROWS.values() if 90 in row.capabilities for launch in row.launches(NVIDIA[90])]
    assert kernels <= {name_of(launch) for launch in (*launches, *layer_launches(NVIDIA[90], torch.bfloat16))}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_dtype_on_nvidia(capability: int, dtype_name: str, tmp_path: Path) -> None:
    device = NVIDIA[capability]
    launches = one_of_each(layer_launches(device, DTYPES[dtype_name]))
    for launch, compiled in compile_launches(launches, capability):
        where = f"{name_of(launch)} in {dtype_name} for sm_{capability}"
        assert compiled.metadata.shared <= device.shared_bytes, where
        assert stack_bytes(compiled, tmp_path) <= STACK.get(name_of(launch), NO_SPILL), where
        used = set(re.findall(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\S*", compiled.asm["ptx"]))
        if not is_gemm(launch) or dtype_name == "fp32":
            assert not used, where
            continue
        operands = (KIND if capability == 100 else OPERANDS)[dtype_name]
        assert used, f"{where} uses no matrix unit"
        for instruction in used:
            assert instruction.startswith(MATRIX_UNIT[capability]), where
            assert re.search(operands, instruction), where


def test_amd() -> None:
    for launch, compiled in compile_launches(layer_launches(MI300, torch.bfloat16), GFX942):
        assert bool(re.search(r"v_mfma_f32_\w+bf16", compiled.asm["amdgcn"])) == is_gemm(launch), name_of(launch)
        assert compiled.metadata.shared <= MI300.shared_bytes, name_of(launch)
        assert amd_spills(compiled) == 0, name_of(launch)


# The GEMMs over routed rows: every value of every factor, not all combinations.

CELLS = {  # activation, gate_up, transposed, bias
    "plain": ("swiglu", "concatenated", False, False),
    "interleaved": ("swiglu", "interleaved", False, False),
    "transposed": ("swiglu", "concatenated", True, False),
    "bias": ("swiglu", "concatenated", False, True),
    "interleaved, transposed, bias": ("swiglu", "interleaved", True, True),
    "clamped, interleaved, transposed, bias": ("swiglu_oai", "interleaved", True, True),
    "ungated, transposed, bias": ("relu2", "concatenated", True, True),
}
# A kernel is compiled once for the cells that its code does not tell apart.
COMPILED = {
    "up_proj_act": tuple(CELLS),
    "down_proj_dgrad_dact": tuple(name for name in CELLS if name != "bias"),
    "down_proj": ("plain", "transposed", "bias", "interleaved, transposed, bias"),
    "up_proj_dgrad": ("bias", "transposed"),
}
ALWAYS = ("plain", "interleaved, transposed, bias")
FOR_ALL = (*ALWAYS, "transposed")  # compiled for the newer GPUs, too, which no one has run
LAYOUTS = [
    pytest.param(
        name, cell, capability, marks=() if cell in ALWAYS and capability in (80, 90) else pytest.mark.thorough
    )
    for capability in NVIDIA
    for name, cells in COMPILED.items()
    for cell in cells
    if capability in (80, 90) or cell in FOR_ALL
]
# Bytes of a thread's stack, by kernel, capability and cell; 0 where none is named, and 8 of the newest are no spill.
STACK_OF_LAYOUT = {
    ("down_proj_dgrad_dact", 90, "interleaved"): 88,
    ("down_proj_dgrad_dact", 90, "transposed"): 16,
    ("down_proj_dgrad_dact", 90, "interleaved, transposed, bias"): 88,
    ("down_proj_dgrad_dact", 90, "clamped, interleaved, transposed, bias"): 120,
    ("down_proj_dgrad_dact", 90, "ungated, transposed, bias"): 24,
    ("up_proj_act", 100, "interleaved, transposed, bias"): 248,
    ("down_proj_dgrad_dact", 100, "plain"): 216,
    ("down_proj_dgrad_dact", 100, "transposed"): 216,
    ("down_proj_dgrad_dact", 100, "interleaved, transposed, bias"): 128,
    ("down_proj", 120, "transposed"): 32,
}
if not triton.__version__.startswith("3.6."):  # Triton 3.9; the same since these cells were first compiled there
    STACK_OF_LAYOUT |= {
        ("up_proj_act", 90, "plain"): 8,
        ("up_proj_act", 90, "interleaved, transposed, bias"): 40,
        ("up_proj_act", 90, "clamped, interleaved, transposed, bias"): 16,
        ("down_proj_dgrad_dact", 90, "plain"): 40,
        ("down_proj_dgrad_dact", 90, "interleaved"): 104,
        ("down_proj_dgrad_dact", 90, "transposed"): 40,
        ("down_proj_dgrad_dact", 90, "interleaved, transposed, bias"): 104,
        ("down_proj_dgrad_dact", 90, "ungated, transposed, bias"): 88,
        ("up_proj_act", 100, "interleaved, transposed, bias"): 264,
        ("down_proj_dgrad_dact", 100, "plain"): 256,
        ("down_proj_dgrad_dact", 100, "transposed"): 248,
    }
# Loads of a bias by 2 bytes: a thread's columns of an accumulator are not known to be next to each other.
BIAS_LOADS = {("up_proj_act", 90, "bias"): 32}


def assert_fits_tensor_memory(compiled: Any) -> None:
    """Of 512 columns; what asks for more, Triton 3.9 compiles to a trap."""
    assert compiled.metadata.tmem_size <= 512
    assert "trap;" not in compiled.asm["ptx"]


def assert_fenced(ptx: str, by_copies: bool) -> None:
    """Each product, but what cp.async feeds only from a release of Triton on, or where it passes through registers."""
    unfenced, _ = mmas_without_fence(ptx)
    assert not unfenced or (by_copies and not TRITON_FENCES)


@pytest.mark.parametrize(("name", "cell", "capability"), LAYOUTS)
def test_layout(name: str, cell: str, capability: int, tmp_path: Path) -> None:
    device, (activation, gate_up, transposed, bias) = NVIDIA[capability], CELLS[cell]
    operands = make_operands(activation, gate_up, transposed=transposed, bias=bias)
    compiled = compile_launch(row_gemm_launch(mlp, name, operands, device), capability)
    ptx = compiled.asm["ptx"]
    assert MATRIX_UNIT[capability] in ptx
    assert bool(re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::\w+\.global", ptx)) == device.has_tma, "the weight"
    is_gathered = name in ("up_proj_act", "down_proj_dgrad_dact")
    assert ("tile::gather4" in ptx) == (is_gathered and device.gathers)
    copies = not device.has_tma or (is_gathered and not device.gathers)
    assert bytes_of_copies(ptx) == ({16} if copies else set())
    most = BIAS_LOADS.get((name, capability, cell), 3) if bias else 0
    assert count_loads_of_two_bytes(ptx) <= most, "by element: a bias, never a weight"
    assert compiled.metadata.shared <= device.shared_bytes
    most = STACK_OF_LAYOUT.get((name, capability, cell), 8 if capability == 120 else 0)
    assert stack_bytes(compiled, tmp_path) <= most
    assert_fits_tensor_memory(compiled)
    assert_fenced(ptx, copies)


# Beside a TMA load, Triton 3.6 takes the gather of x through registers where the matrix units are those of 2020.
GATHERED_BY_REGISTER = 120


@pytest.mark.parametrize(
    ("kernel", "column_major", "adds"),
    [
        pytest.param(kernel, column_major, adds, marks=() if column_major == adds else pytest.mark.thorough)
        for kernel in WEIGHT_GRADS
        for column_major, adds in product((False, True), repeat=2)
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_weight_gradients_of_either_order_leave_by_wide_stores(
    capability: int, kernel: Kernel, column_major: bool, adds: bool, tmp_path: Path
) -> None:
    device, plan = NVIDIA[capability], plan_topk(torch.arange(T * K).view(T, K) % E, E)
    by_token, by_row = (torch.zeros(rows, width, dtype=torch.bfloat16) for rows, width in ((T, D), (T * K, N)))
    out = empty_weight_grad(by_row, (E, D, N), column_major)
    out = out.float() if adds else out
    launch = mlp.wgrad_launch(mlp.WeightGrad(kernel, by_token, by_row, out, adds), plan, device)
    assert launch.constants["TRANSPOSED"] == column_major
    compiled = compile_launch(launch, capability)
    ptx = compiled.asm["ptx"]
    assert MATRIX_UNIT[capability] in ptx
    assert compiled.metadata.shared <= device.shared_bytes
    assert count_spill_loads(compiled, tmp_path) == 0
    assert_fits_tensor_memory(compiled)
    assert_fenced(ptx, not device.gathers)
    assert ("tile::gather4" in ptx) == device.gathers
    if capability != GATHERED_BY_REGISTER and not device.gathers:
        assert "cp.async.cg.shared.global" in ptx, "the gather is not loaded asynchronously by 16 bytes"
    if device.has_tma:
        assert re.search(rf"cp\.{'reduce.' if adds else ''}async\.bulk\.tensor\.3d\.global", ptx)
        assert "st.global" not in ptx
    else:
        assert set(re.findall(r"\bst\.global\S*", ptx)) == {"st.global.v4.b32"}
        assert not adds or len(re.findall(r"\bld\.global\.v4\.b32", ptx)) >= len(re.findall(r"\bst\.global", ptx))


@pytest.mark.parametrize("capability", [80, 90])
def test_fp32_is_not_added_in_one_chain(capability: int) -> None:
    launch = row_gemm_launch(mlp, "down_proj", make_operands(dtype=torch.float32), NVIDIA[capability])
    ptx, tile = compile_launch(launch, capability).asm["ptx"], launch.constants
    sums = tile["BLOCK_M"] * tile["BLOCK_N"] // (32 * launch.num_warps)  # of a thread
    # A step's products in a chain of their own, then one addition for each sum.
    assert len(re.findall(r"\bfma\.rn\.f32\b", ptx)) >= sums * tile["BLOCK_K"]
    assert len(re.findall(r"\badd\.(?:rn\.)?f32\b", ptx)) == sums
