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
    """Turns on `torch.use_deterministic_algorithms` inside the block; afterwards the earlier settings are restored.

    warn_only: an operator without a deterministic algorithm warns instead of raising PyTorch's RuntimeError.
    fill_memory: ``torch.empty`` and similar functions fill tensors with NaN, or the largest integer.
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
    """GPU computations inside the block give the same bits in each run, including code that torch.compile generates.

    An operator without a deterministic algorithm raises PyTorch's RuntimeError, which names the operator.
    """
    from torch._inductor import config as inductor  # here, because it takes a second to import

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before its first product
    with deterministic_algorithms(warn_only=False, fill_memory=False), inductor.patch(deterministic=True):
        yield
