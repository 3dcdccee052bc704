"""Experts in 4 bit, with adapters of PEFT, shared by two processes."""

from typing import Any

import pytest
from hf_quantized_checks import CHECKS
from ranks import named, run_on_ranks

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected(CHECKS), 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", named(CHECKS, *CHECKS))
def test_on_two_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
