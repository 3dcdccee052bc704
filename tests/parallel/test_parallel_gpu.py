"""On four GPUs, through NCCL, what `parallel_checks` checks on the host."""

from __future__ import annotations

import pytest
from parallel_checks import CHECKS, RANKS

from tilemoe.testing.ranks import run_on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
ALL_CHECKS = CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(ALL_CHECKS, RANKS, tmp_path_factory.mktemp("gpu_ranks"), "cuda")


@pytest.mark.parametrize("name", [check.__name__ for check in ALL_CHECKS])
def test_decoder_on_four_gpus(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
