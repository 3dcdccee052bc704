"""Which kernels prepare what is sent between ranks, and why.

T tokens · P pairs · E experts · W ranks
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from tilemoe.kernels.torch import exchange as torch_exchange


class ExchangeKernels(NamedTuple):
    """As `tilemoe.kernels.torch.exchange` documents them; ``reason``: why these."""

    name: str
    count_sent: Callable[..., Any]
    place_sent: Callable[..., Any]
    plan_received: Callable[..., Any]
    reason: str


def select_exchange(device_type: str, num_tokens: int, num_pairs: int, num_experts: int, ranks: int) -> ExchangeKernels:
    """For T tokens and P pairs on a device of this type ("cpu", "cuda", ...), sent or received."""
    if device_type != "cuda":
        return _of("torch", torch_exchange, f"Triton does not run on {device_type}")
    if find_spec("triton") is None:
        return _of("torch", torch_exchange, "Triton is not installed")
    from tilemoe.kernels.triton import exchange as triton_exchange  # imported only where there is a GPU for it

    problem = triton_exchange.unsupported(num_tokens, num_pairs, num_experts, ranks)
    if problem is not None:
        return _of("torch", torch_exchange, problem)
    return _of("triton", triton_exchange, "counting sorts, a few kernels each")


def _of(name: str, module: Any, reason: str) -> ExchangeKernels:
    return ExchangeKernels(name, module.count_sent, module.place_sent, module.plan_received, reason)
