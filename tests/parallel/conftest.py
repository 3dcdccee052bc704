"""What came of a module's ``CHECKS``, by the check's name, on four processes and on GPUs."""

from typing import Any

import pytest
import torch
from ranks import run_on_ranks


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected(request.module.CHECKS), 4, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def gpu_results(
    request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    return run_on_ranks(selected(request.module.CHECKS), ranks, tmp_path_factory.mktemp("gpu_ranks"), "cuda")
