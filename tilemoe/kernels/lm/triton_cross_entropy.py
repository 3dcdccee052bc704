"""Cross-entropy of logits and its gradient, which takes their place: two reads and one write of the logits in all.

C tokens of a chunk · V vocabulary
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemoe.kernels.launching import launch_of
from tilemoe.runtime.device import device_of
from tilemoe.runtime.launch import power_of_two

_BLOCK = 8192  # logits that a program holds at once, in 16 bits; half as many in 32
_LOWEST = tl.constexpr(-3.4028234e38)  # of fp32


def cross_entropy_(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """``-log softmax(logits)[label]`` of each token, (C,) fp32 in nats; ``logits`` become its gradient.

    logits (C, V) in fp32, bf16 or fp16, contiguous; labels (C,) int64. A token whose label is ``ignored`` has loss and
    gradient 0, one whose label is no class has loss NaN. Computed in fp32, the gradient rounded once.
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
    """One token. The greatest logit so far scales the sum of exponentials, so that each logit is raised once."""
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
        # Read before the reductions, whose barriers keep other warps from overwriting it until it is here.
        is_class = (label >= 0) & (label < classes)
        own = tl.load(row + label, mask=is_class, other=float("nan")).to(tl.float32)
        greatest = _LOWEST  # finite: of -inf minus -inf nothing would be left but NaN
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
