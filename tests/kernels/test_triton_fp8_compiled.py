"""The FP8 kernels compiled for GPUs that are not here: 8-bit tensor cores, 16-byte loads, no spill but in epilogues."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton_compile import KB, NVIDIA, compile_launches, recorded_launches, stack_bytes

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.hopper_fp8.backend import HopperFp8Backend
from tilemoe.kernels.experts.quantize import words_of_row
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton_fp8.backend import TritonFp8Backend
from tilemoe.kernels.experts.triton_fp8.operands import quantized_rows
from tilemoe.kernels.experts.triton_fp8.quantize import pack_rows, unpack_rows
from tilemoe.kernels.experts.triton_fp8.wgrad import SLICE
from tilemoe.ops import experts
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import ceil_div

GPUS = {89: Device(89, 99 * KB, 142), **{capability: NVIDIA[capability] for capability in (90, 100, 120)}}
MATRIX_UNIT = {
    89: r"mma\.sync\S*\.e4m3\.e4m3\.f32",
    90: r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3",
    100: r"tcgen05\.mma\S*kind::f8f6f4",
    120: r"mma\.sync\S*\.e4m3\.e4m3\.f32",
}
T, D, N, E = 256, 1024, 512, 4
# Bytes of stack that B1's epilogue may spill to; ptxas gives swiglu_oai's mainloop more of sm_120's registers.
STACK, STACK_OF_OAI_ON_120 = 64, 80


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize(
    ("activation", "gate_up"), [("swiglu", "concatenated"), ("swiglu_oai", "interleaved"), ("relu2", "concatenated")]
)
def test_compiled(all_wgrads_in_fp8: None, activation: str, gate_up: str, capability: int, tmp_path: Path) -> None:
    spec = activation_spec(activation, gate_up, None, None)
    plan = plan_topk(torch.arange(2 * T).view(T, 2) % E, E)
    tail, w = (plan, spec, TritonFp8Backend()), spec.width_factor * N

    def made(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    x, w1, w2, h, s = made(T, D), made(E, w, D), made(E, D, N), made(plan.capacity, w), torch.zeros(plan.num_pairs)
    a_scaled = made(plan.capacity, N)
    with recorded_launches(GPUS[capability]) as launches:
        experts.moe_forward(x, w1, w2, s, made(E, w), made(E, D), "full", False, *tail)
        kept = experts.moe_forward(x, w1, w2, s, None, None, "fp8", False, *tail)[1:]
        experts._dequantize_h(*kept, torch.bfloat16, *tail)
        experts._down_proj_dgrad_dact(x, w2, None, h, s, *tail)
        experts._down_proj_wgrad(x, a_scaled, False, *tail)
        experts._up_proj_input_grad(h, w1, *tail)
        experts._up_proj_wgrad(x, h, False, *tail)
    of_fp8 = [launch for launch in launches if "triton_fp8" in launch.kernel.fn.__module__]
    names = {launch.kernel.fn.__name__ for launch in of_fp8}
    gemms = {"up_proj_act_kernel", "rows_kernel", "dgrad_dact_kernel", "wgrad_kernel"}
    quantizing = {"quantize_rows_kernel", "quantize_blocks_kernel", "quantize_weight_rows_kernel"}
    transposing = {"largest_of_tiles_kernel", "quantize_transposed_kernel", "gather_transposed_kernel"}
    assert names == gemms | quantizing | transposing | {"dequantize_rows_kernel"}
    for launch, compiled in compile_launches(of_fp8, capability):
        name, ptx = launch.kernel.fn.__name__, compiled.asm["ptx"]
        stack = STACK_OF_OAI_ON_120 if (activation, capability) == ("swiglu_oai", 120) else STACK
        assert stack_bytes(compiled, tmp_path) <= (stack if name == "dgrad_dact_kernel" else 0), name
        assert compiled.metadata.shared <= GPUS[capability].shared_bytes, name
        if name in gemms:
            assert re.search(MATRIX_UNIT[capability], ptx), name
            assert set(re.findall(r"cp\.async\.c[ga]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)) <= {
                "0x10",
                "16",
            }
            assert not re.search(r"ld\.global\S*\.b8\s", ptx), "an element at a time"
        else:
            assert re.search(r"ld\.global\.v4\.b32", ptx), name
            assert name == "largest_of_tiles_kernel" or re.search(r"st\.global\.v4\.b32", ptx), name


@pytest.mark.parametrize("d", [2176, 2304, 3072, 7168])
@pytest.mark.parametrize("backend", [TritonFp8Backend(), HopperFp8Backend()], ids=lambda backend: backend.name)
def test_nothing_has_to_be_compiled_once_a_slice_was_added(backend: TritonBackend, d: int) -> None:
    """Else an operator's first call would add the slice twice: it launches until it lacks a binary, then runs again."""
    plan = plan_topk(torch.arange(2 * T).view(T, 2) % E, E)
    x, dh = torch.zeros(T, d, dtype=torch.bfloat16), torch.zeros(plan.capacity, 2048, dtype=torch.bfloat16)
    with recorded_launches(GPUS[90]) as launches:
        backend.up_proj_wgrad_bias_grad(x, dh, plan, False, torch.zeros(E, 2048, d))
    keys = [(launch.kernel, launch._key()) for launch in launches]
    adds = [at for at, launch in enumerate(launches) if launch.constants.get("ADDS")]
    assert len(adds) == ceil_div(d, SLICE)
    assert set(keys[adds[0] :]) <= set(keys[: adds[0] + 1])


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_that_cross_between_processes(dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    """16 bytes at a time of what the layer has, words of what crosses, whose lines begin at multiples of 4 bytes."""
    with recorded_launches(GPUS[capability]) as launches:
        pack_rows(torch.zeros(T, D, dtype=dtype))
        unpack_rows(torch.zeros(T, words_of_row(D), dtype=torch.int32), dtype)
    names = [launch.kernel.fn.__name__ for launch in launches]
    assert names == ["quantize_rows_kernel", "dequantize_rows_kernel"]
    (_, packs), (_, unpacks) = compile_launches(launches, capability)
    for compiled, wide in ((packs, "ld"), (unpacks, "st")):
        assert stack_bytes(compiled, tmp_path) == 0
        assert re.search(rf"{wide}\.global\.v4\.b32", compiled.asm["ptx"])
        assert not re.search(r"(ld|st)\.global\S*\.b(8|16)\s", compiled.asm["ptx"])


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("width", [1536, 7168, 28672])
def test_whole_rows_are_held_in_registers(width: int, capability: int, tmp_path: Path) -> None:
    with recorded_launches(GPUS[capability]) as launches:
        quantized_rows(torch.zeros(T, width, dtype=torch.bfloat16))
    ((_, compiled),) = compile_launches(launches, capability)
    assert stack_bytes(compiled, tmp_path) == 0
    assert re.search(r"ld\.global\.v4\.b32", compiled.asm["ptx"])
