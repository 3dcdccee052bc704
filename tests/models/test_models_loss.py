"""The chunked cross-entropy against PyTorch's, its memory, and its edges.

T tokens · d model width · V vocabulary
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import LargestTensor
from torch import Tensor

from tilemoe.models.loss import chunked_cross_entropy
from tilemoe.testing import assert_equal, relative_error

T, D, V = 50, 12, 31


def make(dtype: torch.dtype = torch.float32, tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (tokens,))
    labels[::7] = -100
    return hidden, weight, labels


def exact(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients by PyTorch in fp64."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, labels)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def assert_exact(loss: Tensor, operands: tuple[Tensor, ...], tolerance: float, of_gradients: float) -> Tensor:
    """Loss, both gradients and their dtypes are as they should be. Returns the gradient of the hidden states."""
    hidden, weight, labels = operands
    grads = torch.autograd.grad(loss, (hidden, weight))
    expected, *expected_grads = exact(hidden, weight, labels)
    assert loss.dtype == (torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    assert relative_error(loss.detach(), expected) < tolerance
    for got, wanted in zip(grads, expected_grads, strict=True):
        assert got.dtype == hidden.dtype
        assert relative_error(got, wanted) < of_gradients
    return grads[0]


@pytest.mark.parametrize("chunk", [1, V, 3 * V + 1, 17 * V, 10**6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
def test_loss_and_gradients(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    operands = make(dtype)
    loss = chunked_cross_entropy(*operands, max_chunk_logits=chunk)
    d_hidden = assert_exact(loss, operands, tolerance, tolerance)
    assert not d_hidden[::7].any()


@pytest.mark.parametrize("chunk", [5 * V, 10**6])
def test_under_autocast(chunk: int) -> None:
    operands = make()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(*operands, max_chunk_logits=chunk)
    assert_exact(loss, operands, 1e-2, 2e-2)


@pytest.mark.parametrize("divisor", [1, 3, 5, 7, 11])
def test_low_precision_gradients_are_not_scaled_off(divisor: int) -> None:
    hidden, weight, labels = make(torch.bfloat16, tokens=1000)
    loss = chunked_cross_entropy(hidden, weight, labels) / divisor
    (got,) = torch.autograd.grad(loss, weight)
    wanted = exact(hidden, weight, labels)[2] / divisor
    # Errors of the elements' own rounding cancel in the projection; a factor rounded to bf16 would not.
    projection = float((got.double() * wanted).sum() / wanted.square().sum())
    assert abs(projection - 1) < 5e-4


def test_a_sum_over_tokens_may_leave_the_range_of_fp16() -> None:
    tokens = 20_000
    hidden, weight = torch.full((tokens, 2), 8.0).half(), torch.zeros(4, 2).half().requires_grad_()
    labels = torch.zeros(tokens, dtype=torch.int64)
    chunked_cross_entropy(hidden, weight, labels, max_chunk_logits=4 * 5000).backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.tensor([[-6.0], [2.0], [2.0], [2.0]]).half().expand(4, 2))


@pytest.mark.parametrize("tokens", [0, 9])
def test_no_labels_at_all_is_zero(tokens: int) -> None:
    hidden, weight, _ = make(tokens=tokens)
    loss = chunked_cross_entropy(hidden, weight, torch.full((tokens,), -100))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_token_without_a_label_counts_for_nothing_whatever_it_holds() -> None:
    hidden, weight, labels = make()
    labels[2] = -100
    wanted = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels), (hidden, weight))
    with torch.no_grad():
        hidden[2] = float("nan")
    loss = chunked_cross_entropy(hidden, weight, labels)
    assert loss.isfinite()
    assert_equal(torch.autograd.grad(loss, (hidden, weight)), wanted)
    assert not wanted[0][2].any()


@pytest.mark.parametrize("label", [-1, -101, V])
def test_a_label_that_is_no_class_is_named(label: int) -> None:
    hidden, weight, labels = make()
    labels[3] = label
    with pytest.raises(ValueError, match=rf"labels\[3\] must be from 0 to {V - 1}, or -100, got {label}"):
        chunked_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs(frozen: str) -> None:
    hidden, weight, labels = make()
    _, *wanted = exact(hidden, weight, labels)
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = chunked_cross_entropy(hidden, weight, labels)
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    for tensor, gradient in zip((hidden, weight), wanted, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, gradient.float())
        else:
            assert tensor.grad is None


def test_never_holds_the_logits_of_all_tokens() -> None:
    hidden, weight, labels = make(tokens=640)
    with LargestTensor() as ours:
        chunked_cross_entropy(hidden, weight, labels, max_chunk_logits=64 * V).backward()
    assert ours.elements == max(64 * V, 640 * D)
    with LargestTensor() as theirs:
        F.cross_entropy(hidden @ weight.T, labels).backward()
    assert theirs.elements == 640 * V
