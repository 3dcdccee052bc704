"""The expert-parallel layer's row, of two processes on a CPU."""

import argparse
from pathlib import Path

import expert_parallel
import pytest
from ranks import run_on_ranks

from tilemoe.shape import MoEShape

SHAPE = MoEShape(64, 32, 16, 8, 3)


def check_row() -> None:
    options = {"rounds": 2, "calls": 1, "exchange": "auto", "keep_received": False, "link_gb_per_s": 0.001}
    row = expert_parallel.measure(SHAPE, argparse.Namespace(**options))
    assert row["ranks"] == 2
    # Nearly every token has an expert on the other process: twice T d elements out, twice back, of two bytes.
    most = 4 * 64 * 32 * 2
    assert 0.7 * most < row["bytes"] <= most
    assert row["link_ms"] == pytest.approx(row["bytes"] / 1e3)
    assert row["bound_ms"] == pytest.approx(row["ms"]["compute"][0] + row["link_ms"], rel=1e-3)
    assert row["over_bound"] == pytest.approx(sum(row["ms"]["eager"]) / row["bound_ms"], rel=1e-2)


@pytest.mark.dist
def test_a_row_of_two_processes(tmp_path: Path) -> None:
    assert run_on_ranks([check_row], 2, tmp_path) == {"check_row": ""}
