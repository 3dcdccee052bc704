"""Each benchmark from end to end on CPU: its clock and its GPU's figures are stand-ins, everything else is real."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cases
import peers
import pytest
import record
import run
import timing
import torch

from tilemoe.shape import MoEShape

SHAPES = MappingProxyType({"7B-n256": MoEShape(96, 32, 16, 8, 2), "OLMoE": MoEShape(64, 24, 8, 4, 3)})


class Event:
    """A device event by the host's clock."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.time - self.time)

    def synchronize(self) -> None:
        """The host has waited already."""


@pytest.fixture(autouse=True)
def on_cpu(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ALL", SHAPES)
    monkeypatch.setattr(cases, "MAIN", SHAPES)
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(run, "MATMUL", 16)
    monkeypatch.setattr(run, "COPY_BYTES", 1024)
    monkeypatch.setattr(run, "COLD_TOKENS", 11)
    monkeypatch.setattr(timing, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "SUSTAINED_MS", 1.0)
    monkeypatch.setattr(timing, "event", Event)
    monkeypatch.setattr(timing, "memory_of", lambda work: (work(), 1000, 3000))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def arguments(what: str, **others: Any) -> argparse.Namespace:
    options = {"cases": "main", "modes": "burst,sustained", "rounds": 2, "seconds": float("inf"), "kernels": None}
    return argparse.Namespace(what=what, **{**options, "peers": "tilemoe", **others})


def test_layer_records_each_case_mode_and_contestant(capsys: pytest.CaptureFixture[str]) -> None:
    run.each_case(arguments("layer", peers="tilemoe,tilemoe[torch],scattermoe"))
    rows = record.rows("layer")
    assert [(row["case"], row["mode"], row["contestant"]) for row in rows] == [
        (case, mode, name)
        for case in SHAPES
        for mode in ("burst", "sustained")
        for name in ("tilemoe", "tilemoe[torch]")
    ]
    assert all(row["forward_ms"]["median"] > 0 and row["backward_host_ms"] > 0 for row in rows)
    assert all(("forward_ratio" in row) == (row["contestant"] != "tilemoe") for row in rows)
    printed = capsys.readouterr().out
    assert "scattermoe is left out: not importable" in printed
    assert "OLMoE: " in printed


def test_a_precision_is_a_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "MAIN", {"multiples of 128": MoEShape(128, 256, 128, 8, 2)})
    names = ["tilemoe", "tilemoe[torch_fp8]"]
    torch.manual_seed(0)
    run.each_case(arguments("layer", peers=",".join(names), modes="burst"))
    assert [row["contestant"] for row in record.rows("layer")] == names


def test_a_wrong_contestant_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = peers.tilemoe_layer

    def wrong(shape: MoEShape, weights: peers.Weights, kernels: str | None = None) -> peers.Contestant:
        found = right(shape, weights)
        return peers.Contestant("wrong", "", lambda x: 2 * found.run(x), found.leaves, found.w1_rows)

    monkeypatch.setattr(peers, "PEERS", {"tilemoe": right, "wrong": wrong})
    run.each_case(arguments("layer", peers="wrong,tilemoe", modes="burst"))
    assert {row["contestant"] for row in record.rows("layer")} == {"tilemoe"}
    assert "wrong is left out: output is off by" in capsys.readouterr().out


def test_no_case_is_begun_when_the_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    run.each_case(arguments("layer", seconds=0.0, modes="burst", cases="OLMoE,7B-n256"))
    assert "OLMoE and the cases after it are left out" in capsys.readouterr().out


def test_a_case_that_fails_leaves_the_ones_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Callable[..., peers.Weights] = peers.make_weights

    def fail_second(shape: MoEShape, *others: Any) -> peers.Weights:
        if shape == SHAPES["OLMoE"]:
            raise RuntimeError("taken away")
        return make(shape, *others)

    monkeypatch.setattr(peers, "make_weights", fail_second)
    with pytest.raises(RuntimeError, match="taken away"):
        run.each_case(arguments("layer", modes="burst"))
    assert [row["case"] for row in record.rows("layer")] == ["7B-n256"]


def test_kernels_records_every_kernel_and_the_router() -> None:
    run.each_case(arguments("kernels", cases="7B-n256", modes="burst"))
    rows = {row["kernel"]: row for row in record.rows("kernels")}
    assert list(rows) == [
        "layer forward", "layer backward", "logits", "logits_grad", "route", "route_grad",
        "up_proj_act", "down_proj", "combine", "down_proj_dgrad_dact", "down_proj_wgrad",
        "up_proj_dgrad", "up_proj_wgrad", "combine_grad",
    ]  # fmt: skip
    assert {row["kernels"] for row in rows.values()} == {"torch"}
    assert all(row["of_layer"] > 0 for row in rows.values())


def test_cold_child_times_each_case_and_other_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    run.cold_child(arguments("cold-child"))
    seconds = json.loads(capsys.readouterr().out.splitlines()[-1])["seconds"]
    assert list(seconds) == ["7B-n256", "OLMoE", "OLMoE, 11 tokens"]
    assert all(value >= 0 for value in seconds.values())
