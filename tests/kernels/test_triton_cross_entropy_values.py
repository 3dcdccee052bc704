"""The loss of logits in one kernel, on a GPU and in Triton's interpreter.

C tokens of a chunk · d model width · V vocabulary
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_checks import DEVICE, DTYPES, INTERPRETED

from tilemoe.kernels.lm import triton_cross_entropy as cross_entropy
from tilemoe.kernels.lm.triton_cross_entropy import cross_entropy_
from tilemoe.models import loss as head
from tilemoe.models.loss import IGNORED, chunked_cross_entropy
from tilemoe.testing import assert_equal, relative_error

pytestmark = [pytest.mark.process("interpreter"), pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

LIMIT = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def exact(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of each token and its gradient in the logits, in fp64."""
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


def made(tokens: int, classes: int, dtype: torch.dtype, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(classes)
    logits = (spread * torch.randn(tokens, classes, device=DEVICE)).to(dtype)
    labels = torch.randint(0, classes, (tokens,), device=DEVICE)
    labels[2::5] = IGNORED
    return logits, labels


def assert_exact(logits: Tensor, labels: Tensor) -> None:
    losses, gradient = exact(logits, labels)
    got = cross_entropy_(logits, labels, IGNORED)
    torch.testing.assert_close(got.double(), losses, rtol=2e-6, atol=2e-6)
    assert not logits[labels == IGNORED].any()
    assert (logits - gradient).norm() <= LIMIT[logits.dtype] * gradient.norm()  # of one class alone it is 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 31, 256, 8192, 8193, 20001])
def test_as_pytorch_in_fp64(classes: int, dtype: torch.dtype) -> None:
    assert_exact(*made(7, classes, dtype))
    assert_exact(*made(0, classes, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_blocks_pass_the_greatest_logit_on(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_BLOCK", 16)
    logits, labels = made(6, 100, dtype, spread=20.0)
    logits[0], logits[1] = torch.arange(100).to(dtype), -torch.arange(100).to(dtype)
    assert_exact(logits, labels)


def test_logits_of_minus_infinity_are_classes_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_BLOCK", 16)
    logits, labels = made(4, 64, torch.float32)
    logits[:, :32] = float("-inf")
    labels[:2] = torch.tensor([40, 63], device=DEVICE)
    labels[3] = 50
    assert_exact(logits, labels)


def test_what_has_no_loss_is_nan() -> None:
    logits, labels = made(5, 20, torch.float32)
    labels[:] = torch.tensor([-1, 20, 3, 4, 5], device=DEVICE)
    logits[2], logits[3, 7] = float("-inf"), float("inf")
    found = cross_entropy_(logits, labels, IGNORED).tolist()
    assert all(map(math.isnan, found[:4]))
    assert math.isfinite(found[4])


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(50, 16, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(72, 16, device=DEVICE).to(dtype).requires_grad_()
    labels = torch.randint(0, 72, (50,), device=DEVICE)
    labels[::7] = IGNORED
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 17 * 72, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_heads_loss_takes_it(dtype: torch.dtype, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = inputs(dtype)
    if INTERPRETED:
        monkeypatch.setattr(head, "_is_one_kernel", lambda *_: True)
    assert head._is_one_kernel(hidden, dtype)
    loss = chunked_cross_entropy(hidden, weight, labels, max_chunk_logits=chunk)
    grads = torch.autograd.grad(loss, (hidden, weight))
    h, w = (each.detach().double().requires_grad_() for each in (hidden, weight))
    wanted = F.cross_entropy(h @ w.T, labels)
    limit = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    assert loss.dtype == torch.float32
    assert relative_error(loss.detach(), wanted.detach()) < limit
    for got, gradient in zip(grads, torch.autograd.grad(wanted, (h, w)), strict=True):
        assert got.dtype == dtype
        assert relative_error(got, gradient) < limit
    assert not grads[0][::7].any()


def test_the_heads_loss_repeats_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(head, "_is_one_kernel", lambda *_: True)
    hidden, weight, labels = inputs(DTYPES[-1])
    found = []
    for _ in range(3):
        loss = chunked_cross_entropy(hidden, weight, labels, max_chunk_logits=9 * 72)
        found.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    for again in found[1:]:
        assert_equal(again, found[0])
