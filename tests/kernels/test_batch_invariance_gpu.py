"""On a GPU the experts give a token, its routing given, the same bits whatever the other tokens of its batch are."""

import pytest
import torch
from invariance_checks import Sizes, assert_tokens_keep_their_bits, make_batch

from tilemoe.kernels.experts.registry import backend_named

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
    sizes = SIZES[name]
    why = backend_named(kernels).why_unsupported(
        torch.device("cuda"), dtype, (sizes.hidden_size, sizes.intermediate_size)
    )
    if why is not None:
        pytest.skip(why)
    assert_tokens_keep_their_bits(make_batch(sizes, dtype, "cuda"), kernels)
