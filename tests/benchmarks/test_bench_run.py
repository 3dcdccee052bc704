"""The cold start on a CPU, and what run.py passes on to `tilemoe bench`."""

from __future__ import annotations

import argparse
import json

import pytest
import run

from tilemoe.bench import cases
from tilemoe.shape import MoEShape

SHAPES = {"7B-n256": MoEShape(96, 32, 16, 8, 2), "OLMoE": MoEShape(64, 24, 8, 4, 3)}


def test_cold_child_times_each_case_and_other_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "MAIN", SHAPES)
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(run, "COLD_TOKENS", 11)
    run.cold_child(argparse.Namespace(cases="main", peers="tilemoe"))
    seconds = json.loads(capsys.readouterr().out.splitlines()[-1])["seconds"]
    assert list(seconds) == ["7B-n256", "OLMoE", "OLMoE, 11 tokens"]
    assert all(value >= 0 for value in seconds.values())
