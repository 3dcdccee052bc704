"""Whether top-K selection runs as one kernel or as PyTorch's own operators, and why.

E experts · K experts per token
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from tilemoe.tracing import constant_when_traced


class RouterChoice(NamedTuple):
    """``fused``: `tilemoe.kernels.triton.router` serves. ``reason``: why it does or does not."""

    fused: bool
    reason: str


@constant_when_traced
def select_router(device: torch.device, dtype: torch.dtype, num_experts: int, experts_per_token: int) -> RouterChoice:
    """The way of routing for logits of this device and dtype, fp32 or fp64 (narrower ones are widened before)."""
    return _select_router(device, dtype, num_experts, experts_per_token)


@cache  # asked for by every forward, and the answer takes a look at the GPU
def _select_router(device: torch.device, dtype: torch.dtype, num_experts: int, experts_per_token: int) -> RouterChoice:
    if device.type != "cuda":
        return RouterChoice(False, f"Triton does not run on {device.type}")
    if find_spec("triton") is None:
        return RouterChoice(False, "Triton is not installed")
    if dtype != torch.float32:
        return RouterChoice(False, f"no Triton kernel computes in {dtype}")
    if torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 0):
        return RouterChoice(False, "the Triton kernels need compute capability 8.0")
    from tilemoe.kernels.triton.router import unsupported  # imported only where there is a GPU for it

    problem = unsupported(num_experts, experts_per_token)
    if problem is not None:
        return RouterChoice(False, problem)
    return RouterChoice(True, "selection, scores and the losses' sums in one kernel that reads each logit once")
