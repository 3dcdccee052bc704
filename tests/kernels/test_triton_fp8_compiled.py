"""The kernels that make FP8 operands, compiled for GPUs that are not here: 16-byte loads and stores, no spill."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton_compile import KB, NVIDIA, compile_launches, recorded_launches, stack_bytes

from tilemoe.kernels.experts.formats.fp8 import words_of_row
from tilemoe.kernels.experts.registry import backend_named
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.kernels.experts.triton.quantize import block_weight, pack_rows, quantized_rows, row_weight, unpack_rows
from tilemoe.kernels.experts.triton.transpose import SLICE, wgrad_operands
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import ceil_div

GPUS = {89: Device(89, 99 * KB, 142), **{capability: NVIDIA[capability] for capability in (90, 100, 120)}}
T, D, N, E = 256, 1024, 512, 4


@pytest.mark.parametrize("capability", GPUS)
def test_compiled(capability: int, tmp_path: Path) -> None:
    """What is kept in e4m3 and what GEMMs read: rows, weights and transposed operands."""
    plan, x, weight = plan_topk(torch.arange(2 * T).view(T, 2) % E, E), *(made(*shape) for shape in ((T, D), (E, D, N)))
    kernels, h = TritonBackend(), made(plan.capacity, 2 * N)
    with recorded_launches(GPUS[capability]) as launches:
        kernels.dequantize_h(kernels.quantize_h(h))
        for contracted in (1, 2):
            row_weight(weight, contracted)
        block_weight(weight)
        list(wgrad_operands(x, h, plan))
    of_fp8 = [launch for launch in launches if launch.kernel.fn.__module__.endswith((".quantize", ".transpose"))]
    quantizing = {"quantize_rows_kernel", "quantize_blocks_kernel", "quantize_weight_rows_kernel"}
    transposing = {"largest_of_tiles_kernel", "quantize_transposed_kernel", "gather_transposed_kernel"}
    assert {launch.kernel.fn.__name__ for launch in of_fp8} == quantizing | transposing | {"dequantize_rows_kernel"}
    for launch, compiled in compile_launches(of_fp8, capability):
        name, ptx = launch.kernel.fn.__name__, compiled.asm["ptx"]
        assert stack_bytes(compiled, tmp_path) == 0, name
        assert compiled.metadata.shared <= GPUS[capability].shared_bytes, name
        assert re.search(r"ld\.global\.v4\.b32", ptx), name
        assert name == "largest_of_tiles_kernel" or re.search(r"st\.global\.v4\.b32", ptx), name


def made(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("d", [2176, 2304, 3072, 7168])
def test_nothing_has_to_be_compiled_once_a_slice_was_added(d: int) -> None:
    """Else an operator's first call would add the slice twice: it launches until it lacks a binary, then runs again."""
    plan = plan_topk(torch.arange(2 * T).view(T, 2) % E, E)
    x, dh = torch.zeros(T, d, dtype=torch.bfloat16), torch.zeros(plan.capacity, 2048, dtype=torch.bfloat16)
    with recorded_launches(GPUS[90]) as launches:
        backend_named("hopper_fp8").up_proj_wgrad_bias_grad(x, dh, plan, False, torch.zeros(E, 2048, d))
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
