"""Documents packed into sequences: each is computed as if it were alone, whatever stands beside it.

B sequences · S tokens · H query heads · H_kv key and value heads · D head width
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import raises_one_line, tiny_model
from torch import Tensor
from torch.nn.attention import varlen

import tilemoe.kernels.lm.documents as documents_module
from tilemoe.kernels.choose import choose_document_attention
from tilemoe.kernels.lm.documents import Documents, masked_attention, varlen_attention
from tilemoe.layers.attention import KVCache
from tilemoe.models.decoder import DecoderLM

NAMED = {"enable_gqa": True} if "enable_gqa" in signature(varlen.varlen_attn).parameters else {}  # not by 2.11
LENGTHS = ((3, 1, 8), (12,), (5, 7))  # of the documents of each sequence


def packed(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Documents:
    return Documents.of(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]))


def places(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Iterator[tuple[int, slice]]:
    """(sequence, its tokens) of each document."""
    for row, counts in enumerate(lengths):
        first = 0
        for count in counts:
            yield row, slice(first, first + count)
            first += count


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 12, heads, 8, generator=generator, dtype=dtype).requires_grad_() for heads in (4, 2, 2)]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one document (S, heads, D)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every document by itself."""
    out = torch.empty_like(q)
    for at in places():
        out[at] = causal(q[at], k[at], v[at])
    return out


def by_pytorch(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, bounds_k: Tensor, *most: int, **options: Any) -> Tensor:
    """What its variable-length attention is documented to compute, on any device."""
    assert options == {"window_size": (-1, 0), **NAMED}
    assert bounds.dtype == bounds_k.dtype == torch.int32
    assert most == (12, 12)
    out = torch.empty_like(q)
    for a, b in zip(bounds[:-1].tolist(), bounds_k[1:].tolist(), strict=True):
        out[a:b] = causal(q[a:b], k[a:b], v[a:b])
    return out


@pytest.mark.parametrize("attend", [masked_attention, varlen_attention])
def test_each_document_attends_to_itself(attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", by_pytorch)
    given, alone = inputs(), inputs()
    out, expected = attend(*given, packed()), one_by_one(*alone)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    d_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    out.backward(d_out)
    expected.backward(d_out)
    for x, y in zip(given, alone, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bit_of_a_document_depends_on_another(dtype: torch.dtype) -> None:
    given, other = inputs(dtype), inputs(dtype)
    with torch.no_grad():
        for x in other:
            x[0, 3:4] = torch.randn(x[0, 3:4].shape, generator=torch.Generator().manual_seed(2)) * 30
    out, changed = (masked_attention(q, k, v, packed()) for q, k, v in (given, other))
    assert not torch.equal(out[0, 3:4], changed[0, 3:4])
    for row, tokens in places():
        assert (row, tokens.start) == (0, 3) or torch.equal(out[row, tokens], changed[row, tokens])
    for y in (out, changed):
        y.sum().backward()
    for x, y in zip(given, other, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        for row, tokens in places():
            assert (row, tokens.start) == (0, 3) or torch.equal(x.grad[row, tokens], y.grad[row, tokens])


@pytest.mark.parametrize("version", ["2.11", "2.12"])
def test_pytorch_is_told_of_grouped_heads_where_it_has_a_word_for_it(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signatures of `varlen_attn` in 2.11 and in 2.12."""

    def without(q: Tensor, *given: Any, window_size: tuple[int, int]) -> Tensor:
        return q

    def having(q: Tensor, *given: Any, window_size: tuple[int, int], enable_gqa: bool = False) -> Tensor:
        assert enable_gqa
        return q

    monkeypatch.setattr(varlen, "varlen_attn", without if version == "2.11" else having)
    monkeypatch.setattr(documents_module, "_NAMES_GROUPS", version != "2.11")
    q, k, v = inputs()
    assert torch.equal(varlen_attention(q, k, v, packed()), q)


def test_which_attention_is_chosen() -> None:
    cases = [
        ("cpu", torch.bfloat16, 64, "masked"),
        ("cuda", torch.float32, 64, "masked"),
        ("cuda", torch.bfloat16, 64, "varlen"),
        ("cuda", torch.bfloat16, 12, "masked"),
        ("cuda", torch.bfloat16, 264, "masked"),
    ]
    for device, dtype, width, name in cases:
        chosen = choose_document_attention(torch.device(device), dtype, width)
        assert chosen.name == name
        assert chosen.impl is {"masked": masked_attention, "varlen": varlen_attention}[name]
        assert chosen.reason
        assert "\n" not in chosen.reason


@pytest.mark.gpu
def test_variable_length_attention_on_a_gpu_is_the_masked_one() -> None:
    q, k, v = bf16 = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in inputs()]
    exact_q, exact_k, exact_v = exact = [x.detach().double().requires_grad_() for x in bf16]
    documents = Documents(*(tensor.cuda() for tensor in packed()))
    out = varlen_attention(q, k, v, documents)
    expected = masked_attention(exact_q, exact_k, exact_v, documents)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    out.sum().backward()
    expected.sum().backward()
    for x, y in zip(bf16, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "attention", "block"])
def test_a_packed_model_computes_each_document_alone(dense: bool, checkpointing: str) -> None:
    torch.manual_seed(0)
    config = tiny_model(**({"moe": None, "dense_layers": ()} if dense else {}))
    model = DecoderLM(config, dtype=torch.float64)
    model.set_checkpointing(checkpointing)
    ids, labels = torch.randint(0, 40, (2, 3, 12))
    labels[:, ::3] = -100
    out = model(ids, labels, documents=packed())
    (out.loss * (labels >= 0).sum()).backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    logits = model(ids, documents=packed()).logits
    total = torch.zeros((), dtype=torch.float64)
    for row, tokens in places():
        alone = model(ids[row, tokens][None]).logits[0]
        torch.testing.assert_close(logits[row, tokens], alone, rtol=1e-9, atol=1e-9)
        total = total + F.cross_entropy(alone, labels[row, tokens], reduction="sum")
    total.backward()
    torch.testing.assert_close(out.loss * (labels >= 0).sum(), total, rtol=1e-9, atol=1e-9)
    expected = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_what_documents_cannot_be() -> None:
    model = DecoderLM(tiny_model())
    ids = torch.zeros(3, 12, dtype=torch.int64)
    with raises_one_line(r"documents must have positions \(3, 12\) on cpu, got \(1, 4\) on cpu"):
        model(ids, documents=packed(((4,),)))
    with raises_one_line("documents and cache were both given"):
        model(ids, cache=KVCache(3, 24), documents=packed())
    for row in ([1, 2, 3], [0, 2, 3], [0, 1, 1], [0, -1, 0]):
        with raises_one_line("positions must begin with 0 in each sequence and rise by 1"):
            Documents.of(torch.tensor([[0, 1, 2], row]))
