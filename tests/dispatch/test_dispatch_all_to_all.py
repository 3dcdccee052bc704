"""Four processes that share a layer's experts compute what one does, and send no more than they must; also on GPUs."""

import pytest
from dispatch_checks import CHECKS, GPU_CHECKS

pytestmark = pytest.mark.dist
ALL_CHECKS = [*CHECKS, *GPU_CHECKS]


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [check.__name__ for check in ALL_CHECKS])
def test_dispatch_on_gpus(name: str, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
