"""Experts in 4 bit, with adapters of PEFT, shared by two processes."""

import pytest
from hf_quantized_checks import CHECKS
from ranks import named

pytestmark = pytest.mark.dist
RANKS = 2


@pytest.mark.parametrize("name", named(CHECKS, *CHECKS))
def test_on_two_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]
