"""On two or four GPUs, by NCCL and by symmetric memory: what `dispatch_checks` checks, and what only a GPU can show."""

from typing import Any

import pytest
import torch
from dispatch_checks import CHECKS, GPU_CHECKS

from tilemoe.testing.ranks import run_on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.dist]
ALL_CHECKS = [*CHECKS, *GPU_CHECKS]


@pytest.fixture(scope="module", params=["collective", "symmetric"])
def results(request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXCHANGE_UNDER_TEST", request.param)
        return run_on_ranks(selected(ALL_CHECKS), ranks, tmp_path_factory.mktemp("gpu_ranks"), "cuda")


@pytest.mark.parametrize("name", [check.__name__ for check in ALL_CHECKS])
def test_dispatch_on_gpus(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
