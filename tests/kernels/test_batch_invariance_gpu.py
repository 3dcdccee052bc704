"""On a GPU the experts give a token, its routing given, the same bits whatever the other tokens of its batch are."""

from functools import partial

import pytest
import torch
from invariance_checks import Batch, Sizes, assert_tokens_keep_their_bits, make_batch, results, results_in_4_bit

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
    if kernels == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")
    assert_tokens_keep_their_bits(make_batch(SIZES[name], dtype, "cuda"), partial(results, kernels=kernels))


def batch_for(kernels: str, name: str) -> Batch:
    """In bf16; skips the test on a GPU that these kernels do not serve."""
    batch = make_batch(SIZES[name], torch.bfloat16, "cuda")
    if why := backend_named(kernels).why_unsupported(batch.x.device, batch.x.dtype):
        pytest.skip(why)
    return batch


@pytest.mark.parametrize("name", ["many rows", "fine experts"])
def test_experts_in_fp8_of_any_batch(name: str) -> None:
    """Scales are of a token's own row."""
    assert_tokens_keep_their_bits(batch_for("hopper_fp8", name), partial(results, kernels="hopper_fp8"))


@pytest.mark.parametrize("kernels", ["triton", "hopper"])
def test_experts_in_4_bit_of_any_batch(kernels: str) -> None:
    batch = batch_for(kernels, "many rows")
    assert_tokens_keep_their_bits(batch, partial(results_in_4_bit, kernels=kernels))
