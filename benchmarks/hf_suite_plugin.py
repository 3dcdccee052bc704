"""A plugin of pytest: models of transformers that name no implementation of their experts take tilemoe's.

`hf_suite` loads it into transformers' own tests. Each process appends to the file that the environment names how often
tilemoe computed a layer's experts outside of compiled code.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tilemoe.integrations import transformers as integration

CALLS_VARIABLE = "TILEMOE_CALLS_FILE"
_calls: Counter[str] = Counter()


def pytest_configure() -> None:
    _count_calls()
    integration.register()
    resolve = PreTrainedModel.get_correct_experts_implementation

    def resolved(self: PreTrainedModel, requested: str | None) -> Any:
        is_free = requested is None and self._can_set_experts_implementation()
        return resolve(self, integration.NAME if is_free else requested)

    PreTrainedModel.get_correct_experts_implementation = resolved  # a test's process, which ends with its tests


def _count_calls() -> None:
    forward = integration.experts_forward

    def counted(*arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            _calls["experts_forward"] += 1
        return forward(*arguments)

    integration.experts_forward = counted


def pytest_sessionfinish() -> None:
    with Path(os.environ[CALLS_VARIABLE]).open("a", encoding="utf-8") as file:
        file.write(f"{_calls['experts_forward']}\n")
