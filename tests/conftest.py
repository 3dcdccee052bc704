"""Fixtures of every test directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilemoe.testing import poisoned_memory as poisoned_memory_block


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN (integers: the largest value) while the test runs."""
    with poisoned_memory_block():
        yield
