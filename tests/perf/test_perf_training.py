"""The planner's whole model against recorded training runs and exchanges."""

from dataclasses import replace
from typing import Any

import pytest

from tilemoe.bench import cases, record
from tilemoe.config import MoEConfig
from tilemoe.kernels.experts.memory import saved_bytes
from tilemoe.perf.exchange import exchange_bytes, reached
from tilemoe.perf.hardware import GPUS
from tilemoe.perf.training import (
    USABLE,
    Setup,
    largest_micro_batch,
    memory_parts,
    router_saved_bytes,
    tokens_per_day,
)
from tilemoe.train.config import load_recipe

H200 = GPUS["H200"]


def setup_of(recipe: str, gpus: int) -> Setup:
    settings = load_recipe(recipe)
    return Setup(settings.model, H200, gpus, 1, settings.data.seq_len)


RUNS = record.rows("train_throughput", contestant="tilemoe")


@pytest.mark.parametrize("row", RUNS, ids=[f"{row['recipe']}-{row['processes']}-{row['time']}" for row in RUNS])
def test_memory_and_speed_are_those_of_recorded_runs(row: dict[str, Any]) -> None:
    setup = replace(
        setup_of(row["recipe"], row["processes"]), wrapped=row["sharded"], kept=row["between_micro_batches"]
    )
    parts = memory_parts(setup, row["batch_size"])
    assert sum(parts.values()) == pytest.approx(max(row["peak_bytes"]), rel=0.03)
    daily = tokens_per_day(setup, row["batch_size"], row["mfu"])
    assert daily / 86400 / row["processes"] == pytest.approx(row["tokens_per_second"], rel=1e-3)


def layer_of(name: str) -> MoEConfig:
    shape = cases.MAIN[name]
    return MoEConfig(shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.num_experts_per_tok)


@pytest.mark.parametrize(("name", "ranks"), [("7B-n256", 2), ("7B-n256", 4), ("Qwen3-Next", 2), ("Qwen3-Next", 4)])
def test_exchanged_bytes_are_those_recorded(name: str, ranks: int) -> None:
    tokens = cases.MAIN[name].num_tokens
    rows = [row for row in record.rows("expert_parallel", case=name, ranks=ranks) if "bytes" in row]
    (*_, row) = [row for row in rows if row.get("tokens", tokens) == tokens]  # older rows are of the case's own
    assert exchange_bytes(layer_of(name), tokens, ranks) == pytest.approx(row["bytes"], rel=2e-3)


def test_reached_by_hand() -> None:
    """Two of four experts on two processes: both on one in 2 of the 6 choices, else on both."""
    assert reached(MoEConfig(8, 8, 4, 2), 2) == pytest.approx((2 * 1 + 4 * 2) / 6)
    assert reached(MoEConfig(8, 8, 4, 2), 1) == 1
    assert exchange_bytes(MoEConfig(8, 8, 4, 2), 10, 1) == 0


def test_there_in_fp8_and_back_in_bf16() -> None:
    """Of a token that has an expert on both of two processes, one of which is its own: x, o, do and dx cross once."""
    moe, of_a_token = MoEConfig(256, 128, 2, 2), 2 * (256 + 4) + 2 * 512
    assert exchange_bytes(moe, 10, 2, "fp8") == 10 * of_a_token
    assert exchange_bytes(moe, 10, 2) == 10 * 4 * 512


def test_the_largest_micro_batch_fits_and_the_next_does_not() -> None:
    setup = setup_of("7b", 4)
    most = largest_micro_batch(setup)
    room = USABLE * 141e9
    assert most > 1
    assert sum(memory_parts(setup, most).values()) <= room < sum(memory_parts(setup, most + 1).values())


@pytest.mark.parametrize("name", cases.MAIN)
def test_what_a_layer_keeps_is_what_was_recorded(name: str) -> None:
    """The operator's bytes and the router's, beside the allocator's on the GPU."""
    shape = cases.MAIN[name]
    (*_, row) = record.rows("layer", case=name, contestant="tilemoe", mode="sustained")
    found = saved_bytes(shape) + router_saved_bytes(layer_of(name), shape.num_tokens)
    assert found == pytest.approx(row["saved_bytes"], rel=0.01)
