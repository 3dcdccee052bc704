"""Recordings of launches without a GPU: what they repeat, and when."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from interpreter import passed_in_a_process

from tilemoe.kernels.triton import replay


def test_what_is_repeated_is_what_an_operator_does_by_itself() -> None:
    assert passed_in_a_process("replayed_launches.py") >= 253


def test_what_prepares_an_exchange_is_repeated() -> None:
    assert passed_in_a_process("replayed_exchange.py") >= 7


def test_which_recording_serves_and_who_else_takes_part() -> None:
    assert passed_in_a_process("replayed_rules.py") >= 27


def test_a_hook_of_either_kind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(metadata: Any) -> None: ...

    runtime = triton.knobs.runtime
    assert not replay.is_hooked()
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.add(hook)
        try:
            assert replay.is_hooked()
        finally:
            chain.remove(hook)
        assert not replay.is_hooked()
    for value, seen in ((hook, True), (None, False)):
        monkeypatch.setattr(runtime, "launch_enter_hook", value)
        assert replay.is_hooked() is seen
