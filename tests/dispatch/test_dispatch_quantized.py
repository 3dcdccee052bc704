"""Tokens and their gradients that cross between four processes in FP8; also on Hopper GPUs."""

from typing import Any

import pytest
import torch
from quantized_checks import CHECKS
from ranks import run_on_ranks

pytestmark = pytest.mark.dist
NAMES = [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("name", NAMES)
def test_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@pytest.fixture(scope="module", params=["collective", "symmetric"])
def gpu_results(
    request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 is chosen for compute capability 9.0")
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXCHANGE_UNDER_TEST", request.param)
        return run_on_ranks(selected(CHECKS), ranks, tmp_path_factory.mktemp("gpu_ranks"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_dispatch_on_gpus(name: str, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
