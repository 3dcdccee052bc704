"""Kernels of these tests are interpreted faster; a GPU that is not here is asked."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import interpreter
import pytest
import torch
import triton

from tilemoe.kernels import choose
from tilemoe.ops.moe import moe
from tilemoe.runtime import device as device_module
from tilemoe.runtime.device import Device

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.improve()


@pytest.fixture(params=[False, True], ids=["eager", "torch.compile"])
def function(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The operator of the experts, eager or compiled in one graph."""
    return torch.compile(moe, backend="aot_eager", fullgraph=True) if request.param else moe


@pytest.fixture
def on_hopper() -> None:
    """The test's kernels run on one architecture; elsewhere `select_kernels` is tested not to choose them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for compute capability 9.0")


@pytest.fixture
def have_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, tuple[int, int]], None]]:
    """Called with Triton's version and a compute capability: the GPU that is asked has it."""

    def forget() -> None:
        for asked in (device_module.why_no_triton, choose._known_experts_on, choose._known_router):
            asked.cache_clear()

    def have(version: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        found = Device(10 * capability[0] + capability[1], 227 * 1024, 132)
        monkeypatch.setattr(device_module, "gpu", lambda index: found)
        forget()

    yield have
    forget()
