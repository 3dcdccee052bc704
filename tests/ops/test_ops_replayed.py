"""Which calls of an operator may be recorded: those that nobody watches, on the GPU that launches go to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilemoe.runtime import launch_cache as replayed
from tilemoe.runtime.launch_cache import is_replayable
from tilemoe.runtime.operator import Operator


@pytest.fixture
def on_gpu_1(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands in for a tensor on the second GPU, which is the current one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(replayed, "has_triton", lambda: True)
    return SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=1))


def test_on_the_current_gpu(on_gpu_1: Any) -> None:
    assert is_replayable(on_gpu_1)


def test_not_where_launches_go_to_another_gpu(on_gpu_1: Any) -> None:
    on_gpu_1.device.index = 0
    assert not is_replayable(on_gpu_1)


def test_not_without_triton_nor_on_amd(on_gpu_1: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(replayed, "has_triton", lambda: False)
        assert not is_replayable(on_gpu_1)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert not is_replayable(on_gpu_1)


def test_not_where_a_mode_sees_what_is_allocated(on_gpu_1: Any) -> None:
    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with See():
        assert not is_replayable(on_gpu_1)
    assert is_replayable(on_gpu_1)


def test_on_a_cpu_every_call_runs_and_nothing_is_learnt() -> None:
    calls: list[Tensor] = []

    def run(x: Tensor, scale: float) -> Tensor:
        calls.append(x)
        return x * scale

    operator = Operator("scaled", run)
    x = torch.ones(3)
    for _ in range(4):
        assert torch.equal(operator(x, 2.0), 2 * x)
    assert len(calls) == 4
    assert operator._launches is not None
    assert operator._launches.known == {}
