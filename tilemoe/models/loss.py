"""Cross-entropy of a language model's head that never holds the logits of all tokens at once.

T tokens · C tokens of a chunk · d model width · V vocabulary

The head's output is by far the largest tensor of a training step. Here each chunk of tokens runs forward and backward
before the next: its logits give its loss and its share of both gradients, and are freed. On a GPU with Triton one
kernel overwrites the logits with their gradient (`tilemoe.kernels.lm.triton_cross_entropy`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilemoe.checks import require_int
from tilemoe.kernels.choose import choose_lm
from tilemoe.kernels.experts.formats.dense import FLOAT_DTYPES
from tilemoe.runtime.tensors import require_tensors
from tilemoe.runtime.tracing import autocast_dtype, can_be_read, without_autocast

IGNORED = -100
_CHUNK_BYTES = 1 << 29  # large enough for fast GEMMs, small compared with the rest of a training step


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, max_chunk_logits: int | None = None
) -> Tensor:
    """Mean over the labels that are not -100 of ``-log softmax(hidden weight^T)[label]``, in nats; 0 if there is none.

    hidden (T, d) and weight (V, d) of one float dtype, or of any under autocast, whose dtype the GEMMs then use; labels
    (T,) int64 in [0, V) or -100. Returns an fp32 scalar (fp64 for fp64 inputs), differentiable once in hidden and
    weight. No tensor has more than max(C V, T d, V d) elements, with C V <= ``max_chunk_logits`` (C at least 1); None:
    as many as fit in 512 MiB.

    Raises:
        ValueError: a shape is wrong, or (on CPU, outside torch.compile) a label is no class. On a GPU labels are not
            read back: a label below 0 other than -100 makes the loss NaN.
    """
    require_tensors({"hidden": hidden, "weight": weight, "labels": labels})
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or weight.shape[0] == 0:
        raise ValueError(
            f"hidden must be (T, d) and weight (V, d), V >= 1, got {tuple(hidden.shape)}, {tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels must be ({hidden.shape[0]},) to go with hidden, got {tuple(labels.shape)}")
    if max_chunk_logits is not None:
        require_int("max_chunk_logits", max_chunk_logits, 1)
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {tensor.dtype}")
    for name, tensor in (("weight", weight), ("labels", labels)):
        if tensor.device != hidden.device:
            raise ValueError(f"{name} is on {tensor.device} but hidden is on {hidden.device}; move them to one device")
    _check_labels(labels, weight.shape[0])
    loss, d_hidden, d_weight = _loss_and_gradients(hidden, weight, labels, max_chunk_logits)
    scale = (labels != IGNORED).sum().clamp(min=1).to(loss.dtype).reciprocal()
    return _MeanLoss.apply(hidden, weight, loss, scale, d_hidden, d_weight)


class _MeanLoss(torch.autograd.Function):
    """``loss * scale``; the gradients in hidden and weight are already computed, except for the scale.

    The scale is applied only here, because an fp16 logit's gradient times 1/T would underflow.
    """

    @staticmethod
    def forward(
        hidden: Tensor, weight: Tensor, loss: Tensor, scale: Tensor, d_hidden: Tensor | None, d_weight: Tensor | None
    ) -> Tensor:
        return loss * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, weight, _, scale, d_hidden, d_weight = inputs
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(scale, d_hidden, d_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        scale, d_hidden, d_weight = ctx.saved_tensors
        factor = d_loss * scale
        dx = None if d_hidden is None else _scaled(d_hidden, factor, d_hidden.dtype)
        dw = None if d_weight is None else _scaled(d_weight, factor, ctx.weight_dtype)
        return dx, dw, None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * factor``, in factor's dtype: a factor rounded to bf16 would be off by up to 0.4 % throughout."""
    return (gradient.to(factor.dtype) * factor).to(dtype)


def _check_labels(labels: Tensor, classes: int) -> None:
    """ValueError for a label that is no class; only on CPU and outside torch.compile, where reading costs nothing."""
    if not can_be_read(labels):
        return
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= classes)
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise ValueError(f"labels[{token}] must be from 0 to {classes - 1}, or -100, got {int(labels[token])}")


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, max_chunk_logits: int | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss () and its gradients in hidden and weight; None for one that is not needed."""
    want_hidden = torch.is_grad_enabled() and hidden.requires_grad
    want_weight = torch.is_grad_enabled() and weight.requires_grad
    cast = autocast_dtype(hidden.device.type)
    dtype = hidden.dtype if cast is None or hidden.dtype == torch.float64 else cast  # of the GEMMs
    accumulate = torch.promote_types(dtype, torch.float32)
    in_place = _is_one_kernel(hidden, dtype)
    chunk_loss_of = _chunk_loss_in_place if in_place else _chunk_loss
    most = max_chunk_logits or _CHUNK_BYTES // (dtype if in_place else accumulate).itemsize
    with torch.no_grad(), without_autocast(hidden.device.type):
        matrix = weight.detach().to(dtype)
        loss = torch.zeros((), dtype=accumulate, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight: Tensor | None = None
        parts = -(-hidden.shape[0] // max(1, most // weight.shape[0]))
        edges = [hidden.shape[0] * i // max(1, parts) for i in range(parts + 1)]  # chunks about equally long
        for start, stop in pairwise(edges):
            chunk = slice(start, stop)
            ignored = (labels[chunk] == IGNORED)[:, None]
            # Tokens without a label are masked in (C, d), not in the larger (C, V): zero rows add nothing to d_weight.
            part = hidden.detach()[chunk].to(dtype).masked_fill(ignored, 0.0)
            logits = part @ matrix.t()
            chunk_loss, d_logits = chunk_loss_of(logits, labels[chunk])
            loss += chunk_loss
            del logits
            d_logits = d_logits.to(dtype)
            if d_hidden is not None:
                d_hidden[chunk] = (d_logits @ matrix).masked_fill_(ignored, 0.0)
            if want_weight:
                d_weight = _sum_of_products(d_weight, d_logits.t(), part, accumulate)
        if want_weight:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight
            if weight.dtype != torch.float16:  # fp16 could overflow: the sum over many tokens is not scaled yet
                d_weight = d_weight.to(weight.dtype)
        return loss, d_hidden, d_weight


def _is_one_kernel(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Whether one Triton kernel overwrites logits in ``dtype`` with their gradient."""
    return dtype != torch.float64 and choose_lm(hidden).name == "triton"


def _chunk_loss_in_place(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed loss in fp32, its gradient in the memory of ``logits``); it is 0 for a token without a label."""
    from tilemoe.kernels.lm.triton_cross_entropy import cross_entropy_  # Triton is not on every machine

    return cross_entropy_(logits, labels.contiguous(), IGNORED).sum(), logits


def _chunk_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(summed loss, its gradient (C, V) in the logits), at least in fp32; one (C, V) buffer in all.

    A token without a label gets the gradient of label 0 instead of 0; the caller masks it.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    real = labels != IGNORED
    target = labels.clamp(min=0)[:, None]
    log_probs = torch.log_softmax(logits, dim=-1, dtype=dtype)
    of_target = torch.where(labels < 0, float("nan"), log_probs.gather(1, target)[:, 0])
    loss = -torch.where(real, of_target, 0.0).sum()
    d_logits = log_probs.exp_()
    d_logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=dtype))
    return loss, d_logits


def _sum_of_products(so_far: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``so_far + left @ right`` in ``dtype``, accumulated into ``so_far``; None: the first product."""
    is_nvidia = left.is_cuda and torch.version.hip is None  # its GEMM accumulates 16-bit products into an fp32 output
    if not is_nvidia or left.dtype == dtype or torch.compiler.is_compiling():
        product = (left @ right).to(dtype)
        return product if so_far is None else so_far.add_(product)
    if so_far is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(so_far, left, right, out_dtype=dtype, out=so_far)
