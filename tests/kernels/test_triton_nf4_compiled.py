"""The GEMM with a weight in NF4 compiled for GPUs that are not here: matrix units, wide loads, registers, memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton_compile import (
    CAPABILITIES,
    GFX942,
    MATRIX_UNIT,
    MI300,
    NVIDIA,
    bytes_of_copies,
    compile_launches,
    recorded_launches,
    stack_bytes,
)

from tilemoe.activations import activation_spec
from tilemoe.kernels.experts.formats.nf4 import quantize_nf4
from tilemoe.kernels.experts.triton.backend import TritonBackend
from tilemoe.routing.build import plan_topk
from tilemoe.runtime.device import Device
from tilemoe.runtime.launch import Launch

NO_SPILL = 16  # bytes of a thread's stack: two registers, stored once
T, D, N, E = 64, 2048, 1024, 2


def launches(device: Device, dtype: torch.dtype) -> list[Launch]:
    """up_proj and down_proj_dgrad, gathered, and down_proj and up_proj_dgrad: each once with blocks along the
    contraction and once along the output."""
    plan, spec = plan_topk(torch.arange(2 * T).view(T, 2) % E, E), activation_spec("relu", "concatenated", None, None)
    w2 = quantize_nf4(torch.zeros(E, D, N))
    x, a = torch.zeros(T, D, dtype=dtype), torch.zeros(2 * T, N, dtype=dtype)
    kernels = TritonBackend()
    with recorded_launches(device) as found:
        kernels.up_proj(x, w2.transpose(1, 2), None, plan, spec)
        kernels.down_proj(a, w2, torch.zeros(E, D, dtype=dtype), plan)
        kernels.up_proj(a[:T], w2, None, plan, spec)
        kernels.up_proj_dgrad(torch.zeros(2 * T, D, dtype=dtype), w2, plan)
    return [launch for launch in found if "nf4" in launch.kernel.fn.__name__]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.thorough) for each in (torch.float16, torch.float32))],
    ids=str,
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled(capability: int, dtype: torch.dtype, tmp_path: Path) -> None:
    found = compile_launches(launches(NVIDIA[capability], dtype), capability)
    assert len(found) == 4
    for launch, compiled in found:
        ptx, how = compiled.asm["ptx"], launch.constants
        assert stack_bytes(compiled, tmp_path) <= NO_SPILL, how
        ctas = 1 if launch.max_registers is None else 2
        assert ctas * compiled.metadata.shared <= NVIDIA[capability].shared_bytes, how
        assert bytes_of_copies(ptx) <= {4, 16}, "scales, an element at a time, and all else by 16 bytes"
        assert not re.search(r"ld\.global\S*\.b(8|16)\s", ptx), "an element at a time"
        if dtype != torch.float32:
            assert re.search(MATRIX_UNIT[capability], ptx), how


def test_two_ctas_share_a_hopper() -> None:
    assert [launch.max_registers for launch in launches(NVIDIA[90], torch.bfloat16)] == [128] * 4
    assert {launch.max_registers for launch in launches(NVIDIA[80], torch.bfloat16)} == {None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_for_amd(dtype: torch.dtype) -> None:
    for _, compiled in compile_launches(launches(MI300, dtype), GFX942):
        assert compiled.metadata.shared <= MI300.shared_bytes
        for what in ("private_segment_fixed_size", "vgpr_spill_count"):
            assert re.findall(rf"\.{what}: +(\d+)", compiled.asm["amdgcn"]) == ["0"], what
