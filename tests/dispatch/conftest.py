"""What the processes of a module's ``CHECKS`` exchange rows by."""

from pathlib import Path
from typing import Any

import pytest
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
