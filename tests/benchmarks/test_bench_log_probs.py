"""Log-probabilities of sampling and training, of a tiny model on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import log_probs
import pytest

from tilemoe.bench import record
from tilemoe.integrations import transformers as integration


@pytest.fixture(autouse=True)
def aside(results: Path) -> Iterator[None]:
    yield
    integration.unregister()


def test_sampling_and_training_differ_by_rounding_alone() -> None:
    log_probs.main(["--sequences", "4", "--prompt-tokens", "8", "--new-tokens", "6", "--teach", "1"])
    found = record.rows("grpo")
    rows = [row for row in found if row["mode"] == "log_probs"]
    experts = [f"experts, {program}" for program in ("transformers", "tilemoe", "tilemoe, fp8")]
    expected = [("dense, transformers", False), *((name, replay) for name in experts for replay in (False, True))]
    assert [(row["model"], row["replay"]) for row in rows] == expected
    for row in rows:  # another token's log-probability would be off by a nat
        assert row["mean"] < 0.05 < 1 < row["nats_per_token"]
    whole = [row for row in found if row["mode"] == "parts"]
    assert [row["model"] for row in whole] == ["experts, tilemoe", "experts, tilemoe, fp8"]
    assert {"norm", "router", "router and experts", "projection", "head", "attention"} <= whole[0].keys()
