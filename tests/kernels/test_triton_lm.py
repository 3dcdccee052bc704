"""The loss of logits and the rotation, one kernel each, compiled for GPUs that are not here."""

from pathlib import Path

import pytest
import torch
from triton_compile import CAPABILITIES, GFX942, NVIDIA, compile_launch, recorded_launches, stack_bytes

from tilemoe.kernels.lm.triton_cross_entropy import cross_entropy_
from tilemoe.kernels.lm.triton_rotary import rotate
from tilemoe.layers.attention import rotary_angles
from tilemoe.runtime.launch import Launch


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [100352, 50257, 48])
def test_cross_entropy(classes: int, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    compiled = compile_launch(cross_entropy(classes, dtype), capability)
    assert stack_bytes(compiled, tmp_path) == 0
    if classes == 100352:  # rows of an odd length begin anywhere
        assert compiled.asm["ptx"].count("ld.global.v4.b32") >= 8
        assert compiled.asm["ptx"].count("st.global.v4.b32") >= 8


def cross_entropy(classes: int, dtype: torch.dtype) -> Launch:
    labels = torch.zeros(3, dtype=torch.int64)
    with recorded_launches(NVIDIA[90]) as launches:
        cross_entropy_(torch.zeros(3, classes, dtype=dtype), labels, -100)
    return launches[0]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(12, 128), (4, 64), (5, 80)])
def test_rotation(heads: int, width: int, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    compiled = compile_launch(rotation(heads, width, dtype), capability)
    assert stack_bytes(compiled, tmp_path) == 0
    if width == 128:  # narrower ones leave a thread less than 16 bytes
        assert compiled.asm["ptx"].count("st.global.v4.b32") >= 2


def rotation(heads: int, width: int, dtype: torch.dtype, back: bool = True) -> Launch:
    x = torch.zeros(2, 16, heads, width, dtype=dtype)
    with recorded_launches(NVIDIA[90]) as launches:
        rotate(x, *rotary_angles(torch.arange(16), width, 1e4), dtype, back=back)
    return launches[0]


@pytest.mark.parametrize(
    "launch", [cross_entropy(100352, torch.bfloat16), rotation(12, 128, torch.bfloat16, back=False)]
)
def test_amd(launch: Launch) -> None:
    assert "amdgcn" in compile_launch(launch, GFX942).asm
