"""The key by which launches find what is compiled, against Triton's own."""

from itertools import combinations
from typing import Any

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.amd.compiler import HIPBackend
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilemoe.kernels.experts.triton.descriptors import aligned_rows as by_token
from tilemoe.runtime import launch


def arguments() -> list[Any]:
    """One of each kind; a kernel takes either Triton's descriptors or Gluon's, so those need not differ."""
    half = torch.zeros(64, 64, dtype=torch.float16)
    beyond_32_bits = torch.empty(2**31, dtype=torch.uint8)  # never touched: no memory is taken
    swizzled = [gl.NVMMASharedLayout(width, 16, 2) for width in (64, 128)]
    return [
        *(None, 1.0, 2.5, 0, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**31 + 1),
        *(half, half.bfloat16(), half[:, 1:], half.float(), half.flatten()[1:]),
        *(beyond_32_bits.view(torch.float16), beyond_32_bits[16:32].view(torch.float16), half.view(torch.uint8)),
        *(TensorDescriptor.from_tensor(half, [rows, 32]) for rows in (16, 64)),
        *(
            GluonDescriptor(half, [64, 64], [64, 1], [32, layout.swizzle_byte_width // 2], layout)
            for layout in swizzled
        ),
    ]


@pytest.mark.parametrize(("backend", "is_amd"), [(CUDABackend, False), (HIPBackend, True)])
def test_what_triton_compiles_apart_has_another_key(
    backend: Any, is_amd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_IS_AMD", is_amd)
    for one, other in combinations(arguments(), 2):
        same = launch._specialisation(one) == launch._specialisation(other)
        theirs = [native_specialize_impl(backend, each, False, True, True) for each in (one, other)]
        assert not same or theirs[0] == theirs[1], (one, other)


def test_a_size_that_varies_has_few_keys() -> None:
    assert len({launch._specialisation(size) for size in range(2, 1000)}) == 2


def test_a_gathered_operand_at_an_odd_address_is_copied() -> None:
    wide = torch.randn(40, 80).to(torch.bfloat16)
    as_they_are = [wide, wide[:, 8:72], wide[3:], wide[:, :8]]
    assert all(by_token(rows) is rows for rows in as_they_are)
    shifted = torch.empty(40 * 64 + 3, dtype=torch.bfloat16)[3:].view(40, 64)
    for rows in (wide[:, 3:67], shifted.copy_(wide[:, :64]), wide.t(), torch.randn(40, 84).bfloat16()[:, :64]):
        copy = by_token(rows)
        assert torch.equal(copy, rows)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
