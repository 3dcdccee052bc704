"""What is proposed for a step: predicted seconds and bytes beside recorded steps, and the fastest that fits."""

from dataclasses import replace
from typing import Any

import pytest
from recorded import runs

from tilemoe.config import CHECKPOINTING_MODES, KEPT_BETWEEN_MICRO_BATCHES
from tilemoe.models.presets import MODEL_PRESETS
from tilemoe.perf.hardware import GPUS, find_gpu
from tilemoe.perf.proposal import CARDS, MARGIN, Choices, proposal_rows, propose, step_seconds
from tilemoe.perf.training import USABLE, Setup, fits, peak_bytes
from tilemoe.train.config import load_recipe

H100 = GPUS["H100"]
MODEL = load_recipe("7b").model
# Commits before which the trainer or the layer was slower than it is.
SLOWER = {"6d9b8d2f533d", "c5c39d29ad27"}


def setup_of_row(row: dict[str, Any]) -> Setup:
    if row["recipe"] == "olmoe":
        model, seq_len = MODEL_PRESETS["olmoe-1b-7b"], 4096
    else:
        recipe = load_recipe(row["recipe"].removesuffix("-16"))
        model, seq_len = recipe.model, recipe.data.seq_len
        if row["recipe"].endswith("-16"):
            model = replace(model, num_layers=16)
    gpus, kept = row["processes"], row["between_micro_batches"]
    is_wrapped, mode = row.get("sharded", gpus > 1), row.get("checkpointing", "none")
    return Setup(model, find_gpu(row["gpu"]), gpus, 1, seq_len, wrapped=is_wrapped, checkpointing=mode, kept=kept)


ROWS = [
    row for row in runs("train_throughput", "train_variants") if row["recipe"] != "wide" and row["commit"] not in SLOWER
]


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['recipe']}-{row['processes']}-{row['time']}" for row in ROWS])
def test_seconds_and_bytes_are_those_of_recorded_steps(row: dict[str, Any]) -> None:
    setup, size, parts = setup_of_row(row), row["batch_size"], row["accumulation"]
    mean = {"median": size * parts * setup.seq_len / row["tokens_per_second"]}  # where a row has no more
    seconds = row.get("step_seconds", mean)["median"]
    assert step_seconds(setup, size, parts) == pytest.approx(seconds, rel=0.1)
    peak = max(row.get("peak_bytes") or [row.get("peak_gib", 0) * 2**30])
    if peak:
        assert peak_bytes(setup, size, parts) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("card", CARDS)
def test_the_fastest_that_fits_is_proposed(card: int) -> None:
    """By going through all there are; of 8 GPUs, some of which share experts."""
    setup = Setup(MODEL, replace(H100, memory_gb=card), 8, 1, 4096)
    found = propose(setup, 6, Choices((1, 8)))
    every = [
        (step_seconds(each, size, 6 // size) * (1 if mode == "none" else MARGIN), size, each)
        for mode in CHECKPOINTING_MODES
        for kept in KEPT_BETWEEN_MICRO_BATCHES
        for shared in (1, 8)
        for size in (1, 2, 3, 6)
        for each in [replace(setup, checkpointing=mode, kept=kept, expert_parallel=shared)]
        if fits(each, size, 6 // size) and (kept == "nothing" or size < 6)
    ]
    if not every:
        assert found is None
        return
    assert found is not None
    assert found.bytes <= USABLE * card * 1e9
    assert found.ranked_seconds == min(every, key=lambda each: each[0])[0]
    assert found.sequences * found.accumulation == 6


def test_a_card_on_which_nothing_fits_says_how_many_gpus_would_do() -> None:
    (row,) = [row for row in proposal_rows(Setup(MODEL, H100, 4, 1, 4096), 24, Choices()) if row["memory_gb"] == 24]
    assert row["settings"] is None
    few = Setup(MODEL, replace(H100, memory_gb=24), row["fewest_gpus"], 1, 4096, checkpointing="block")
    assert fits(few, 1)
    assert not fits(replace(few, gpus=few.gpus // 2), 1)
