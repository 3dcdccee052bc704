"""Every Triton kernel in every dtype, compiled for GPUs that are not here: four of NVIDIA's and one of AMD's.

What is compiled is what a forward and a backward launch, as recorded. T tokens · d hidden_size · n intermediate_size ·
E experts · K experts per token
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction
from triton_checks import turn
from triton_compile import (
    CAPABILITIES,
    GFX942,
    MATRIX_UNIT,
    MI300,
    NVIDIA,
    compile_launches,
    recorded_launches,
    stack_bytes,
)

from tilemoe.kernels.experts.triton import bias_grad, combine, tiles
from tilemoe.kernels.experts.triton import host as mlp
from tilemoe.kernels.plan import triton as plan_module
from tilemoe.kernels.rounding import triton as rounding
from tilemoe.kernels.router import triton as router
from tilemoe.kernels.router import triton_input_grad as router_input
from tilemoe.kernels.router.triton import RouterSpec
from tilemoe.ops.moe import moe
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device, device_of
from tilemoe.runtime.launch import Launch
from tilemoe.testing import forward_and_grads, make_inputs

D, N, E, T, K = 1536, 256, 2, 64, 2
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
# The operands' type in the matrix unit's instruction; fp32 by IEEE uses none.
OPERANDS = {"bf16": r"\.bf16\.bf16", "fp16": r"\.f16\.f16", "tf32": r"\.tf32\.tf32"}
KIND = {"bf16": r"::f16", "fp16": r"::f16", "tf32": r"::tf32"}  # how tcgen05 calls them
# Bytes of a thread's stack, all of it used in epilogues, once per tile; 16 are no spill.
NO_SPILL = 16
STACK = {"gemm_dgrad_dact_kernel": 256}
# Triton after 3.6 runs out of registers where gate and up alternate.
STACK_OF_INTERLEAVED = NO_SPILL if triton.__version__.startswith("3.6.") else 40


@pytest.fixture(params=["bf16", *(pytest.param(name, marks=pytest.mark.thorough) for name in DTYPES if name != "bf16")])
def dtype_name(request: pytest.FixtureRequest) -> Iterator[str]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param == "tf32"
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = allowed


def layer_launches(
    device: Device,
    dtype: torch.dtype,
    activation: str = "swiglu",
    gate_up: str = "concatenated",
    bias: bool = False,
    transposed: bool = False,
) -> list[Launch]:
    """What a plan, a router, a rounding and the operator launch. ``transposed``: weights of the other stride order."""
    ids = torch.arange(T * K).view(T, K) % E
    plan = plan_topk(ids, E)
    inputs = make_inputs(plan, D, N, activation, dtype=dtype, bias=bias)
    if transposed:
        inputs |= {name: turn(inputs[name]) for name in ("w1", "w2")}
    options = {"activation": activation, "gate_up": gate_up, "kernels": "triton"}
    with recorded_launches(device) as launches:
        plan_module.count_sort(ids, E)
        logits, select = torch.zeros(T, 64), RouterSpec(8, "softmax", True, 1.0, 1, 1, balance=True, z=True)
        scores, chosen, probability_sums, z_sum = router.select(logits, None, None, select)
        router.select_grad(logits, chosen, None, scores, probability_sums, z_sum, select)
        late = RouterSpec(8, "late softmax", True, 1.0, 1, 1, balance=False, z=False)
        router.select_grad(logits, chosen, None, scores, None, None, late)
        of_router = (logits.to(dtype), torch.zeros(64, D, dtype=dtype), torch.zeros(T, D, dtype=dtype))
        if dtype != torch.float32 and router_input.why_unsupported(*of_router) is None:
            router_input.input_grad(*of_router)
        how = rounding.RoundingSpec("nearest_score", 16, "softmax", True, 1.0, 2 * T * 8)
        rows = rounding.round_rows(logits, chosen, scores, logits[0], None, how)
        pairs = (rows.row_of_pair, rows.code_of_pair, rows.pair_start_of_token)
        rounding.score_grad(rows.scores, logits, chosen, None, rows.norm, *pairs, how)
        forward_and_grads(moe, inputs, plan, **options)
        if bias:  # alone, as where w1 is frozen; else up_proj_wgrad gives it in 16 bits
            bias_grad.up_proj_bias_grad(torch.zeros(T * K, inputs["b1"].shape[1], dtype=dtype), plan, device)
        with torch.no_grad():
            moe(plan=plan, **inputs, **options)
    return launches


def name_of(launch: Launch) -> str:
    return str(launch.kernel.fn.__name__)


def is_gemm(launch: Launch) -> bool:
    return "PRECISION" in launch.constants or name_of(launch) == "input_grad_kernel"


def one_of_each(launches: list[Launch]) -> list[Launch]:
    """The first launch of each kernel: what the others differ in is no matter of the dtype."""
    return list({name_of(launch): launch for launch in reversed(launches)}.values())


def test_no_kernel_is_left_out() -> None:
    kernels = {
        name
        for module in (bias_grad, combine, mlp, plan_module, rounding, router, router_input, tiles)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }
    assert len(kernels) >= 10
    assert kernels == {name_of(launch) for launch in layer_launches(NVIDIA[90], torch.bfloat16, bias=True)}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_dtype_on_nvidia(capability: int, dtype_name: str, tmp_path: Path) -> None:
    device = NVIDIA[capability]
    launches = one_of_each(layer_launches(device, DTYPES[dtype_name], bias=True))
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


@pytest.mark.parametrize(
    ("activation", "gate_up", "bias", "transposed"),
    [
        ("swiglu_oai", "interleaved", True, True),
        pytest.param("swiglu", "concatenated", False, False, marks=pytest.mark.thorough),
        pytest.param("geglu", "interleaved", False, False, marks=pytest.mark.thorough),
        pytest.param("gelu_tanh", "concatenated", True, True, marks=pytest.mark.thorough),
    ],
)
def test_every_layout_on_hopper(activation: str, gate_up: str, bias: bool, transposed: bool, tmp_path: Path) -> None:
    bounds = STACK | ({"up_proj_act_kernel": STACK_OF_INTERLEAVED} if gate_up == "interleaved" else {})
    launches = layer_launches(NVIDIA[90], torch.bfloat16, activation, gate_up, bias, transposed)
    for launch, compiled in compile_launches(launches, 90):
        assert compiled.metadata.shared <= NVIDIA[90].shared_bytes, name_of(launch)
        assert stack_bytes(compiled, tmp_path) <= bounds.get(name_of(launch), NO_SPILL), name_of(launch)
        for promised in ("wgmma.mma_async", "cp.async.bulk.tensor"):
            assert (promised in compiled.asm["ptx"]) == is_gemm(launch), f"{promised} in {name_of(launch)}"


def test_amd() -> None:
    for launch, compiled in compile_launches(layer_launches(MI300, torch.bfloat16, bias=True), GFX942):
        code = compiled.asm["amdgcn"]
        assert bool(re.search(r"v_mfma_f32_\w+bf16", code)) == is_gemm(launch), name_of(launch)
        assert compiled.metadata.shared <= MI300.shared_bytes, name_of(launch)
        for what in ("private_segment_fixed_size", "vgpr_spill_count"):
            (found,) = re.findall(rf"\.{what}: +(\d+)", code)
            assert int(found) == 0, f"{what} of {name_of(launch)}"


def test_without_the_interpreter_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="need a GPU but x is on cpu"):
        device_of(torch.zeros(1))
