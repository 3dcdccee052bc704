"""What the processes of a module's ``CHECKS`` exchange rows by."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks


@pytest.fixture(scope="module", params=["collective", pytest.param("files", marks=pytest.mark.thorough)])
def results(request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """``files`` stand for symmetric memory: the same windows and kernels, which Triton interprets."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXCHANGE_UNDER_TEST", request.param)
        patch.setenv("WINDOWS", str(folder))
        patch.setenv("TRITON_INTERPRET", str(int(request.param == "files")))
        return run_on_ranks(selected(request.module.CHECKS), 4, folder)


@pytest.fixture(scope="module", params=["collective", "symmetric"])
def gpu_results(
    request: pytest.FixtureRequest, selected: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Of the module's ``ALL_CHECKS``, on four GPUs or two."""
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXCHANGE_UNDER_TEST", request.param)
        return run_on_ranks(selected(request.module.ALL_CHECKS), ranks, tmp_path_factory.mktemp("gpu_ranks"), "cuda")
