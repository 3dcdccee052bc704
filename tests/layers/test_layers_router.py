"""Which product gives the router's logits. Their values are tested with the layer."""

import pytest
import torch

from tilemoe.layers.router import has_exact_products

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("hip", "adds_in_fp16", "exact"), [(None, False, {BF16, FP16}), (None, True, {BF16}), ("6.4", False, set())]
)
def test_products_of_halves_are_taken_where_pytorch_has_them(
    hip: str | None, adds_in_fp16: bool, exact: set[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 that is added in fp16 is widened first; AMD has no such product."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch._C, "_get_cublas_allow_fp16_accumulation", lambda: adds_in_fp16)
    for dtype in (BF16, FP16, torch.float32):
        assert has_exact_products(torch.device("cuda:0"), dtype) == (dtype in exact)
        assert not has_exact_products(torch.device("cpu"), dtype)
