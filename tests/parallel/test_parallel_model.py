"""A decoder that four processes share gives the loss and the gradients of one process."""

from typing import Any

import pytest
from parallel_checks import CHECKS

from tilemoe.testing.ranks import run_on_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected(CHECKS), 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_decoder_on_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
