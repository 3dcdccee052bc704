"""fp8_quality.py: the runs of a seed differ by the precision alone, and what is recorded is what is shown.

E experts
"""

import json
from pathlib import Path

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
    plain, quantised, dense = record.rows("fp8_quality")
    assert [row["precision"] for row in (plain, quantised, dense)] == ["bf16", "fp8", "fp8+dense"]
    for row in (plain, quantised, dense):
        assert [step for step, _ in row["curve"]] == list(range(2, 21, 2))
        assert row["heldout_nats"] == row["curve"][-1][1] < row["curve"][0][1]
        assert set(row["gradients_off"]) == {"router.weight", "experts.w1", "experts.w2"}
    assert len({row["heldout_nats"] for row in (plain, quantised, dense)}) == 3
    assert max(map(max, plain["gradients_off"].values())) < 1e-6  # the recipe is in fp32
    assert 1e-5 < max(map(max, quantised["gradients_off"].values())) < 0.05
    capsys.readouterr()
    fp8_quality.main(["table", "--recipe", "small"])
    lines = capsys.readouterr().out.splitlines()
    gap = 100 * (quantised["heldout_nats"] / plain["heldout_nats"] - 1)
    assert lines[2].startswith("| bf16 | 1 |")
    assert lines[3].startswith("| fp8 | 1 |")
    assert f"{gap:+.3f}%" in lines[3]


def test_branches_go_on_where_the_run_was() -> None:
    common = ["--recipe", "small", "--device", "cpu", "--seeds", "1", "--precisions"]
    fp8_quality.main(["run", *common, "bf16"])
    fp8_quality.main(["forks", *common, "bf16,fp8", "--fork-at", "12"])
    (whole,) = record.rows("fp8_quality")
    plain, quantised = record.rows("fp8_forks")
    assert [row["precision"] for row in (plain, quantised)] == ["bf16", "fp8"]
    assert plain["before"] == quantised["before"] == whole["curve"][:6]
    assert plain["curve"] == whole["curve"][6:]
    assert [step for step, _ in quantised["curve"]] == [14, 16, 18, 20]
    assert plain["curve"] != quantised["curve"]
    with pytest.raises(ValueError, match="fork-at"):
        fp8_quality.main(["forks", *common, "bf16", "--fork-at", "20"])


def test_processes_share_the_run_that_branches_start_from(tmp_path: Path) -> None:
    common = ["forks", "--recipe", "small", "--device", "cpu", "--first-seed", "3", "--seeds", "1", "--fork-at", "14"]
    common += ["--trunks", str(tmp_path / "trunks"), "--precisions"]
    fp8_quality.main([*common, "fp8"])
    (saved,) = (tmp_path / "trunks").glob("*/trunk.pt")
    when = saved.stat().st_mtime_ns
    fp8_quality.main([*common, "fp8", "--all-wgrads"])
    narrow, wide = record.rows("fp8_forks")
    assert saved.stat().st_mtime_ns == when
    assert narrow["seed"] == wide["seed"] == 3
    assert narrow["before"] == wide["before"]
    assert narrow["curve"] != wide["curve"]
    assert (narrow["all_wgrads"], wide["all_wgrads"]) == (False, True)
    (tmp_path / "other.txt").write_text("another corpus " * 4000)
    with pytest.raises(ValueError, match="another corpus"):
        fp8_quality.main([*common, "fp8", "--corpus", str(tmp_path / "other.txt")])


def end_to_end(digest: str, heldout: float, *options: str) -> dict[str, object]:
    curve = {"heldout": [[10, 2.0, 0.5, False], [20, heldout, 0.4, True]]}
    arguments = ["--train.seed", "3", *options, "--optim.lr", "1e-3"]
    return {"recipe": "r", "steps": 20, "arguments": arguments, "corpus_digest": digest, "pretrain": curve}


def test_curves_of_runs_that_differ_in_precision_alone(capsys: pytest.CaptureFixture[str]) -> None:
    in_fp8 = ["--model.moe.precision", "fp8", "--train.dense-precision", "fp8"]
    rows = [end_to_end("a", 1.0), end_to_end("b", 1.01, *in_fp8), end_to_end("a", 9.0, "--train.accumulation", "2")]
    record.append("end_to_end", [*rows, {"recipe": "r", "steps": 20, "arguments": []}])
    fp8_quality.main(["curves", "--recipe", "r"])
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert [cell.partition(",")[0] for cell in first.strip("| ").split(" | ")] == ["step", "bf16", "fp8+dense"]
    assert lines[:3] == ["| 10 | 2.0000 | 2.0000 (+0.000%) |", "| 20 | 1.0000 | 1.0100 (+1.000%) |", "corpus: a, b"]
    assert lines[4:] == ["| ---: | ---: |", "| 10 | 2.0000 |", "| 20 | 9.0000 |", "corpus: a"]
