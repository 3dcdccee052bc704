"""Which product gives the router's logits. Their values are tested with the layer."""

import pytest
import torch

from tilemoe.layers.router import has_exact_products

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
BF16, FP16 = torch.bfloat16, torch.float16


def test_products_of_halves_are_taken_where_pytorch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_exact_products(GPU, BF16)
    assert has_exact_products(GPU, FP16)
    assert not has_exact_products(GPU, torch.float32)
    assert not has_exact_products(CPU, BF16)


def test_where_fp16_is_added_in_fp16_it_is_widened_first() -> None:
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert not has_exact_products(GPU, FP16)
        assert has_exact_products(GPU, BF16)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


def test_amd_has_no_such_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not has_exact_products(GPU, BF16)
    assert not has_exact_products(GPU, FP16)
