"""The expert-parallel layer's row, of two processes on a CPU, and that a wrong layer is not timed."""

from typing import Any

import expert_parallel
import pytest
from ranks import run_on_ranks

from tilemoe.dispatch.all_to_all import AllToAllDispatcher
from tilemoe.shape import MoEShape

SHAPE = MoEShape(64, 32, 16, 8, 3)


def check_row() -> None:
    row = expert_parallel.measure(SHAPE, 2, 1, 0.001)
    assert row["ranks"] == 2
    # Nearly every token has an expert on the other process: twice T d elements out, twice back, of two bytes.
    most = 4 * 64 * 32 * 2
    assert 0.7 * most < row["bytes"] <= most
    assert row["link_ms"] == pytest.approx(row["bytes"] / 1e3)
    assert row["bound_ms"] == pytest.approx(row["compute_ms"]["median"] + row["link_ms"], rel=1e-3)
    assert row["over_bound"] == pytest.approx(row["layer_ms"]["median"] / row["bound_ms"], rel=1e-2)


def check_a_wrong_layer() -> None:
    """A layer whose sums come back wrong is not timed."""
    combine = AllToAllDispatcher.combine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllToAllDispatcher, "combine", lambda *args: 1.05 * combine(*args))
        with pytest.raises(AssertionError, match=r"the layer's output is off by .*: not timed"):
            expert_parallel.measure(SHAPE, 2, 1, 0.001)


@pytest.fixture(scope="module")
def found_by_ranks(selected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(selected([check_row, check_a_wrong_layer]), 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["check_row", "check_a_wrong_layer"])
def test_two_processes(name: str, found_by_ranks: dict[str, str]) -> None:
    assert not found_by_ranks[name], found_by_ranks[name]
