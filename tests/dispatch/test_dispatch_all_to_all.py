"""Four processes that share a layer's experts compute what one does, and send no more than they must; also on GPUs."""

from typing import Any

import pytest
import torch
from dispatch_checks import CHECKS, GPU_CHECKS
from ranks import run_on_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


ALL_CHECKS = [*CHECKS, *GPU_CHECKS]


@pytest.fixture(scope="module", params=["collective", "symmetric"])
def gpu_results(
    request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXCHANGE_UNDER_TEST", request.param)
        return run_on_ranks(selected(ALL_CHECKS), ranks, tmp_path_factory.mktemp("gpu_ranks"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [check.__name__ for check in ALL_CHECKS])
def test_dispatch_on_gpus(name: str, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
