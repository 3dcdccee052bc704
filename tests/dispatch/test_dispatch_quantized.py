"""Tokens and their gradients that cross between four processes in FP8; also on Hopper GPUs."""

import pytest
import torch
from quantized_checks import CHECKS

pytestmark = pytest.mark.dist
NAMES = [check.__name__ for check in CHECKS]
ALL_CHECKS = CHECKS


@pytest.mark.parametrize("name", NAMES)
def test_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@pytest.fixture(scope="module")
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 is chosen for compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_dispatch_on_gpus(name: str, hopper: None, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
