"""On a GPU the experts give a token, its routing given, the same bits whatever the other tokens of its batch are."""

import pytest
import torch
from invariance_checks import Sizes, assert_tokens_keep_their_bits, make_batch

pytestmark = pytest.mark.gpu

SIZES = {
    "many rows": Sizes(3000, 256, 128, 8, 2),
    "fine experts": Sizes(1000, 768, 256, 64, 8),
    "ragged widths": Sizes(700, 328, 136, 5, 2),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", ["triton", "hopper"])
def test_experts_of_any_batch(kernels: str, dtype: torch.dtype, name: str) -> None:
    if kernels == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    assert_tokens_keep_their_bits(make_batch(SIZES[name], dtype, "cuda"), kernels)
