"""PyTorch's deterministic algorithms, for a block of code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@contextmanager
def deterministic_algorithms(*, warn_only: bool, fill_memory: bool) -> Iterator[None]:
    """`torch.use_deterministic_algorithms` inside the block; what was set before holds again after it.

    warn_only: an operator that has no such algorithm warns instead of raising PyTorch's RuntimeError.
    fill_memory: what ``torch.empty`` and its relatives return is NaN, of integers the largest value.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module whose attributes are properties: opaque to type checkers
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    settings.fill_uninitialized_memory = fill_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=only_warned)
        settings.fill_uninitialized_memory = filled


@contextmanager
def repeatable() -> Iterator[None]:
    """What runs on a GPU inside the block gives the same bits each time, what torch.compile makes there, too.

    An operator that has no deterministic algorithm raises PyTorch's RuntimeError, which names it.
    """
    from torch._inductor import config as inductor  # here, because it takes a second to import

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before its first product
    with deterministic_algorithms(warn_only=False, fill_memory=False), inductor.patch(deterministic=True):
        yield
