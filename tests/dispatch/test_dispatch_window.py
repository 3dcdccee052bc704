"""Windows over files: the protocol with pauses and planted faults, what does not fit, backwards in any order."""

from pathlib import Path
from typing import Any

import pytest
import window_checks
from ranks import named, run_on_ranks

pytestmark = pytest.mark.dist
CHECKS = window_checks.CHECKS


@pytest.fixture(scope="module")
def results(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXCHANGE_UNDER_TEST", "files")
        patch.setenv("WINDOWS", str(folder))
        patch.setenv("TRITON_INTERPRET", "1")
        return run_on_ranks(selected(CHECKS), 4, folder)


@pytest.mark.parametrize("name", named(CHECKS, *CHECKS))
def test_four_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
