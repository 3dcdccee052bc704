"""The benchmark of agreement: on one process and two, and through a kill; and that a difference is not let pass."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import record
import train_agreement

from tilemoe.config import to_dict
from tilemoe.train.config import load_recipe


@pytest.fixture
def options(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "corpus").mkdir()
    for number in range(2 * train_agreement.HELDOUT_EVERY):
        (tmp_path / "corpus" / f"{number:04d}.txt").write_text(f"{number} and {number * number} words " * 3)
    recipe = load_recipe("smoke")
    data = replace(recipe.data, corpus=str(tmp_path / "corpus"), cache_dir=str(tmp_path / "cache"), batch_size=4)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(to_dict(replace(recipe, data=data))))
    return ["--recipe", str(path), "--device", "cpu", "--steps", "6", "--precision", "fp32"]


@pytest.mark.dist
def test_two_processes_train_as_one_and_a_difference_is_seen(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"losses: the losses differ by .* allowed is 0\.0"):
        train_agreement.main(["losses", *options, "--limit", "0"])
    (row,) = record.rows("train_agreement")
    assert 0 < row["greatest_difference"] < 1e-5
    assert (row["mode"], row["processes"], row["steps"]) == ("losses", 2, 6)
    train_agreement.report(
        train_agreement.argparse.Namespace(recipe="r", precision="fp32", processes=2, expert=1),
        "losses", run([1.0, 2.0]), run([1.0, 2.005]), limit=0.01,
    )  # fmt: skip
    assert record.rows("train_agreement")[1]["in_step"] == 2


@pytest.mark.dist
def test_a_killed_job_goes_on_bit_for_bit(options: list[str], tmp_path: Path) -> None:
    train_agreement.main(["kill", *options, "--kill-in-step", "4", "--save-every", "2", "--expert", "2"])
    (row,) = record.rows("train_agreement")
    assert (row["mode"], row["greatest_difference"], row["steps"]) == ("kill", 0.0, 6)
    assert row["kill_in_step"] == 4


def run(losses: list[float]) -> train_agreement.Run:
    found = train_agreement.Run.__new__(train_agreement.Run)
    found.losses, found.seconds = losses, 1.0
    return found
