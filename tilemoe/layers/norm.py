"""Root-mean-square normalisation (arXiv 1910.07467).

d model width, or the width of one attention head
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilemoe.runtime.tracing import autocast_dtype, without_autocast


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32 (fp64 for fp64 inputs).

    x (..., d) -> (..., d) in the wider of x's and the weight's dtype, or under autocast in its dtype if x has it, to
    which the weight is rounded then.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Cast both to one dtype: PyTorch's fused kernel serves only that case.
        cast = autocast_dtype(x.device.type)
        dtype = x.dtype if x.dtype == cast else torch.promote_types(x.dtype, self.weight.dtype)
        # From PyTorch 2.12 on autocast computes norms in fp32.
        with nullcontext() if cast is None else without_autocast(x.device.type):
            return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)
