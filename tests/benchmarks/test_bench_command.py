"""`tilemoe bench` from end to end on CPU, and cold.py's start: short spells and small sizes, the rest is real."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cold
import pytest
import torch

from tilemoe.bench import cases, confirm, kernels, peers, record, step, timing
from tilemoe.cli.main import main
from tilemoe.runtime.verdict import Verdict
from tilemoe.shape import MoEShape

SHAPES = MappingProxyType({"7B-n256": MoEShape(96, 32, 16, 8, 2), "OLMoE": MoEShape(64, 24, 8, 4, 3)})
SIZES = ("num_tokens", "hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok")


@pytest.fixture(autouse=True)
def short(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.MATMUL["cpu"] < kernels.MATMUL["cuda"]
    monkeypatch.setattr(kernels, "MATMUL", {"cpu": 16})
    monkeypatch.setattr(kernels, "COPY_BYTES", {"cpu": 1024})
    monkeypatch.setattr(timing, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "SUSTAINED_MS", 1.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of both cases."""
    path = tmp_path / "cases.json"
    sizes = {name: {size: asdict(shape)[size] for size in SIZES} for name, shape in SHAPES.items()}
    path.write_text(json.dumps(sizes))
    return path


def bench(*arguments: object) -> int:
    return main(["bench", *map(str, arguments), "--rounds", "2"])


def test_layer_records_each_case_mode_and_contestant(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contestants = "tilemoe,tilemoe[torch],scattermoe"
    assert bench("layer", "--cases", file, "--peers", contestants, "--modes", "burst,sustained,alone") == 0
    rows = record.rows("layer")
    assert [(row["case"], row["mode"], row["contestant"]) for row in rows] == [
        (case, mode, name)
        for case in SHAPES
        for mode in ("burst", "sustained", "alone")
        for name in ("tilemoe", "tilemoe[torch]")
    ]
    assert all(row["forward_ms"]["median"] > 0 and row["backward_host_ms"] > 0 for row in rows)
    assert all(("forward_ratio" in row) == (row["contestant"] != "tilemoe") for row in rows)
    printed = capsys.readouterr().out
    assert "scattermoe is left out: it needs a GPU" in printed
    assert "OLMoE: " in printed


def test_a_precision_is_a_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "MAIN", {"multiples of 128": MoEShape(128, 256, 128, 8, 2)})
    names = ["tilemoe", "tilemoe[torch_fp8]"]
    assert bench("layer", "--peers", ",".join(names), "--modes", "burst") == 0
    assert [row["contestant"] for row in record.rows("layer")] == names


def test_a_wrong_contestant_is_not_timed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = peers.tilemoe_layer

    def wrong(shape: MoEShape, weights: peers.Weights, kernels: str | None = None) -> peers.Contestant:
        found = right(shape, weights)
        return peers.Contestant("wrong", "", lambda x: 2 * found.run(x), found.leaves, found.w1_rows)

    monkeypatch.setattr(peers, "PEERS", {"tilemoe": right, "wrong": wrong})
    assert bench("layer", "--cases", file, "--peers", "wrong,tilemoe", "--modes", "burst") == 0
    assert {row["contestant"] for row in record.rows("layer")} == {"tilemoe"}
    assert "wrong is left out: output is off by" in capsys.readouterr().out


def test_kernels_records_every_kernel_and_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ALL", SHAPES)
    assert bench("kernels", "--cases", "7B-n256", "--modes", "burst") == 0
    rows = {row["kernel"]: row for row in record.rows("kernels")}
    assert list(rows) == [
        "layer forward", "layer backward", "logits", "logits_grad", "route", "route_grad",
        "up_proj_act", "down_proj", "combine", "down_proj_dgrad_dact", "down_proj_wgrad",
        "up_proj_dgrad", "up_proj_wgrad", "combine_grad",
    ]  # fmt: skip
    assert {row["kernels"] for row in rows.values()} == {"torch"}
    assert all(row["of_layer"] > 0 for row in rows.values())


@pytest.mark.parametrize("why", [None, "dw1 is off"], ids=["passed", "wrong"])
def test_confirm_writes_one_file_with_the_self_test_and_the_times(
    why: str | None, file: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The torch backend stands for the GPU's; what is wrong is not timed, and the others are."""
    asked: list[Any] = []
    monkeypatch.setattr(confirm, "verdict", lambda *given, **options: asked.append(given) or Verdict(why, seconds=3.0))
    assert bench("confirm", "--kernels", "torch", "--peers", "tilemoe[torch],tilemoe,sonic-moe", "--cases", file) == 0
    assert asked == [("torch", torch.device("cpu"))]
    assert [path.name for path in results.iterdir() if path.suffix == ".jsonl"] == ["confirm.jsonl"]
    test, *rows = record.rows("confirm")
    assert (test["kernels"], test["passed"], test["why"]) == ("torch", why is None, why)
    assert {"driver", "capability", "commit", "gpu", "torch", "triton"} <= test.keys()
    names = ["tilemoe[torch]", "tilemoe"] if why is None else ["tilemoe"]
    assert [(row["case"], row["mode"], row["contestant"]) for row in rows] == [
        (case, mode, name) for case in SHAPES for mode in ("burst", "sustained") for name in names
    ]
    assert "sonic-moe is left out: it needs a GPU" in capsys.readouterr().out


def test_confirm_runs_the_tests_of_a_checkout(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their row is in the file to send, and what was there before is not."""
    record.append("gpu_tests", [{"passed": 1}])
    script = tmp_path / "benchmarks" / "record_tests.py"
    monkeypatch.setattr(record, "ROOT", tmp_path)
    confirm.run_tests("blackwell")
    assert record.rows("confirm") == []
    script.parent.mkdir()
    code = "import sys; from tilemoe.bench import record; record.append('gpu_tests', [{'asked': sys.argv[1:]}])"
    for text in (code, ""):
        script.write_text(text)
        confirm.run_tests("blackwell")
    row, nothing = record.rows("confirm")
    assert row["asked"] == ["gpu", "-k", "blackwell"]
    assert "recorded nothing" in nothing["unfinished"]


@pytest.mark.parametrize("what", ["layer", "kernels", "step"])
def test_without_a_gpu_the_default_is_small_and_says_so_as_it_goes(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The case and the rounds of the default, and only them; rates that a CPU has."""
    monkeypatch.setattr(cases, "MAIN", {"of a GPU": MoEShape(1 << 20, 4096, 4096, 128, 8)})
    monkeypatch.setattr(step, "VOCABULARY", 64)
    assert main(["bench", what]) == 0
    assert {(row["case"], row["rounds"]) for row in record.rows(what)} == {("small", 3)}
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first == f"bench {what}: loading PyTorch"
    assert second == "on cpu: small; 3 rounds (--cases and --rounds set others)"
    assert lines[0].startswith("small: MoEShape(num_tokens=256, ")
    for mode in ("burst", "sustained"):
        assert [line for line in lines if line.startswith(f"{mode}: ")] == [
            f"{mode}: round {i} of 3" for i in (1, 2, 3)
        ]
    assert not re.search(r"\b0(\.0+)? [GT](FLOP|B)/s", "\n".join(lines))
    assert any("GFLOP/s" in line for line in lines) == (what == "kernels")


def test_a_step_of_every_contestant_does_its_work(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "VOCABULARY", 64)
    assert bench("step", "--cases", file, "--peers", "tilemoe,tilemoe[torch]", "--modes", "burst") == 0
    rows = record.rows("step")
    assert [(row["case"], row["contestant"]) for row in rows] == [
        (case, name) for case in SHAPES for name in ("tilemoe", "tilemoe[torch]")
    ]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["step_ratio"] is None
        assert second["step_ratio"] > 0
        assert first["tokens_per_s"] == pytest.approx(1e3 * first["num_tokens"] / first["step_ms"]["median"], rel=0.01)


def test_a_cold_start_is_timed_for_each_case_and_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "MAIN", SHAPES)
    monkeypatch.setattr(cold, "DEVICE", "cpu")
    monkeypatch.setattr(cold, "COLD_TOKENS", 11)
    seconds = cold.cold("main", "tilemoe")
    assert list(seconds) == ["7B-n256", "OLMoE", "OLMoE, 11 tokens"]
    assert all(value >= 0 for value in seconds.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("layer", "--cases", "OLMo"), "no case called 'OLMo'"),
        (("layer", "--cases", "nowhere.json"), "nowhere.json cannot be read"),
        (("layer", "--modes", "brisk"), "--modes of layer are burst, sustained, alone; got 'brisk'"),
        (("kernels", "--modes", "alone"), "--modes of kernels are burst, sustained; got 'alone'"),
        (("layer", "--kernels", "triton"), "name the backend of bench layer in --peers 'tilemoe[triton]'"),
        (("kernels", "--peers", "tilemoe", "--cases", "x"), "--peers is for bench layer and step; name the backend of"),
        (("layer", "--seconds", "nan", "--cases", "x"), "--seconds must be a number >= 0, got nan"),
        (("everything",), "everything"),
    ],
)
def test_what_is_off_is_named(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("cases_of_file", "message"),
    [
        ([], "expected a table of cases"),
        ({"a": {"num_tokens": 8}}, "a.hidden_size: required by MoEShape"),
        ({"a": dict.fromkeys(SIZES, 0)}, "must be"),
        ({"a": {**dict.fromkeys(SIZES, 8), "rows": 4}}, "a.rows cannot be set"),
        ({"a": {**dict.fromkeys(SIZES, 8), "num_experts": 9}}, "a.num_experts must be at most 8"),
        ({"a": {**dict.fromkeys(SIZES, 8), "num_tokens": "8"}}, "a.num_tokens must be an integer"),
    ],
)
def test_a_file_of_cases_that_is_off(cases_of_file: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases_of_file))
    with pytest.raises(ValueError, match=message):
        cases.find(str(path))
