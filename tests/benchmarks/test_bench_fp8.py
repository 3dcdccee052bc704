"""fp8_quality.py: the runs of a seed differ by the precision alone, and what is recorded is what is shown.

E experts
"""

import json

import fp8_quality
import pytest

from tilemoe.bench import record


def shrunk() -> dict[str, object]:
    """The smoke recipe, with few steps and few held-out batches."""
    recipe = json.loads((fp8_quality.RECIPES / "fp8-smoke.json").read_text())
    recipe["train"] |= {"steps": 20, "eval_batches": 2}
    recipe["data"] |= {"batch_size": 2}
    return recipe


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "small.json").write_text(json.dumps(shrunk()))
    monkeypatch.setattr(fp8_quality, "RECIPES", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")


def test_runs_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "--recipe", "small", "--device", "cpu", "--seeds"]
    fp8_quality.main([*arguments, "1"])
    fp8_quality.main([*arguments, "1"])  # what is there is not repeated
    plain, quantised = record.rows("fp8_quality")
    assert [row["precision"] for row in (plain, quantised)] == ["bf16", "fp8"]
    for row in (plain, quantised):
        assert [step for step, _ in row["curve"]] == list(range(2, 21, 2))
        assert row["heldout_nats"] == row["curve"][-1][1] < row["curve"][0][1]
        assert set(row["gradients_off"]) == {"router.weight", "experts.w1", "experts.w2"}
    assert plain["heldout_nats"] != quantised["heldout_nats"]
    assert max(map(max, plain["gradients_off"].values())) < 1e-6  # the recipe is in fp32
    assert 1e-5 < max(map(max, quantised["gradients_off"].values())) < 0.05
    capsys.readouterr()
    fp8_quality.main(["table", "--recipe", "small"])
    lines = capsys.readouterr().out.splitlines()
    gap = 100 * (quantised["heldout_nats"] / plain["heldout_nats"] - 1)
    assert lines[2].startswith("| bf16 | 1 |")
    assert lines[3].startswith("| fp8 | 1 |")
    assert f"{gap:+.3f}%" in lines[3]
