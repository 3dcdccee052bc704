"""The loss of logits in one kernel compiled for GPUs that are not here."""

from pathlib import Path

import pytest
import torch
from triton_compile import GFX942, NVIDIA, compile_launch, stack_bytes

from tilemoe.kernels.lm.triton_cross_entropy import cross_entropy_launch
from tilemoe.runtime.launch import Launch


def launch(classes: int, dtype: torch.dtype) -> Launch:
    labels = torch.zeros(3, dtype=torch.int64)
    return cross_entropy_launch(torch.empty(3), torch.zeros(3, classes, dtype=dtype), labels, -100)


@pytest.mark.parametrize("capability", NVIDIA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [100352, 50257, 48])
def test_compiles_in_wide_accesses(classes: int, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    compiled = compile_launch(launch(classes, dtype), capability)
    assert stack_bytes(compiled, tmp_path) == 0
    if classes == 100352:  # rows of an odd length begin anywhere
        assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 8
        assert compiled.asm["ptx"].count("st.global.v4.b32") >= 8


def test_compiles_for_amd() -> None:
    assert "amdgcn" in compile_launch(launch(100352, torch.bfloat16), GFX942).asm
