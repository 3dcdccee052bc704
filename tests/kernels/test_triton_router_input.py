"""The router's share of dx without a GPU: compiled for three GPUs, and where no kernel serves.

T tokens · d hidden_size · E experts
"""

from pathlib import Path

import pytest
import torch
from triton_compile import CAPABILITIES, NVIDIA, compile_launch, count_spill_loads, recorded_launches

from tilemoe.kernels.router.triton_input_grad import input_grad, why_unsupported
from tilemoe.ops import router as ops


@pytest.mark.parametrize("capability", CAPABILITIES[1:])
@pytest.mark.parametrize("experts", [8, 128, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_compiles_without_spills(dtype: torch.dtype, experts: int, capability: int, tmp_path: Path) -> None:
    d_logits, weight, dx = (torch.zeros(shape, dtype=dtype) for shape in ((64, experts), (experts, 128), (64, 128)))
    with recorded_launches(NVIDIA[capability]) as launches:
        input_grad(d_logits, weight, dx)
    compiled = compile_launch(launches[0], capability)
    assert count_spill_loads(compiled, tmp_path) == 0
    ptx = compiled.asm["ptx"]
    assert {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(capability, "mma.sync") in ptx
    assert "ld.global" not in ptx, "operands come by TMA"
    assert compiled.metadata.shared <= 99 * 1024, "what every GPU has; on Hopper two programs share a multiprocessor"


def test_elsewhere_it_is_a_product_and_a_sum() -> None:
    d_logits, weight, dx = torch.randn(5, 4), torch.randn(4, 3), torch.randn(5, 3)
    with pytest.raises(ValueError, match="need a GPU"):
        why_unsupported(d_logits, weight, dx)
    torch.testing.assert_close(ops.input_grad(d_logits, weight, dx), dx + d_logits @ weight)


def test_it_is_differentiable_once() -> None:
    dx = torch.randn(5, 3, requires_grad=True)
    out = ops.input_grad(torch.randn(5, 4), torch.randn(4, 3), dx)
    with pytest.raises(RuntimeError, match=r"tilemoe\.MoE in 16 bits .* differentiable once.*tilemoe\.reference"):
        out.sum().backward()


def test_the_operator_is_what_it_says() -> None:
    torch.library.opcheck(ops.input_grad.registered, (torch.randn(5, 4), torch.randn(4, 3), torch.randn(5, 3)))
