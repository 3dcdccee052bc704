"""Muon on two and four processes: the weights of one, and a state that any number of processes goes on from."""

from pathlib import Path

import muon_checks as checks
import pytest
from distributed_checkpoint_checks import assert_state
from ranks import run_on_ranks

from tilemoe.train.checkpoints.folder import open_checkpoint

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def on_two(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(checks.ON_TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def on_four(on_two: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_on_ranks(checks.ON_FOUR, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", [check.__name__ for check in checks.ON_TWO])
def test_on_two_processes(name: str, on_two: dict[str, str]) -> None:
    assert not on_two[name], on_two[name]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [check.__name__ for check in checks.ON_FOUR])
def test_on_four_processes(name: str, on_four: dict[str, str]) -> None:
    assert not on_four[name], on_four[name]


@pytest.mark.usefixtures("on_two")
@pytest.mark.parametrize("name", ["FSDP", "EP"])
def test_one_process_goes_on_from_what_two_wrote(name: str, run_dir: Path) -> None:
    training = checks.make(None, seed=5)
    open_checkpoint(run_dir / name / "step_00000002").load_training(*training)
    assert_state(training, f"{name}_2.pt")
