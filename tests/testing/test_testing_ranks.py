"""Checks of several processes: what one of them finds wrong hides nothing that comes after."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tilemoe.testing.ranks import run_on_ranks

pytestmark = pytest.mark.dist


def check_before() -> None:
    dist.barrier()


def check_that_fails_in_one_process() -> None:
    assert dist.get_rank() == 0, "error 3.00e-06, limit 1.00e-06"
    dist.barrier()  # waits for the other one in vain


def check_after() -> None:
    dist.barrier()


def test_the_checks_after_one_that_fails_are_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    results = run_on_ranks([check_before, check_that_fails_in_one_process, check_after], 2, tmp_path)
    problem = results.pop("check_that_fails_in_one_process")
    assert "error 3.00e-06, limit 1.00e-06" in problem
    assert "check_that_fails_in_one_process failed" in caplog.text
    assert results == {"check_before": "", "check_after": ""}
