"""Memory whose content nobody may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` and its relatives return with NaN, and with the largest value for integers.

    So a row that was never written, once it is read, shows. PyTorch does this in its deterministic mode, which is on
    inside the block, without refusing operators that have no deterministic form.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module whose attributes are properties: opaque to type checkers
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill
