"""Four processes that share a layer's experts compute what one process does, and send no more than they must."""

from __future__ import annotations

from pathlib import Path

import pytest
from dispatch_checks import CHECKS

from tilemoe.testing.ranks import run_on_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(CHECKS, 4, folder)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
