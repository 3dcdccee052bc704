"""A plugin of pytest: models of transformers that name no implementation of their experts take tilemoe's.

`hf_suite` loads it into transformers' own tests. Each process appends to the file that the environment names how often
tilemoe computed a layer's experts outside of compiled code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tilemoe.integrations import transformers as integration

CALLS_VARIABLE = "TILEMOE_CALLS_FILE"


class CountedExperts:
    """`experts_forward`, and a plugin of pytest that writes at the end how often it was called."""

    def __init__(self) -> None:
        self._forward, self._calls = integration.experts_forward, 0

    def forward(self, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._calls += 1
        return self._forward(*arguments)

    def pytest_sessionfinish(self) -> None:
        with Path(os.environ[CALLS_VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(f"{self._calls}\n")


def pytest_configure(config: pytest.Config) -> None:
    counted = CountedExperts()
    config.pluginmanager.register(counted)
    integration.experts_forward = counted.forward
    integration.register()
    resolve = PreTrainedModel.get_correct_experts_implementation

    def resolved(self: PreTrainedModel, requested: str | None) -> Any:
        is_free = requested is None and self._can_set_experts_implementation()
        return resolve(self, integration.NAME if is_free else requested)

    PreTrainedModel.get_correct_experts_implementation = resolved  # a test's process, which ends with its tests
