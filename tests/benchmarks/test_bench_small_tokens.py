"""Experts of few tokens on a CPU: who is timed, the bytes they must read, and what a row compares."""

from collections.abc import Iterator

import pytest
import small_tokens
import torch
from torch import nn

from tilemoe.integrations import transformers as integration
from tilemoe.shape import MoEShape

FEW_TOKENS = MoEShape(5, 32, 16, 8, 3)


@pytest.fixture
def layers() -> Iterator[list[nn.Module]]:
    integration.register()
    with torch.no_grad():
        yield small_tokens.make_layers(FEW_TOKENS, 2, torch.device("cpu"), torch.bfloat16)
    integration.unregister()


@pytest.mark.parametrize("name", small_tokens.IMPLEMENTATIONS)
def test_contestants_are_timed_and_a_wrong_one_is_not(name: str, layers: list[nn.Module]) -> None:
    calls = small_tokens.make_calls(layers, 5)
    outputs = small_tokens.run(layers, calls, name)
    assert small_tokens.problem(outputs, layers, calls) is None
    wrong = [outputs[0], 1.1 * outputs[1]]
    assert "layer 1 is off by " in str(small_tokens.problem(wrong, layers, calls))
    small_tokens.poison(outputs)
    assert small_tokens.problem(outputs, layers, calls) is not None


def test_a_row_compares_with_the_best_peer() -> None:
    ms = {"tilemoe": [0.1, 0.2, 0.1], "grouped_mm": [0.15, 0.3, 0.2], "batched_mm": [0.4, 0.1, 0.4]}
    row = small_tokens.row_of(ms, 10**8)
    assert (row["best_peer"], row["ratio"], row["gb_per_s"]) == ("grouped_mm", 1.5, 1000.0)
    text = small_tokens.describe({**row, "case": "c", "mode": "graph", "tokens": 4, "wrong": {"other": "off"}})
    assert "tilemoe 100.0" in text
    assert "grouped_mm over ours 1.50; other: off" in text
    alone = small_tokens.row_of({"grouped_mm": [1.0]}, 1)
    assert alone.keys() == {"ms"}
