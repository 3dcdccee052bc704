"""A decoder that four processes share, and two or four GPUs through NCCL, gives the loss and the gradients of one."""

import accumulation_checks
import parallel_checks
import pytest

pytestmark = pytest.mark.dist
CHECKS = [*parallel_checks.CHECKS, *accumulation_checks.CHECKS]


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_decoder_on_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_decoder_on_gpus(name: str, gpu_results: dict[str, str]) -> None:
    assert not gpu_results[name], gpu_results[name]
