"""benchmarks/jobs.py on a small text: one recipe trained in several ways."""

from pathlib import Path

import jobs
import pytest

from tilemoe.bench import record

pytest.importorskip("transformers")


def test_ways_are_runs_of_one_seed(results: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number}.txt").write_text(f"{number} and {number * number} are a number and its square.\n" * 20)
    options = ["--recipe", "smoke", "--data.corpus", str(corpus), "--data.heldout-every", "4", "--train.steps", "6"]
    more = ["--train.eval-every", "3", "--train.save-every", "0", "--train.log-every", "2", "--train.no-plot"]
    jobs.ways([("top-K", "1"), ("nearest", "1")], options + more, tmp_path)
    topk, nearest = record.rows("ways")
    assert [topk["way"], nearest["way"]] == ["top-K", "nearest"]
    assert str(corpus) not in topk["options"], "no machine's paths"
    for row in (topk, nearest):
        (first, before), (last, after) = row["heldout_nats_per_token"]
        assert (first, last) == (3, 6)
        assert after < before
        ours, theirs = row["exported_nats_per_token"].values()
        assert ours == pytest.approx(theirs, rel=1e-5), row
    assert topk["dropped_pairs"] == topk["added_pairs"] == 0 < nearest["dropped_pairs"]
    assert nearest["training_tokens"] == topk["training_tokens"]
