"""Cross-entropy and its gradient in place: ``loss = logsumexp(l) - l[label]``, ``l <- softmax(l) - onehot(label)``.

C tokens of a chunk · V vocabulary

Memory-bound, one CTA per token: a first pass over the logits computes an online logsumexp, a second pass overwrites
them with the gradient. In all, the logits are read twice and written once.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import launch_of, power_of_two

_BLOCK = 8192  # 16-bit logits that a CTA holds at a time; half as many 32-bit ones
_LOWEST = tl.constexpr(-3.4028234e38)  # lowest finite fp32


def cross_entropy_(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """``-log softmax(logits)[label]`` of each token, (C,) fp32 in nats; ``logits`` are overwritten with its gradient.

    logits (C, V) in fp32, bf16 or fp16, contiguous; labels (C,) int64. A token with the label ``ignored`` has loss and
    gradient 0; a label outside [0, V) gives a loss of NaN. Computed in fp32; the gradient is rounded once.
    """
    device_of(logits)
    assert logits.is_contiguous(), "the kernel walks along a token's logits"
    assert labels.is_contiguous(), "the kernel indexes them by token"
    tokens, classes = logits.shape
    loss = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        block = min(_BLOCK * 2 // logits.element_size(), power_of_two(classes))
        num_warps = max(1, min(8, block // 256))
        constants = {"IGNORED": ignored, "BLOCK": block}
        launch_of(cross_entropy_kernel, (tokens,), (loss, logits, labels, classes), constants, num_warps).run()
    return loss


@triton.jit
def cross_entropy_kernel(loss, logits, labels, classes, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """One token per CTA. Online softmax: the greatest logit so far scales the sum of exponentials, in a single pass."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * classes
    label = tl.load(labels + token)
    col = tl.arange(0, BLOCK)
    if label == IGNORED:
        tl.store(loss + token, 0.0)
        for start in range(0, classes, BLOCK):
            zeros = tl.zeros([BLOCK], logits.dtype.element_ty)
            tl.store(row + start + col, zeros, mask=start + col < classes)
    else:
        # Read before the reductions: their barriers ensure that all warps have read it before any overwrites it.
        is_class = (label >= 0) & (label < classes)
        own = tl.load(row + label, mask=is_class, other=float("nan")).to(tl.float32)
        greatest = _LOWEST  # finite, since -inf minus -inf is NaN
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, classes, BLOCK):
            x = tl.load(row + start + col, mask=start + col < classes, other=float("-inf")).to(tl.float32)
            above = tl.maximum(greatest, tl.max(x, 0))
            sums = sums * tl.exp(greatest - above) + tl.exp(x - above)
            greatest = above
        total = tl.sum(sums, 0)
        tl.store(loss + token, greatest + tl.log(total) - own)
        for start in range(0, classes, BLOCK):
            inside = start + col < classes
            x = tl.load(row + start + col, mask=inside, other=float("-inf")).to(tl.float32)
            p = tl.exp(x - greatest) / total - (start + col == label).to(tl.float32)
            tl.store(row + start + col, p.to(logits.dtype.element_ty), mask=inside)
