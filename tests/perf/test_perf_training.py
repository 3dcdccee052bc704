"""The planner's whole model against recorded training runs; exchanges against recorded, drawn and published ones."""

import random
from dataclasses import replace
from typing import Any

import pytest
from recorded import runs

from tilemoe.bench import cases, record
from tilemoe.config import MoEConfig, RouterConfig
from tilemoe.kernels.experts.memory import saved_bytes
from tilemoe.perf.exchange import Hosts, copies, crossing_ms, exchange_bytes, exchange_plan, reached
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
GROUPED = MoEConfig(7168, 2048, 256, 8, router=RouterConfig(num_groups=8, top_groups=4))


def setup_of(recipe: str, gpus: int) -> Setup:
    settings = load_recipe(recipe)
    return Setup(settings.model, H200, gpus, 1, settings.data.seq_len)


RUNS = [row for row in runs("train_throughput") if row["checkpointing"] == "none"]  # test_perf_proposal: others, too


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


@pytest.mark.parametrize("groups", [(1, 1), (8, 4), (8, 1)])
@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_copies_are_those_of_drawn_routings(groups: tuple[int, int], hosts: int) -> None:
    """To the GPUs themselves, and to the GPU with the sender's index of each host, which passes them on."""
    dice, gpus, draws, experts = random.Random(hosts), 4, 4000, 256
    router = RouterConfig(num_groups=groups[0], top_groups=groups[1])
    counted = {"one exchange": [0, 0], "two levels": [0, 0]}
    for _ in range(draws):
        own_host, own = dice.randrange(hosts), dice.randrange(gpus)
        eligible = dice.sample(range(groups[0]), groups[1])
        chosen = dice.sample([e for e in range(experts) if e * groups[0] // experts in eligible], 8)
        places = {divmod(e * hosts * gpus // experts, gpus) for e in chosen}
        for host, gpu in places:
            counted["one exchange"][host == own_host] += (host, gpu) != (own_host, own)
            counted["two levels"][1] += gpu != own
        counted["two levels"][0] += len({host for host, _ in places} - {own_host})
    found = copies(MoEConfig(16, 16, experts, 8, router=router), Hosts(hosts, gpus, 1.0, 1.0))
    for way, numbers in counted.items():
        assert found[way] == pytest.approx([number / draws for number in numbers], rel=0.04, abs=0.05)


def test_one_host_is_the_exchange_of_a_host() -> None:
    """In bytes, and its milliseconds twice those of the forward."""
    plan = exchange_plan(GROUPED, 4096, GPUS["H200"], Hosts(1, 8, 370.0, 50.0), "fp8")
    seconds = exchange_bytes(GROUPED, 4096, 8, "fp8") / 370e9
    for way in plan["ways"].values():
        assert way["network_copies"] == 0
        assert 2 * way["exchange_ms"] == pytest.approx(1e3 * seconds)
        gained = [layer - alone for layer, alone in zip(way["layer_ms"], plan["computed_ms"], strict=True)]
        assert gained == pytest.approx([way["exchange_ms"]] * 2)


# DeepEP's normal kernels (github.com/deepseek-ai/DeepEP, docs/legacy.md): H800s with 160 GB/s NVLink and 50 GB/s RDMA
# at most, 4,096 tokens, d 7168, 8 of 256 experts, of at most 4 hosts. GB/s of dispatch and combine, of what its tests
# count: copies to hosts, or to GPUs where there is one host, the sender's own included.
PUBLISHED = {1: (153, 158), 2: (43, 43), 4: (58, 57), 8: (51, 50)}


@pytest.mark.parametrize("hosts", PUBLISHED)
def test_published_rates_are_somewhat_below_the_predicted(hosts: int) -> None:
    moe = MoEConfig(7168, 2048, 256, 8, router=RouterConfig(num_groups=hosts, top_groups=min(hosts, 4)))
    counted = reached(moe, 8 if hosts == 1 else hosts)
    milliseconds = crossing_ms(moe, 4096, Hosts(hosts, 8, 160.0, 50.0), "two levels", 1.0)
    predicted = 4096 * counted / milliseconds / 1e6
    for published in PUBLISHED[hosts]:
        assert 0.75 < published / predicted < 0.9


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
