"""Experts divided over four processes, or GPUs, in anybody's module give the loss and the gradients of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expert_checks import CHECKS, RUN

from tilemoe.testing.ranks import run_on_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Which the processes share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN, str(tmp_path_factory.mktemp("shared")))
        yield


@pytest.fixture(scope="module")
def results(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected(CHECKS), 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@pytest.fixture(scope="module")
def gpu_results(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    return run_on_ranks(selected(CHECKS), ranks, tmp_path_factory.mktemp("gpu_ranks"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_on_gpus(name: str, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
