"""The rotation in one kernel compiled for GPUs that are not here."""

from pathlib import Path

import pytest
import torch
from triton_compile import GFX942, NVIDIA, compile_launch, stack_bytes

from tilemoe.kernels.lm.triton_rotary import rotate_launch
from tilemoe.layers.attention import rotary_angles


@pytest.mark.parametrize("capability", NVIDIA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "width"), [(12, 128), (4, 64), (5, 80)])
def test_compiles_in_wide_accesses(heads: int, width: int, dtype: torch.dtype, capability: int, tmp_path: Path) -> None:
    x = torch.zeros(2, 16, heads, width, dtype=dtype)
    launch = rotate_launch(torch.empty_like(x), x, *rotary_angles(0, 16, width, 1e4, x.device), back=True)
    compiled = compile_launch(launch, capability)
    assert stack_bytes(compiled, tmp_path) == 0
    if width == 128:  # narrower ones leave a thread less than 16 bytes
        assert compiled.asm["ptx"].count("st.global.v4.b32") >= 2


def test_compiles_for_amd() -> None:
    x = torch.zeros(2, 16, 12, 128, dtype=torch.bfloat16)
    launch = rotate_launch(torch.empty_like(x), x, *rotary_angles(0, 16, 128, 1e4, x.device), back=False)
    assert "amdgcn" in compile_launch(launch, GFX942).asm
