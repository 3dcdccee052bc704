"""Root-mean-square normalisation (arXiv 1910.07467).

d model width, or the width of one attention head
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32 (fp64 for fp64 inputs).

    x (..., d) -> (..., d) in the wider of x's and the weight's dtype: fp32 weights and bf16 activations, as under
    autocast, give fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        # Cast both to one dtype: PyTorch's fused kernel serves only that case.
        dtype = torch.promote_types(x.dtype, self.weight.dtype)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)
